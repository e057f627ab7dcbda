"""Client of the Kubernetes API server: lists, watches, Events and reviews, with timeouts and size limits.

Thread-safe. Importing the official client takes about a second, so import this module only where needed.
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

# The official package loads credentials and opens connections; responses are parsed by msgspec.
official: Any = _client
credentials: Any = _config

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CONNECT_S = 5.0
_ANSWER_S = 30.0
# etcd stores objects of up to 1.5 MiB; as JSON they are a few times as large.
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
    """Resource to list or watch, with its namespace and filters."""

    group: str  # "" for the core group
    version: str
    plural: str  # name in URL paths
    namespace: str  # "" for cluster-scoped resources
    selector: str = ""  # label selector; "" for none
    name: str = ""  # restricts to one object; "" for all

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
    """Client of one API server.

    Args:
        kubeconfig: Credentials file; None for the pod's service account, or outside a cluster the default
            kubeconfig.

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
        """Namespace from POD_NAMESPACE, the service account or the kubeconfig's context; else "default"."""
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
        """Reload the credentials, because tokens expire and certificates rotate.

        Raises:
            ClusterError: The credentials cannot be read now.
        """
        old = self._http
        self._configuration, self._http = self._load()
        old.clear()

    def pages(self, kind: Kind) -> Iterator[ObjectList]:
        """Yield all current objects of a kind, page by page.

        Raises:
            ClusterError: The list was rejected or interrupted; status 410 if its continue token expired.
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
        """Watch the objects of a kind for changes after a resource version.

        Args:
            lasts_s: Duration in seconds after which the server ends the watch.
            silent_s: Read timeout in seconds; a connection that is silent for longer is closed.

        Raises:
            ClusterError: The watch was rejected; status 410 if the version is too old.
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
        """Return the uid of a pod, or "" if it cannot be read."""
        path = f"{Kind('', 'v1', 'pods', namespace).path}/{quote(pod, safe='')}"
        try:
            return read(self._ask("GET", path), Head).metadata.uid
        except (ClusterError, BadObjectError):
            return ""

    def post_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Create a Kubernetes Event with count 1, or increment the count of the Event with the same name.

        Raises:
            ClusterError: The API server rejects the Event or does not answer.
        """
        events = Kind("", "v1", "events", namespace).path
        path = f"{events}/{quote(event['metadata']['name'], safe='')}"
        try:
            self._ask("POST", events, body={**event, "count": 1})
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            # The router's role may create and patch Events but not get them; a patch returns the count.
            last = {"lastTimestamp": event["lastTimestamp"]}
            with _refusals(path):
                known = read(self._ask("PATCH", path, body=last), Counted).count
            self._ask("PATCH", path, body={"count": (known or 0) + 1})

    def review(self, kind: str, spec: Mapping[str, Any]) -> bytes:
        """Post a TokenReview or SubjectAccessReview and return the response body.

        Raises:
            ClusterError: The API server rejects the review or does not answer.
        """
        review = _REVIEWS[kind]
        body = {"apiVersion": f"{review.group}/{review.version}", "kind": kind, "spec": spec}
        return self._ask("POST", review.path, body=body)

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
        """Send a request and return the response with its body unread; raises ClusterError without one."""
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
                # The caller decides when to retry.
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
    """Open watch; iterate over it from one thread."""

    response: urllib3.BaseHTTPResponse
    what: str

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yield events until the server ends the watch.

        Raises:
            ClusterError: The connection broke or timed out, or the server reported an error; status 410 if
                the version is too old.
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
                    raise ClusterError(0, f"{self.what}: event larger than {_EVENT_BYTES_MAX} bytes")

    def stop(self) -> None:
        """Stop the watch from another thread; the reading thread gets a ClusterError or the end."""
        try:
            self.response.shutdown()
        except (OSError, ValueError, RuntimeError) as error:
            # The watch has already ended.
            _log.debug("watch shutdown failed: path=%s error=%s", self.what, error)

    def close(self) -> None:
        self.response.close()
        self.response.release_conn()


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Convert connection and parse errors to ClusterError."""
    try:
        yield
    except urllib3.exceptions.ReadTimeoutError as error:
        raise ClusterError(0, f"{what}: read timeout") from error
    except BadObjectError as error:
        raise ClusterError(0, f"{what}: invalid response: {error}") from error
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
                    raise ClusterError(0, f"{what}: response too large or too slow: {len(data)} bytes read")
        finally:
            response.release_conn()
    return bytes(data)
