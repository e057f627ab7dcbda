"""Metrics of ext_proc streams, beside those of requests: the streams in, open ones, durations and codes out.

Off unless asked for, as in the reference, whose names, labels and buckets these are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.stream_interceptor import Serve, StreamInterceptor

_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
_OK, _CANCELED, _UNKNOWN = "OK", "Canceled", "Unknown"


class StreamMetrics(StreamInterceptor):
    """Counts the streams of one method.

    Args:
        method: "/package.Service/Method".
    """

    def __init__(self, method: str, registry: CollectorRegistry) -> None:
        super().__init__(method)
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

    def watch(self, serve: Serve, messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """See `StreamInterceptor`."""
        started_s = time.monotonic()
        self._open.inc()
        code = _OK
        try:
            yield from serve(messages, context)
        except BaseException:
            # A client that goes away ends the iteration of its own messages with an error.
            code = _UNKNOWN if context.is_active() else _CANCELED
            raise
        finally:
            self._open.dec()
            self._durations.observe(time.monotonic() - started_s)
            self._ended.labels(code).inc()
