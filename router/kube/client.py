"""The API server over HTTP, by the official client: kinds and versions in, raw objects and events out.

Knows credentials, deadlines and sizes; decides nothing. Safe to use by several threads. The official client
takes about a second to import, so this module is imported only by who needs it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client as _client
from kubernetes import config as _config

from router.errors import ClusterError, ConfigError
from router.kube.objects import BadObjectError, Counted, Head, ObjectList, Status, WatchEvent, read

_log = logging.getLogger(__name__)

# Its types are those of answers that were read for us; here they are read by msgspec.
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
_OK, _NOT_OK, _CONFLICT = 200, 300, 409
_RAW: dict[str, Any] = {"_request_timeout": (_CONNECT_S, _ANSWER_S), "_preload_content": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """What is listed or watched.

    Attributes:
        group: "" for the core group.
        plural: As in paths.
        selector: Label selector; "" for none.
        name: Only the object of this name; "" for all.
    """

    group: str
    version: str
    plural: str
    namespace: str
    selector: str = ""
    name: str = ""


class KubeClient:
    """One API server.

    Args:
        kubeconfig: None: the service account of the pod that we run in, else the user's own.

    Raises:
        ConfigError: There are no credentials, or they cannot be read.
    """

    def __init__(self, kubeconfig: Path | None) -> None:
        self._kubeconfig = kubeconfig
        self._in_cluster = kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            self._api = self._load()
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
        old, self._api = self._api, self._load()
        old.rest_client.pool_manager.clear()

    def pages(self, kind: Kind) -> Iterator[ObjectList]:
        """All objects of a kind as they are now, page by page.

        Raises:
            ClusterError: It is refused or broke off; 410 when it took too long for the server.
        """
        more = ""
        while True:
            page = {"_continue": more} if more else {}
            data = self._read_all(self._get(kind, limit=_PAGE_OBJECTS, **page))
            try:
                objects = read(data, ObjectList)
            except BadObjectError as error:
                raise ClusterError(0, f"{kind.plural}: a list that cannot be read: {error}") from error
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
        response = self._get(
            kind,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=max(1, int(lasts_s)),
            _request_timeout=(_CONNECT_S, silent_s),
        )
        return WatchStream(response, kind.plural)

    def uid(self, namespace: str, pod: str) -> str:
        """The uid of a pod; "" if it cannot be had."""
        try:
            with _refusals("pods"):
                core = official.CoreV1Api(self._api)
                answer = self._checked(core.read_namespaced_pod(pod, namespace, **_RAW), "pods")
            return read(answer, Head).metadata.uid
        except (ClusterError, BadObjectError):
            return ""

    def post_event(self, namespace: str, event: dict[str, Any]) -> None:
        """Create a Kubernetes Event with count 1, or add 1 to the count of the one that has its name.

        Raises:
            ClusterError: The API server refuses it, or does not answer.
        """
        core, name = official.CoreV1Api(self._api), event["metadata"]["name"]

        def patched(change: dict[str, Any]) -> bytes:
            with _refusals("events"):
                return self._checked(core.patch_namespaced_event(name, namespace, change, **_RAW), "events")

        try:
            with _refusals("events"):
                self._checked(
                    core.create_namespaced_event(namespace, {**event, "count": 1}, **_RAW), "events"
                )
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            # The router may create and patch Events, not read them: the answer to a patch tells the count.
            answer = patched({"lastTimestamp": event["lastTimestamp"]})
            try:
                known = read(answer, Counted).count
            except BadObjectError as unreadable:
                raise ClusterError(0, f"events: an Event that cannot be read: {unreadable}") from unreadable
            patched({"count": (known or 0) + 1})

    def review(self, kind: str, spec: Mapping[str, Any]) -> bytes:
        """Asks whose a token is ("TokenReview"), or what somebody may do ("SubjectAccessReview").

        Raises:
            ClusterError: It is refused, or there is no answer.
        """
        with _refusals(kind):
            if kind == "TokenReview":
                asked = official.AuthenticationV1Api(self._api).create_token_review
            else:
                asked = official.AuthorizationV1Api(self._api).create_subject_access_review
            return self._checked(asked({"kind": kind, "spec": spec}, **_RAW), kind)

    @property
    def _file(self) -> str | None:
        return None if self._kubeconfig is None else str(self._kubeconfig)

    def _get(self, kind: Kind, **parameters: Any) -> urllib3.BaseHTTPResponse:
        if kind.selector:
            parameters["label_selector"] = kind.selector
        if kind.name:
            parameters["field_selector"] = f"metadata.name={kind.name}"
        parameters = {**_RAW, **parameters}
        with _refusals(kind.plural):
            response: urllib3.BaseHTTPResponse
            if kind.group:
                custom, path = official.CustomObjectsApi(self._api), (kind.namespace, kind.plural)
                response = custom.list_namespaced_custom_object(kind.group, kind.version, *path, **parameters)
            else:
                assert kind.plural == "pods"
                response = official.CoreV1Api(self._api).list_namespaced_pod(kind.namespace, **parameters)
        if response.status != _OK:
            raise _refusal(response.status, self._read_all(response, _STATUS_BYTES_MAX), kind.plural)
        return response

    def _checked(self, response: urllib3.BaseHTTPResponse, what: str) -> bytes:
        answer = self._read_all(response)
        if not _OK <= response.status < _NOT_OK:
            raise _refusal(response.status, answer, what)
        return answer

    def _read_all(self, response: urllib3.BaseHTTPResponse, bytes_max: int = _PAGE_BYTES_MAX) -> bytes:
        data, deadline_s = bytearray(), time.monotonic() + _ANSWER_S
        with _refusals("the answer"):
            try:
                for piece in response.stream(_PIECE_BYTES):
                    data += piece
                    if len(data) > bytes_max or time.monotonic() > deadline_s:
                        response.close()
                        raise ClusterError(0, f"an answer of more than {len(data)} bytes, or too slow")
            finally:
                response.release_conn()
        return bytes(data)

    def _load(self) -> Any:
        configuration = official.Configuration()
        try:
            if self._in_cluster:
                credentials.load_incluster_config(client_configuration=configuration)
            else:
                credentials.load_kube_config(
                    self._file, client_configuration=configuration, persist_config=False
                )
        except (credentials.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            raise ClusterError(0, f"no credentials for a cluster: {error}") from error
        # Who calls knows better when to try again.
        configuration.retries = False
        return official.ApiClient(configuration)


class WatchStream:
    """Events as they come; to be read by one thread."""

    def __init__(self, response: urllib3.BaseHTTPResponse, plural: str) -> None:
        self._response = response
        self._plural = plural

    def __iter__(self) -> Iterator[WatchEvent]:
        """The events.

        Raises:
            ClusterError: The connection broke or fell silent, or the server gave up; 410 when the version is
                too old.
        """
        waiting = bytearray()
        with _refusals(self._plural):
            for piece in self._response.stream(_PIECE_BYTES):
                waiting += piece
                *lines, rest = waiting.split(b"\n")
                for line in lines:
                    if line.strip():
                        yield self._event(bytes(line))
                waiting = rest
                if len(waiting) > _EVENT_BYTES_MAX:
                    raise ClusterError(0, f"{self._plural}: an event of more than {_EVENT_BYTES_MAX} bytes")

    def stop(self) -> None:
        """Ends it from another thread: who reads gets a ClusterError or the end."""
        connection = self._response.connection
        held = getattr(connection, "sock", None)
        if held is not None:
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.debug("watch of %s: %s", self._plural, error)

    def close(self) -> None:
        self._response.close()
        self._response.release_conn()

    def _event(self, line: bytes) -> WatchEvent:
        try:
            event = read(line, WatchEvent)
            if event.type == "ERROR":
                status = read(event.object, Status)
                raise ClusterError(status.code, f"{self._plural}: {status.reason}: {status.message}")
        except BadObjectError as error:
            raise ClusterError(0, f"{self._plural}: an event that cannot be read: {error}") from error
        return event


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Makes a ClusterError of whatever goes wrong on the way to the API server."""
    try:
        yield
    except official.ApiException as error:
        raise _refusal(error.status or 0, (error.body or "").encode(), what) from error
    except urllib3.exceptions.ReadTimeoutError as error:
        raise ClusterError(0, f"{what}: the connection fell silent") from error
    except (urllib3.exceptions.HTTPError, OSError, credentials.ConfigException) as error:
        raise ClusterError(0, f"{what}: {error}") from error


def _refusal(status: int, body: bytes, what: str) -> ClusterError:
    try:
        message = read(body, Status).message
    except BadObjectError:
        message = None
    text = message or body[:_MESSAGE_BYTES_MAX].decode(errors="replace")
    return ClusterError(status, f"{what}: {status} {text}")
