"""Administration over the metrics port, by bearer token: cache resets, and pods without Kubernetes."""

from __future__ import annotations

import hmac
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from common.page_server import Request
from indexer.pod_entry import parse_pods
from router.pods.pod_set import Pod, PodSet, PodsFile, PodsSource

if TYPE_CHECKING:
    from indexer import KvIndexer

RESET, WORKERS = "/reset_prefix_cache", "/workers"
_METHODS = {RESET: ("POST",), WORKERS: ("GET", "POST", "DELETE")}
_TIMEOUT_S, _TIMEOUT_MAX_S, _POLL_S = 30.0, 120.0, 0.02
_THREADS = 32


class _Worker(msgspec.Struct):
    url: str
    name: str = ""
    labels: dict[str, str] = {}


_WORKER = msgspec.json.Decoder(_Worker)


@dataclass(frozen=True, slots=True)
class Admin:
    """Handler of administration requests. Thread-safe; calls block."""

    token: str | None  # of --admin-token-file; None: all requests are rejected
    pods: PodSet
    source: PodsSource
    index: KvIndexer
    _resetting: Lock = field(default_factory=Lock)

    def answer(self, request: Request) -> tuple[int, Any]:
        """Return status and JSON value of the response."""
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if self.token is None:
            return 403, {"error": "administration needs --admin-token-file"}
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return 401, {"error": "wrong or missing bearer token"}
        if request.method not in _METHODS[request.path]:
            return 405, {"error": f"{request.path} takes {', '.join(_METHODS[request.path])}"}
        try:
            return self._reset(request) if request.path == RESET else self._workers(request)
        except (ValueError, OSError, RecursionError) as error:
            return 400, {"error": str(error)}

    def _workers(self, request: Request) -> tuple[int, Any]:
        """List, add or remove pods that the pods file does not name."""
        if not isinstance(self.source, PodsFile):
            return 409, {"error": "pods come from Kubernetes; use --pods-file, whose endpoints may be empty"}
        if request.method != "GET":
            worker = _WORKER.decode(request.body)
            url = urlsplit(worker.url)
            if url.scheme != "http" or not url.hostname or not url.port:
                raise ValueError(f"url: expected http://HOST:PORT, got {worker.url[:200]!r}")
            address = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_STREAM)[0][4][0]
            pod = {"name": worker.name or url.netloc, "address": address, "port": str(url.port)}
            text = msgspec.json.encode({"endpoints": [{**pod, "labels": worker.labels}]}).decode()
            (entry,) = parse_pods(text, WORKERS)
            if not self.source.register(entry, remove=request.method == "DELETE"):
                return 409, {"error": "no such worker is registered, or too many are"}
        workers = [{"url": f"http://{one.pod}", "name": one.name} for one in self.source.registered]
        return 200, {"workers": workers}

    def _reset(self, request: Request) -> tuple[int, Any]:
        """Reset the prefix caches of all pods, and wait until their events prove it."""
        timeout_s = float(request.query.get("timeout", _TIMEOUT_S))
        if not 0.0 < timeout_s <= _TIMEOUT_MAX_S:
            raise ValueError(f"timeout: expected seconds above 0 and up to {_TIMEOUT_MAX_S:g}")
        if not self._resetting.acquire(blocking=False):
            return 409, {"error": "another reset is in progress"}
        try:
            begun_s, pods = time.monotonic(), self.pods.current
            ends_s = begun_s + timeout_s
            with ThreadPoolExecutor(_THREADS) as threads:
                whys = threads.map(lambda pod: self._reset_pod(pod, ends_s), pods.values())
                failed = {address: why for address, why in zip(pods, whys, strict=True) if why}
            unproven = self._unproven(pods.keys() - failed, begun_s)
            while any(unproven.values()) and time.monotonic() < ends_s:
                time.sleep(_POLL_S)
                unproven = self._unproven(pods.keys() - failed, begun_s)
        finally:
            self._resetting.release()
        for address in unproven:
            self.index.invalidate(address, "reset_by_hand", emptied=True, seen_s=begun_s)
        told = {address: why or "its events are not received" for address, why in unproven.items()}
        result = {"pods": len(pods), "proven": not (failed or told), "not_proven": told, "failed": failed}
        return 502 if failed else 200, result

    def _unproven(self, pods: set[str], begun_s: float) -> dict[str, str]:
        """Return why pods have not published a reset since `begun_s`; "" where no events will come."""
        engines = [one for one in self.index.engine_registry.engines.values() if one.stream.pod in pods]
        why = dict.fromkeys(pods - {one.stream.pod for one in engines if one.linked}, "")
        late = [one for one in engines if one.stream.pod not in why and one.emptied_s < begun_s]
        return why | {one.stream.pod: f"no event has shown the reset; stream {one.state}" for one in late}

    def _reset_pod(self, pod: Pod, ends_s: float) -> str:
        """Reset a pod's cache; return what failed, else ""."""
        entry, left_s = pod.entry, max(0.1, ends_s - time.monotonic())
        # The token is sent to the admin port only.
        target = (entry.pod, None) if entry.admin is None else (entry.admin, self.token)
        why = _post(*target, RESET, b"", left_s)
        if not why and pod.models is not None and not pod.asleep:
            # vLLM publishes the reset with its next step, so an idle engine needs a request.
            body = {"model": pod.models.base, "prompt": [1], "max_tokens": 1}
            _post(entry.pod, None, "/v1/completions", msgspec.json.encode(body), left_s)
        return why


def _post(address: str, token: str | None, path: str, body: bytes, timeout_s: float) -> str:
    """Send a POST request; return what failed, else ""."""
    host, _, port = address.rpartition(":")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
    try:
        with closing(HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)) as connection:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            text = response.read(4096)
    except (OSError, HTTPException) as error:
        return f"{path}: {error!r}"
    if response.status != 200:
        return f"{path} answered {response.status}"
    return f"{path}: requests are running" if b'"success":false' in text.replace(b" ", b"") else ""
