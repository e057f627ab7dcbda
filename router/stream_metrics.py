"""Metrics of ext_proc streams, beside those of requests: the streams in, open ones, durations and codes out.

Off unless asked for, as in the reference, whose names, labels and buckets these are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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

    def opened(self) -> Callable[[str], None]:
        """Count a stream; what is returned is to be called with the code that it ends with."""
        self._open.inc()
        started_s = time.monotonic()

        def ended(code: str) -> None:
            self._open.dec()
            self._durations.observe(time.monotonic() - started_s)
            self._ended.labels(code).inc()

        return ended
