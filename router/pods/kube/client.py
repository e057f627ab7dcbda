"""The API server over HTTP, by the official client: kinds and versions in, raw objects and events out.

Knows credentials, deadlines and sizes; decides nothing. Safe to use by several threads. The official client
takes about a second to import, so this module is imported only by who needs it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes import client as _client
from kubernetes import config as _config
from kubernetes.client.rest import RESTClientObject

from router.errors import ClusterError, ConfigError
from router.pods.kube.objects import BadObjectError, Counted, Head, ObjectList, Status, WatchEvent, read

_log = logging.getLogger(__name__)

# The package finds credentials and knows how to connect with them; answers are read by msgspec.
official: Any = _client
credentials: Any = _config

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONNECT_S = 5.0
_ANSWER_S = 30.0
# etcd takes objects of up to 1.5 MiB; written as JSON they are a few times as large.
_PAGE_OBJECTS = 100
_PAGE_BYTES_MAX = 256 << 20
_EVENT_BYTES_MAX = 8 << 20
_STATUS_BYTES_MAX = 1 << 16
_MESSAGE_BYTES_MAX = 200
_PIECE_BYTES = 1 << 16
_CONFLICT = 409
_NO_QUERY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Kind:
    """Objects that are listed or watched."""

    group: str  # "" for the core group
    version: str
    plural: str  # as in paths
    namespace: str  # "" for what is of the whole cluster
    selector: str = ""  # label selector; "" for none
    name: str = ""  # only the object of this name; "" for all

    @property
    def path(self) -> str:
        group = ("apis", self.group) if self.group else ("api",)
        namespace = ("namespaces", quote(self.namespace, safe="")) if self.namespace else ()
        return "/".join(("", *group, self.version, *namespace, self.plural))

    @property
    def query(self) -> dict[str, str]:
        field = f"metadata.name={self.name}" if self.name else ""
        return {"labelSelector": self.selector, "fieldSelector": field}


_REVIEWS = {
    "TokenReview": Kind("authentication.k8s.io", "v1", "tokenreviews", ""),
    "SubjectAccessReview": Kind("authorization.k8s.io", "v1", "subjectaccessreviews", ""),
}


class KubeClient:
    """One API server.

    Args:
        kubeconfig: None: the service account of the pod that we run in, else the user's own.

    Raises:
        ConfigError: There are no credentials, or they cannot be read.
    """

    def __init__(self, kubeconfig: Path | None) -> None:
        self._file = None if kubeconfig is None else str(kubeconfig)
        self._in_cluster = kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            self._configuration, self._http = self._load()
        except ClusterError as error:
            raise ConfigError(f"--kubeconfig: {error}") from error

    @property
    def namespace(self) -> str:
        """Where we are, by POD_NAMESPACE, the service account or the kubeconfig's context; else "default"."""
        if from_environment := os.environ.get("POD_NAMESPACE"):
            return from_environment
        try:
            if self._in_cluster:
                return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
            _, active = credentials.list_kube_config_contexts(self._file)
            return active["context"].get("namespace") or "default"
        except (credentials.ConfigException, OSError, KeyError, TypeError):
            return "default"

    def renew(self) -> None:
        """Reads the credentials again: tokens expire, certificates are exchanged.

        Raises:
            ClusterError: They cannot be read now.
        """
        old = self._http
        self._configuration, self._http = self._load()
        old.clear()

    def pages(self, kind: Kind) -> Iterator[ObjectList]:
        """All objects of a kind as they are now, page by page.

        Raises:
            ClusterError: It is refused or broke off; 410 when it took too long for the server.
        """
        more = ""
        while True:
            query = {**kind.query, "limit": str(_PAGE_OBJECTS), "continue": more}
            with _refusals(kind.path):
                objects = read(self._ask("GET", kind.path, query), ObjectList)
            yield objects
            more = objects.metadata.continue_ or ""
            if not more:
                return

    def watch(self, kind: Kind, version: str, *, lasts_s: float, silent_s: float) -> WatchStream:
        """What happens to the objects of a kind after a version.

        Args:
            lasts_s: After this the server ends it.
            silent_s: A connection that brings nothing for so long is taken for dead.

        Raises:
            ClusterError: It is refused; 410 when the version is too old.
        """
        query = {
            **kind.query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, int(lasts_s))),
        }
        return WatchStream(self._open("GET", kind.path, query, read_s=silent_s), kind.path)

    def uid(self, namespace: str, pod: str) -> str:
        """The uid of a pod; "" if it cannot be had."""
        path = f"{Kind('', 'v1', 'pods', namespace).path}/{quote(pod, safe='')}"
        try:
            return read(self._ask("GET", path), Head).metadata.uid
        except (ClusterError, BadObjectError):
            return ""

    def post_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Create a Kubernetes Event with count 1, or add 1 to the count of the one that has its name.

        Raises:
            ClusterError: The API server refuses it, or does not answer.
        """
        events = Kind("", "v1", "events", namespace).path
        path = f"{events}/{quote(event['metadata']['name'], safe='')}"
        try:
            self._ask("POST", events, body={**event, "count": 1})
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            # The router may create and patch Events, not read them: the answer to a patch tells the count.
            last = {"lastTimestamp": event["lastTimestamp"]}
            with _refusals(path):
                known = read(self._ask("PATCH", path, body=last), Counted).count
            self._ask("PATCH", path, body={"count": (known or 0) + 1})

    def review(self, kind: str, spec: Mapping[str, Any]) -> bytes:
        """Asks whose a token is ("TokenReview"), or what somebody may do ("SubjectAccessReview").

        Raises:
            ClusterError: It is refused, or there is no answer.
        """
        asked = _REVIEWS[kind]
        body = {"apiVersion": f"{asked.group}/{asked.version}", "kind": kind, "spec": spec}
        return self._ask("POST", asked.path, body=body)

    def _ask(self, method: str, path: str, query: Mapping[str, str] = _NO_QUERY, body: Any = None) -> bytes:
        return _read_all(self._open(method, path, query, body), path)

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] = _NO_QUERY,
        body: Any = None,
        read_s: float = _ANSWER_S,
    ) -> urllib3.BaseHTTPResponse:
        """Asks; the answer's body is not read yet.

        Raises:
            ClusterError: It is refused, or there is no answer.
        """
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": content_type}
        with _refusals(path):
            secrets = self._configuration.auth_settings().values()
            response = self._http.request(
                method,
                self._configuration.host + path,
                fields={name: value for name, value in query.items() if value} or None,
                json=body,
                headers=headers | {secret["key"]: secret["value"] for secret in secrets},
                timeout=urllib3.Timeout(connect=_CONNECT_S, read=read_s),
                preload_content=False,
                # The caller knows better when to try again.
                retries=False,
            )
        if 200 <= response.status < 300:
            return response
        refusal = _read_all(response, path, _STATUS_BYTES_MAX)
        try:
            message = read(refusal, Status).message
        except BadObjectError:
            message = None
        text = message or refusal[:_MESSAGE_BYTES_MAX].decode(errors="replace")
        raise ClusterError(response.status, f"{path}: {response.status} {text}")

    def _load(self) -> tuple[Any, urllib3.PoolManager]:
        configuration = official.Configuration()
        try:
            if self._in_cluster:
                credentials.load_incluster_config(configuration)
            else:
                credentials.load_kube_config(
                    self._file, client_configuration=configuration, persist_config=False
                )
            return configuration, RESTClientObject(configuration).pool_manager
        except (credentials.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            raise ClusterError(0, f"no credentials for a cluster: {error}") from error


@dataclass(frozen=True, slots=True)
class WatchStream:
    """Events as they come; to be read by one thread."""

    response: urllib3.BaseHTTPResponse
    what: str

    def __iter__(self) -> Iterator[WatchEvent]:
        """The events.

        Raises:
            ClusterError: The connection broke or fell silent, or the server gave up; 410 when the version is
                too old.
        """
        waiting = bytearray()
        with _refusals(self.what):
            for piece in self.response.stream(_PIECE_BYTES):
                waiting += piece
                *lines, rest = waiting.split(b"\n")
                for line in filter(bytes.strip, map(bytes, lines)):
                    event = read(line, WatchEvent)
                    if event.type == "ERROR":
                        status = read(event.object, Status)
                        raise ClusterError(status.code, f"{self.what}: {status.reason}: {status.message}")
                    yield event
                waiting = rest
                if len(waiting) > _EVENT_BYTES_MAX:
                    raise ClusterError(0, f"{self.what}: an event of more than {_EVENT_BYTES_MAX} bytes")

    def stop(self) -> None:
        """Ends it from another thread: who reads gets a ClusterError or the end."""
        try:
            self.response.shutdown()
        except (OSError, ValueError, RuntimeError) as error:
            # It has ended by itself.
            _log.debug("watch of %s: %s", self.what, error)

    def close(self) -> None:
        self.response.close()
        self.response.release_conn()


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Makes a ClusterError of whatever goes wrong on the way to the API server."""
    try:
        yield
    except urllib3.exceptions.ReadTimeoutError as error:
        raise ClusterError(0, f"{what}: the connection fell silent") from error
    except BadObjectError as error:
        raise ClusterError(0, f"{what}: what came cannot be read: {error}") from error
    except (urllib3.exceptions.HTTPError, OSError, credentials.ConfigException) as error:
        raise ClusterError(0, f"{what}: {error}") from error


def _read_all(response: urllib3.BaseHTTPResponse, what: str, bytes_max: int = _PAGE_BYTES_MAX) -> bytes:
    data, deadline_s = bytearray(), time.monotonic() + _ANSWER_S
    with _refusals(what):
        try:
            for piece in response.stream(_PIECE_BYTES):
                data += piece
                if len(data) > bytes_max or time.monotonic() > deadline_s:
                    response.close()
                    raise ClusterError(0, f"{what}: an answer of more than {len(data)} bytes, or too slow")
        finally:
            response.release_conn()
    return bytes(data)
