"""Metrics of ext_proc streams, beside those of requests: the streams in, open ones, durations and codes out.

Off unless asked for, as in the reference, whose names, labels and buckets these are.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.stream_watch import Cancellable

_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)


class StreamMetrics:
    """Counts the streams of one method."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge("llm_d_epp_extproc_streams_inflight", "Open ext_proc streams.", registry=registry)
        self._durations = Histogram(
            "llm_d_epp_extproc_stream_duration_seconds",
            "How long ext_proc streams were open.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._ended = Counter(
            "llm_d_epp_extproc_streams_total", "Ended ext_proc streams.", ("code",), registry=registry
        )

    def opened(self, _stream: Cancellable) -> _Measured:
        """See `StreamWatcher`."""
        self._open.inc()
        return _Measured(self, time.monotonic())

    def ended(self, code: str, took_s: float) -> None:
        """A stream that was opened has ended."""
        self._open.dec()
        self._durations.observe(took_s)
        self._ended.labels(code).inc()


class _Measured:
    """One stream."""

    __slots__ = ("_metrics", "_started_s")

    def __init__(self, metrics: StreamMetrics, started_s: float) -> None:
        self._metrics = metrics
        self._started_s = started_s

    def waits(self) -> None:
        """Of no interest here."""

    def serves(self) -> None:
        """Of no interest here."""

    def answered(self) -> None:
        """Of no interest here."""

    def closed(self, code: str) -> None:
        """See `OpenStream`."""
        self._metrics.ended(code, time.monotonic() - self._started_s)
