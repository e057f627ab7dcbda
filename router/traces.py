"""OpenTelemetry spans of the picks, under the reference picker's names: a request's steps in, spans out.

Optional (the extra `tracing`): the library is imported only when traces are switched on, with the settings of
the usual OTEL_* variables. A span is made when its step is over, so a step only notes the time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from threading import Timer
from typing import TYPE_CHECKING, Any

from router.errors import ConfigError, RequestError
from router.request import RouteRequest

if TYPE_CHECKING:
    from router.decision import Decision

_log = logging.getLogger(__name__)

_SERVICE = "kvroute-router"
# As the reference picker samples.
_SAMPLED_SHARE = 0.1
_SHARE_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"


class Traces:
    """Makes the spans of one request after the other; safe to share between threads.

    Args:
        provider: An OpenTelemetry TracerProvider.
        exporter: The SpanExporter that it sends with.

    Attributes:
        failed: The status of a span that failed.
    """

    def __init__(self, provider: Any, exporter: Any) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer(_SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._within = set_span_in_context
        self.failed = Status(StatusCode.ERROR)

    @classmethod
    def to_collector(cls) -> Traces:
        """Traces to where OTEL_EXPORTER_OTLP_ENDPOINT says, over OTLP's gRPC form.

        Raises:
            ConfigError: The library is not installed, or the share to sample is none.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--tracing: {error}; install kvroute[tracing], and opentelemetry-proto once more after it: "
                "xds-protos brings an old copy of its files"
            ) from error
        name = os.environ.get("OTEL_SERVICE_NAME", _SERVICE)
        provider = TracerProvider(_sampler(), Resource.create({"service.name": name}))
        exporter = OTLPSpanExporter()
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider, exporter)

    def begin(self, request: RouteRequest) -> RequestTrace:
        return RequestTrace(self, request)

    def close(self, limit_s: float = 3.0) -> None:
        """Sends what has not been sent, as far as the collector takes it within `limit_s`."""
        # By itself the library asks a collector that is gone again and again, for up to 30 s.
        limit = Timer(limit_s, self._give_up, (limit_s,))
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()

    def start(self, name: str, start_ns: int, parent: Any) -> Any:
        """Starts a span within another, or within the one that W3C headers name, if they do."""
        is_root = isinstance(parent, Mapping)
        within = self._propagator.extract(parent) if is_root else self._within(parent)
        return self._tracer.start_span(name, within, start_time=start_ns)

    def _give_up(self, after_s: float) -> None:
        _log.warning("the collector did not take the last spans within %g s: they are lost", after_s)
        self._exporter.shutdown()


class RequestTrace:
    """The steps of one request, as they are over; its spans are made at its end."""

    __slots__ = ("_began_ns", "_filtered_ns", "_matched_ns", "_request", "_traces")

    def __init__(self, traces: Traces, request: RouteRequest) -> None:
        self._traces = traces
        self._request = request
        self._began_ns = time.time_ns()
        self._filtered_ns = self._matched_ns = 0

    def filtered(self) -> None:
        """It is known who may take it."""
        self._filtered_ns = time.time_ns()

    def matched(self) -> None:
        """It is known who holds what of it."""
        self._matched_ns = time.time_ns()

    def ended(self, outcome: Decision | Exception) -> None:
        """It was routed, or not; an error that is no RequestError is one of ours."""
        start, began_ns, ended_ns = self._traces.start, self._began_ns, time.time_ns()
        filtered_ns = self._filtered_ns or ended_ns
        request = start("gateway.request", began_ns, self._request.headers)
        if not request.is_recording():
            return
        orchestration = start("gateway.request_orchestration", began_ns, request)
        start("filter_endpoints", began_ns, orchestration).end(filtered_ns)
        if isinstance(outcome, Exception):
            status = outcome.status if isinstance(outcome, RequestError) else 500
            for span in (orchestration, request):
                span.set_attribute("http.response.status_code", status)
                span.set_status(self._traces.failed)
        else:
            start("produce_precise_prefix_cache", filtered_ns, orchestration).end(self._matched_ns)
            profile = start("run_scheduler_profile", self._matched_ns, orchestration)
            start("llm_d.epp.scoring", self._matched_ns, profile).end(ended_ns)
            profile.end(ended_ns)
            request.set_attributes(_told(outcome))
        orchestration.end(ended_ns)
        request.end(ended_ns)


def _told(decision: Decision) -> Mapping[str, str | int | float]:
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
    """None: as OTEL_TRACES_SAMPLER says. Without it, the library would sample everything.

    Raises:
        ConfigError: The share to sample is none.
    """
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    if os.environ.get("OTEL_TRACES_SAMPLER"):
        return None
    share = os.environ.get(_SHARE_VARIABLE) or _SAMPLED_SHARE
    try:
        return ParentBasedTraceIdRatio(float(share))
    except ValueError as error:
        raise ConfigError(
            f"--tracing: {_SHARE_VARIABLE} must be a number from 0 to 1, not {share!r}"
        ) from error
