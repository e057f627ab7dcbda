"""Fetches snapshots on threads of its own, so that the events' thread never waits.

Streams come in, snapshots or the reason why there is none go to a callback, on the worker's thread. The
engine is asked first, over HTTP, then our peers are. Bodies are read up to a cap, and given up after a time
in all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import urllib3

from indexer.config import PodStream
from indexer.snapshot import Fetched, Snapshot, SnapshotError, read_snapshot
from indexer.view_parts import ViewSnapshot

Ask = Callable[[PodStream], tuple[ViewSnapshot | None, int]]

_log = logging.getLogger(__name__)

_NOT_OFFERED = frozenset({404, 405, 501})
_PIECE_BYTES = 1 << 18
_CONNECT_S = 3.0
# Without a byte for this long it has failed, so that `close` is not kept waiting by a silent server.
_IDLE_S = 5.0


class SnapshotFetcher:
    """Fetches several at once.

    Args:
        at_once: How many; further ones wait for their turn.
        max_bytes: Largest body.
        total_s: Longest time of one.
        admin_token: Bearer secret that is sent to ports of administration; None: no secret is.
        others: Asked in this order for what an engine does not tell, by source: a stream in, a view or None
            and its size in bytes out.
    """

    def __init__(
        self,
        *,
        at_once: int,
        max_bytes: int,
        total_s: float,
        admin_token: str | None = None,
        others: Mapping[str, Ask] = MappingProxyType({}),
    ) -> None:
        self._authorization = {} if admin_token is None else {"Authorization": f"Bearer {admin_token}"}
        self._max_bytes = max_bytes
        self._total_s = total_s
        self._others = others
        self._closing = threading.Event()
        self._http = urllib3.PoolManager(
            num_pools=at_once, retries=False, timeout=urllib3.Timeout(connect=_CONNECT_S, read=_IDLE_S)
        )
        self._workers = ThreadPoolExecutor(at_once, "kvroute-snapshots")

    def fetch(self, stream: PodStream, deliver: Callable[[Fetched], None], *, others: bool) -> None:
        """Begins to fetch, from the engine or else from others, if they may be asked, and returns."""
        self._workers.submit(self._run, stream, deliver, self._others if others else {})

    def close(self) -> None:
        """Gives up what runs; idempotent."""
        self._closing.set()
        self._workers.shutdown(cancel_futures=True)
        self._http.clear()

    def _run(self, stream: PodStream, deliver: Callable[[Fetched], None], others: Mapping[str, Ask]) -> None:
        try:
            fetched = Fetched(None) if stream.snapshot_url is None else self._of_engine(stream)
            for source, ask in others.items():
                if fetched.answer is None:
                    snapshot, size_bytes = ask(stream)
                    fetched = Fetched(snapshot, size_bytes, fetched.refusal, source)
        except Exception:
            _log.exception("snapshot of %s", stream.holder)
            fetched = Fetched(None, refusal="internal_error")
        deliver(fetched)

    def _of_engine(self, stream: PodStream) -> Fetched:
        url = stream.snapshot_url or ""
        try:
            body = self._get(url, self._authorization if stream.snapshot_admin else {})
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            _log.info("no snapshot from %s: %s", url, error)
            return Fetched(None, refusal="unreachable")
        if isinstance(body, SnapshotError):
            return Fetched(None, refusal=body.reason)
        answer: Snapshot | SnapshotError = read_snapshot(body)
        if isinstance(answer, SnapshotError):
            return Fetched(None, refusal=answer.reason)
        return Fetched(answer, len(body))

    def _get(self, url: str, headers: Mapping[str, str]) -> bytes | SnapshotError:
        ends_s = time.monotonic() + self._total_s
        response = self._http.request(
            "GET", url, headers=headers, preload_content=False, decode_content=False, redirect=False
        )
        try:
            if response.status in (401, 403):
                _log.warning(
                    "snapshot refused, the view needs a replay or a peer: url=%s status=%d; "
                    "--admin-token-file must hold the model server's token, and the pod's label "
                    "kvroute.io/admin-port name its port",
                    url,
                    response.status,
                )
            if response.status != 200:
                return SnapshotError("not_offered" if response.status in _NOT_OFFERED else "refused")
            body = bytearray()
            # read1 gives what is there: a body that trickles in cannot outlast the time in all.
            while piece := response.read1(_PIECE_BYTES):
                body += piece
                if len(body) > self._max_bytes:
                    return SnapshotError("too_large")
                if time.monotonic() > ends_s or self._closing.is_set():
                    return SnapshotError("timeout")
        finally:
            # Not to be used again: what is left of the body is nobody's.
            response.close()
        return bytes(body)
