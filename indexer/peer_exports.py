"""Answers peers that ask for our view of an engine: who may be told, how many at once, and for how long.

Requests come in on the threads of a gRPC server; the view is listed on the subscriber's thread meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from indexer.errors import PeerError
from indexer.peer_identity import PeerIdentity
from indexer.peer_metrics import PeerMetrics
from indexer.peer_wire import snapshot_messages
from indexer.view_parts import ViewSnapshot

_log = logging.getLogger(__name__)

_AT_ONCE = 4


class PeerExports:
    """Tells views to peers. Thread-safe.

    Args:
        identity: Who we are.
        export: Lists an engine's view, given its name in the index and its model; see `Subscriber.export`.
        metrics: Where outcomes are counted.
        total_s: Longest time that a view may take to be listed.

    Attributes:
        identity: Who we are.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        export: Callable[[str, str], Future[ViewSnapshot]],
        metrics: PeerMetrics,
        *,
        total_s: float,
    ) -> None:
        self.identity = identity
        self._export = export
        self._metrics = metrics
        self._total_s = total_s
        self._free = threading.Semaphore(_AT_ONCE)

    def messages(self, asker: PeerIdentity, engine: str, model: str) -> Iterator[bytes]:
        """The messages of a snapshot, see `peer_wire`.

        Args:
            asker: Who asks.
            engine: The engine's name in the index.
            model: Its base model.

        Raises:
            PeerError: It is not told.
        """
        started_s = time.monotonic()
        outcome = "given_up"
        try:
            self.identity.admit(asker)
            if not self._free.acquire(blocking=False):
                raise PeerError("busy", f"{_AT_ONCE} views are being told already")
            try:
                for message in snapshot_messages(self._listed(engine, model)):
                    self._metrics.told_bytes.inc(len(message))
                    yield message
            finally:
                self._free.release()
            outcome = "completed"
            self._metrics.told_s.observe(time.monotonic() - started_s)
        except PeerError as error:
            outcome = error.reason
            _log.info("view of %s not told to a peer: %s", engine, error)
            raise
        finally:
            self._metrics.told.labels(outcome).inc()

    def _listed(self, engine: str, model: str) -> ViewSnapshot:
        told = self._export(engine, model)
        try:
            return told.result(self._total_s)
        except FutureTimeoutError:
            told.cancel()
            raise PeerError("timeout", f"the view was not listed in {self._total_s:g} s") from None
