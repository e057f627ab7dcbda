"""OpenTelemetry spans of picks, with the names of the llm-d endpoint picker.

Optional (extra `tracing`): the library is imported only if tracing is on, and configured by the standard
OTEL_* variables. Spans are created after the pick from recorded times, so the pick only reads the clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from threading import Timer
from typing import TYPE_CHECKING, Any

from router.errors import ConfigError, RequestError
from router.prompts.request import RouteRequest

if TYPE_CHECKING:
    from router.picking.decision import Decision

_log = logging.getLogger(__name__)

_SERVICE = "kvroute-router"
_SHARE_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"


class Traces:
    """Recorder of each request's spans, exported over OTLP/gRPC to OTEL_EXPORTER_OTLP_ENDPOINT. Thread-safe.

    Raises:
        ConfigError: The library is not installed, or OTEL_TRACES_SAMPLER_ARG is invalid.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"--tracing: {error}; install kvroute[tracing], then reinstall opentelemetry-proto, because "
                "xds-protos overwrites its files with an old copy"
            ) from error
        name = os.environ.get("OTEL_SERVICE_NAME", _SERVICE)
        self._provider = TracerProvider(_sampler(), Resource.create({"service.name": name}))
        self._exporter = OTLPSpanExporter()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._within = set_span_in_context
        self._failed = Status(StatusCode.ERROR)

    def routed(self, request: RouteRequest, steps_ns: Sequence[int], outcome: Decision | Exception) -> None:
        """Create and export the spans of a request; exceptions other than RequestError count as status 500.

        Args:
            steps_ns: Unix times in nanoseconds of the steps reached: arrival, candidates filtered, cached
                prefixes matched.
        """
        ended_ns = time.time_ns()
        began_ns, filtered_ns, matched_ns = (*steps_ns, ended_ns, ended_ns)[:3]
        root = self._tracer.start_span(
            "gateway.request", self._propagator.extract(request.headers), start_time=began_ns
        )
        if not root.is_recording():
            return
        orchestration = self._start("gateway.request_orchestration", began_ns, root)
        self._start("filter_endpoints", began_ns, orchestration).end(filtered_ns)
        if isinstance(outcome, Exception):
            status = outcome.status if isinstance(outcome, RequestError) else 500
            for span in (orchestration, root):
                span.set_attribute("http.response.status_code", status)
                span.set_status(self._failed)
        else:
            self._start("produce_precise_prefix_cache", filtered_ns, orchestration).end(matched_ns)
            profile = self._start("run_scheduler_profile", matched_ns, orchestration)
            self._start("llm_d.epp.scoring", matched_ns, profile).end(ended_ns)
            profile.end(ended_ns)
            root.set_attributes(_attributes(outcome))
        orchestration.end(ended_ns)
        root.end(ended_ns)

    def close(self, limit_s: float = 3.0) -> None:
        """Export the remaining spans, for at most `limit_s` seconds."""
        # Without a limit the library retries an unavailable collector for up to 30 s.
        limit = Timer(limit_s, self._abort_export, (limit_s,))
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()

    def _start(self, name: str, start_ns: int, parent: Any) -> Any:
        return self._tracer.start_span(name, self._within(parent), start_time=start_ns)

    def _abort_export(self, after_s: float) -> None:
        _log.warning("trace export timed out, last spans are lost: timeout_s=%g", after_s)
        self._exporter.shutdown()


def _attributes(decision: Decision) -> Mapping[str, str | int | float]:
    best = decision.primary
    return {
        "server.address": best.pod,
        "gen_ai.request.model": decision.model or "",
        "kvroute.request_id": decision.request_id,
        "kvroute.candidates": len(decision.ranked),
        "kvroute.prompt_tokens": decision.prompt_tokens,
        "kvroute.cached_tokens": best.cached_tokens,
        "kvroute.cost_s": best.cost_s,
        "kvroute.degraded": decision.degraded or "",
    }


def _sampler() -> Any:
    """Return the default sampler, or None to let the library apply OTEL_TRACES_SAMPLER."""
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    if os.environ.get("OTEL_TRACES_SAMPLER"):
        return None
    share = os.environ.get(_SHARE_VARIABLE) or 0.1  # default of the llm-d endpoint picker
    try:
        return ParentBasedTraceIdRatio(float(share))
    except ValueError as error:
        raise ConfigError(
            f"--tracing: {_SHARE_VARIABLE}: expected a number from 0 to 1, got {share!r}"
        ) from error
