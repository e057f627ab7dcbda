"""Takes the streams of all pods: decodes their batches, applies them to the index, counts what happens.

The sink of the subscriber; everything here runs on its thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from indexer.apply import Applied, PodView
from indexer.config import IndexerConfig, PodStream
from indexer.decode import BROKEN_EVENT, Decoded, decode_batch
from indexer.errors import PayloadError
from indexer.index import Index
from indexer.keys import BlockHasher
from indexer.metrics import IndexerMetrics
from indexer.sink import Verdict
from indexer.speculate import Speculation
from indexer.stream import StreamState

_log = logging.getLogger(__name__)

# Skipped for these reasons, a store leaves the view as it should be.
_HARMLESS = frozenset({"unknown_hash"})


class Ingest:
    """The views of all pods that are followed.

    Args:
        config: Bounds.
        index: Where blocks go.
        hasher: Makes their keys.
        speculation: Is told what is confirmed.
        metrics: Where all is counted.
        on_stored: See `KvIndexer`.
        on_link: See `KvIndexer`.
        clock: A monotonic clock, in seconds.
        wall_clock: The clock of event time stamps, seconds since the epoch.
    """

    def __init__(
        self,
        config: IndexerConfig,
        *,
        index: Index,
        hasher: BlockHasher,
        speculation: Speculation,
        metrics: IndexerMetrics,
        on_stored: Callable[[str, Sequence[int], float], None],
        on_link: Callable[[str, bool], None],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._index = index
        self._hasher = hasher
        self._speculation = speculation
        self._metrics = metrics
        self._on_stored = on_stored
        self._on_link = on_link
        self._clock = clock
        self._wall_clock = wall_clock
        self._views: dict[str, PodView] = {}
        self._linked: set[str] = set()
        # Read by other threads; replaced as a whole.
        self._states: Mapping[str, StreamState] = {}

    @property
    def states(self) -> Mapping[str, StreamState]:
        """State of every pod's stream; any thread may read it."""
        return self._states

    def opened(self, stream: PodStream) -> None:
        """See `StreamSink.opened`."""
        self._views[stream.pod] = PodView(
            stream.pod, stream.model, index=self._index, hasher=self._hasher, config=self._config
        )
        _log.info("following %s (%s) at %s", stream.pod, stream.model, stream.events_endpoint)

    def closed(self, pod: str) -> None:
        """See `StreamSink.closed`."""
        self._views.pop(pod).clear()
        self._speculation.drop_pod(pod)
        self._states = {other: state for other, state in self._states.items() if other != pod}
        self._linked.discard(pod)
        self._metrics.subscribers.set(len(self._linked))
        self._metrics.forget(pod)
        _log.info("%s is not followed any more", pod)

    def apply(self, pod: str, payloads: Sequence[bytes]) -> Verdict:
        """See `StreamSink.apply`."""
        emptied = False
        damage: str | None = None
        for payload in payloads:
            try:
                decoded = decode_batch(payload, self._config.max_payload_bytes)
            except PayloadError as error:
                self.rejected(pod, error.reason)
                damage = damage or error.reason
                continue
            applied = self._views[pod].apply(decoded.batch)
            self._count(pod, decoded, applied)
            if applied.cleared:
                emptied, damage = True, None
            damage = damage or _damage(decoded, applied)
            if applied.stored:
                now_s = self._clock()
                self._speculation.stored(pod, applied.stored, now_s)
                _call(self._on_stored, pod, applied.stored, now_s)
        self._metrics.orphans.labels(pod).set(self._views[pod].orphans)
        return Verdict(emptied, damage)

    def clear(self, pod: str, reason: str) -> None:
        """See `StreamSink.clear`."""
        self._views[pod].clear()
        self._speculation.drop_pod(pod)
        self._metrics.clears.labels(reason).inc()
        _log.warning("view of %s dropped: %s", pod, reason)

    def link(self, pod: str, up: bool) -> None:
        """See `StreamSink.link`."""
        if up:
            self._linked.add(pod)
        else:
            self._linked.discard(pod)
            self._metrics.reconnections.labels(pod).inc()
        self._metrics.subscribers.set(len(self._linked))
        _log.info("publisher of %s is %s", pod, "connected" if up else "gone")
        _call(self._on_link, pod, up)

    def state(self, pod: str, state: StreamState, reason: str) -> None:
        """See `StreamSink.state`."""
        self._states = {**self._states, pod: state}
        self._metrics.set_state(pod, state)
        _log.info("stream of %s is %s%s", pod, state, f" ({reason})" if reason else "")

    def received(self, pod: str, batches: int, gaps: int) -> None:
        """See `StreamSink.received`."""
        self._metrics.messages.labels(pod).inc(batches)
        if gaps:
            self._metrics.gaps.labels(pod).inc(gaps)

    def replay(self, pod: str, outcome: str) -> None:
        """See `StreamSink.replay`."""
        self._metrics.replays.labels(outcome).inc()
        _log.debug("replay of %s: %s", pod, outcome)

    def rejected(self, pod: str, reason: str) -> None:
        """See `StreamSink.rejected`."""
        self._metrics.rejected.labels(reason).inc()
        _log.debug("message of %s rejected: %s", pod, reason)

    def socket_error(self, pod: str, operation: str) -> None:
        """See `StreamSink.socket_error`."""
        self._metrics.zmq_errors.labels(pod, operation).inc()
        _log.warning("cannot %s at %s", operation, pod)

    def _count(self, pod: str, decoded: Decoded, applied: Applied) -> None:
        metrics = self._metrics
        for event_type, events in Counter(type(event).__name__ for event in decoded.batch.events).items():
            metrics.events.labels(event_type).inc(events)
        for reason in decoded.rejected:
            self.rejected(pod, reason)
        for (event_type, reason), skipped in applied.skipped.items():
            stored = event_type == "BlockStored"
            (metrics.stores_skipped if stored else metrics.removals_skipped).labels(reason).inc(skipped)
        metrics.admissions.inc(len(applied.stored))
        metrics.evictions.inc(applied.removals.total())
        metrics.removals_last.inc(applied.removals["last"])
        metrics.removals_copy.inc(applied.removals["copy"])
        if self._states.get(pod) is not StreamState.RECOVERING and math.isfinite(decoded.batch.ts):
            metrics.lag_s.observe(max(0.0, self._wall_clock() - decoded.batch.ts))


def _call(callback: Callable[..., None], *args: object) -> None:
    """An error of a callback's owner must not cost the stream."""
    try:
        callback(*args)
    except Exception:
        _log.exception("callback failed")


def _damage(decoded: Decoded, applied: Applied) -> str | None:
    """Why the view is not what the engine holds; None if it is."""
    if BROKEN_EVENT in decoded.rejected:
        return BROKEN_EVENT
    for event_type, reason in applied.skipped:
        if event_type == "BlockStored" and reason not in _HARMLESS:
            return reason
    return None
