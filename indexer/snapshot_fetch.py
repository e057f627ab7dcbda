"""Fetches snapshots over HTTP on threads of its own, so that the events' thread never waits.

Addresses come in, snapshots or the reason why there is none go to a callback, on the worker's thread. Bodies
are read up to a cap, and given up after a time in all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import urllib3

from indexer.snapshot import Snapshot, SnapshotError, read_snapshot

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
    """

    def __init__(self, *, at_once: int, max_bytes: int, total_s: float) -> None:
        self._max_bytes = max_bytes
        self._total_s = total_s
        self._closing = threading.Event()
        self._http = urllib3.PoolManager(
            num_pools=at_once, retries=False, timeout=urllib3.Timeout(connect=_CONNECT_S, read=_IDLE_S)
        )
        self._workers = ThreadPoolExecutor(at_once, "kvroute-snapshots")

    def fetch(self, url: str, deliver: Callable[[Snapshot | SnapshotError], None]) -> None:
        """Begins to fetch and returns."""
        self._workers.submit(self._run, url, deliver)

    def close(self) -> None:
        """Gives up what runs; idempotent."""
        self._closing.set()
        self._workers.shutdown(cancel_futures=True)
        self._http.clear()

    def _run(self, url: str, deliver: Callable[[Snapshot | SnapshotError], None]) -> None:
        try:
            answer = self._get(url)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            _log.info("no snapshot from %s: %s", url, error)
            answer = SnapshotError("unreachable")
        except Exception:
            _log.exception("snapshot from %s", url)
            answer = SnapshotError("internal_error")
        deliver(answer)

    def _get(self, url: str) -> Snapshot | SnapshotError:
        ends_s = time.monotonic() + self._total_s
        response = self._http.request("GET", url, preload_content=False, decode_content=False, redirect=False)
        try:
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
        return read_snapshot(bytes(body))
