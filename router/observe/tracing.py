"""OpenTelemetry spans of the picks, under the reference picker's names: a request's steps in, spans out.

Optional (the extra `tracing`): the library is imported only when traces are switched on, with the settings of
the usual OTEL_* variables. A span is made when its step is over, so a step only notes the time.
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
# As the reference picker samples.
_SAMPLED_SHARE = 0.1
_SHARE_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"


class Traces:
    """Makes the spans of one request after the other; safe to share between threads.

    Args:
        provider: An OpenTelemetry TracerProvider.
        exporter: The SpanExporter that it sends with.
    """

    def __init__(self, provider: Any, exporter: Any) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer(_SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._within = set_span_in_context
        self._failed = Status(StatusCode.ERROR)

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

    def routed(self, request: RouteRequest, marks_ns: Sequence[int], outcome: Decision | Exception) -> None:
        """Makes the spans of a request; an error that is no RequestError is one of ours.

        Args:
            marks_ns: When it came, when it was known who may take it, and when who holds what of it; as many
                of them as it got to.
        """
        ended_ns = time.time_ns()
        began_ns, filtered_ns, matched_ns = (*marks_ns, ended_ns, ended_ns)[:3]
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
            root.set_attributes(_told(outcome))
        orchestration.end(ended_ns)
        root.end(ended_ns)

    def close(self, limit_s: float = 3.0) -> None:
        """Sends what has not been sent, as far as the collector takes it within `limit_s`."""
        # By itself the library asks a collector that is gone again and again, for up to 30 s.
        limit = Timer(limit_s, self._give_up, (limit_s,))
        limit.daemon = True
        limit.start()
        self._provider.shutdown()
        limit.cancel()

    def _start(self, name: str, start_ns: int, parent: Any) -> Any:
        return self._tracer.start_span(name, self._within(parent), start_time=start_ns)

    def _give_up(self, after_s: float) -> None:
        _log.warning("the collector did not take the last spans within %g s: they are lost", after_s)
        self._exporter.shutdown()


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
