"""Metrics and log lines of streams, of their views and of mismatches.

`pod` is the name of one engine in the index, `PodStream.holder`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from common.repeated_log import RepeatedLog
from indexer.audit.mismatch_watch import Mismatch, WatchedPod
from indexer.config import PodStream
from indexer.index.contract import StreamState
from indexer.metrics import IndexerMetrics
from indexer.streams.snapshot import Fetched, Snapshot
from indexer.views.view_parts import Outcome

_log = logging.getLogger(__name__)
# A publisher can change its stream's state with each message.
_repeated = RepeatedLog(_log, lines=20, sources_max=1024)
_WARN_EVERY_S = 60.0  # minimum time between two warnings of mismatches of one kind


class StreamRecords:
    """Records what happens to the streams of one indexer."""

    def __init__(self, metrics: IndexerMetrics) -> None:
        self.metrics = metrics
        # Pending stores by engine, as last written to the metrics.
        self._orphans: dict[str, int] = {}
        self._warned_s: dict[type, float] = {}

    def opened(self, stream: PodStream, endpoint: str | None) -> None:
        message = "stream opened: pod=%s model=%s endpoint=%s"
        _note("stream_opened", stream.holder, message, stream.model, endpoint)

    def closed(self, pod: str, serving: str, linked_engines: int) -> None:
        metrics = self.metrics
        metrics.subscribers.set(linked_engines)
        self._orphans.pop(pod, None)
        metrics.forget(pod)
        for metric in (metrics.parity_mismatches, metrics.parity_never_hit):
            metric.remove_by_labels({"pod": serving})
        _note("stream_closed", pod, "stream closed: pod=%s")

    def link(self, pod: str, up: bool, linked_engines: int) -> None:
        if not up:
            self.metrics.reconnections.labels(pod).inc()
        self.metrics.subscribers.set(linked_engines)
        _note("publisher_link", pod, "publisher link: pod=%s state=%s", "up" if up else "down")

    def state(self, pod: str, state: StreamState, reason: str) -> None:
        for each in StreamState:
            self.metrics.stream_state.labels(pod, each).set(each is state)
        _note("stream_state", pod, "stream state: pod=%s state=%s reason=%s", state, reason or "none")

    def received(self, pod: str, batches: int, gaps: int) -> None:
        with self.metrics.lock:
            self.metrics.messages.add((pod,), batches)
        if gaps:
            self.metrics.gaps.labels(pod).inc(gaps)

    def replay(self, pod: str, outcome: str) -> None:
        self.metrics.replays.labels(outcome).inc()
        _log.debug("replay: pod=%s outcome=%s", pod, outcome)

    def snapshot(self, pod: str, outcome: str) -> None:
        self.metrics.snapshots.labels(outcome).inc()
        _note("snapshot", pod, "snapshot: pod=%s outcome=%s", outcome)

    def restored(self, pod: str, fetched: Fetched, took_s: float) -> None:
        answer = fetched.answer
        self.metrics.snapshot_bytes.labels(fetched.source).inc(fetched.size_bytes)
        self.metrics.snapshot_s.labels(fetched.source).observe(took_s)
        if answer is not None and not isinstance(answer, Snapshot) and answer.evicted_blocks:
            message = "peer view applied, some blocks may be missing: pod=%s peer_evicted_blocks=%d"
            _log.warning(message, pod, answer.evicted_blocks)

    def built(self, pod: str, source: str) -> None:
        """Record that a view was built from "engine", "peer", "redis", "replay"; "none": it is not EXACT."""
        self.metrics.bootstraps.labels(source).inc()
        _note("view_built", pod, "view built: pod=%s source=%s", source)

    def cleared(self, pod: str, reason: str) -> None:
        self.metrics.clears.labels(reason).inc()
        _repeated.event("view_dropped", pod, "view dropped: pod=%s reason=%s", pod, reason)

    def drop(self, pod: str, drafter: str) -> None:
        _note("drop", pod, "block drop: pod=%s %s", drafter or "none")

    def rejected(self, pod: str, reason: str) -> None:
        self.metrics.rejected.labels(reason).inc()
        _log.debug("message rejected: pod=%s reason=%s", pod, reason)

    def shared_store(self, name: str) -> None:
        self.metrics.rejected.labels("shared_store").inc()
        message = "events of a store shared by several pods skipped, its blocks count for none: store=%s"
        _repeated.event("shared_store", name, message, name)

    def socket_error(self, pod: str, operation: str) -> None:
        self.metrics.zmq_errors.labels(pod, operation).inc()
        _repeated.event("socket_error", pod, "socket error: operation=%s pod=%s", operation, pod)

    def applied(self, pod: str, outcome: Outcome, orphans: int, *, lag_from_s: float | None) -> None:
        """Record an applied batch.

        Args:
            orphans: Stores of the view that wait for their parent.
            lag_from_s: Time at which it was applied, since the epoch; None: its age is not recorded.
        """
        metrics = self.metrics
        for reason, rejected in outcome.rejected.items():
            metrics.rejected.labels(reason).inc(rejected)
            _log.debug("messages or events rejected: pod=%s reason=%s count=%d", pod, reason, rejected)
        for (event_type, reason), skipped in outcome.skipped.items():
            stored = event_type == "BlockStored"
            (metrics.stores_skipped if stored else metrics.removals_skipped).labels(reason).inc(skipped)
        if self._orphans.get(pod) != orphans:
            metrics.orphans.labels(pod).set(orphans)
            self._orphans[pod] = orphans
        with metrics.lock:
            for event_type, events in outcome.events.items():
                metrics.events.add((event_type,), events)
            metrics.admissions.add(number=sum(map(len, outcome.stored)))
            for removed, counter in (("last", metrics.removals_last), ("copy", metrics.removals_copy)):
                if hashes := outcome.removals[removed]:
                    counter.add(number=hashes)
                    metrics.evictions.add(number=hashes)
            if lag_from_s is not None:
                for published_s in filter(math.isfinite, outcome.published_s):
                    metrics.lag_s.observe(max(0.0, lag_from_s - published_s))

    def mismatches(self, found: Sequence[Mismatch], pods: Sequence[WatchedPod], now_s: float) -> None:
        """Record new mismatches, and the pods whose blocks never match."""
        for mismatch in found:
            self.metrics.parity_mismatches.labels(mismatch.pod, mismatch.model).inc()
            self._warn(mismatch, now_s)
        for watched in pods:
            self.metrics.parity_never_hit.labels(watched.pod).set(watched.never_hit)
            if watched.never_hit:
                self._warn(watched, now_s)

    def _warn(self, sign: Mismatch | WatchedPod, now_s: float) -> None:
        if now_s - self._warned_s.get(type(sign), -math.inf) >= _WARN_EVERY_S:
            self._warned_s[type(sign)] = now_s
            _log.warning("%s", sign)


def _note(kind: str, pod: str, message: str, *values: object) -> None:
    _repeated.event(kind, pod, message, pod, *values, level=logging.INFO)
