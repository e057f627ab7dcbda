"""Spans of picks: their names, nesting and parents, as a real collector gets them over OTLP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc

from router.errors import RequestError
from router.traces import Traces
from tests.unit.router_support import Bench, completion, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
REQUEST = replace(completion("r", long_text(100)), headers=SAMPLED)


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()
        self.came = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the name is OTLP's)
        """OTLP's."""
        for resource in request.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        self.came.set()
        return pb.ExportTraceServiceResponse()


@contextmanager
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collector, Traces]]:
    """A collector, and traces that go there."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        yield collector, Traces.to_collector()
    finally:
        server.stop(None).wait()


def test_a_picks_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's span names, nested as the steps are, below the caller's span, with the pick on top."""
    with collecting(monkeypatch) as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        bench.router.route(REQUEST, 0.0)
        traces.close()
        spans = collector.spans
    parents = {
        "gateway.request": None,
        "gateway.request_orchestration": "gateway.request",
        "filter_endpoints": "gateway.request_orchestration",
        "produce_precise_prefix_cache": "gateway.request_orchestration",
        "run_scheduler_profile": "gateway.request_orchestration",
        "llm_d.epp.scoring": "run_scheduler_profile",
    }
    assert spans.keys() == parents.keys()
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    for name, parent in parents.items():
        parent_id = spans[parent].span_id.hex() if parent else PARENT_ID
        assert spans[name].parent_span_id.hex() == parent_id
        assert spans[name].start_time_unix_nano <= spans[name].end_time_unix_nano
    attributes = {item.key: item.value.string_value for item in spans["gateway.request"].attributes}
    assert attributes["server.address"] == A.address
    assert collector.services == {"kvroute-router"}


def test_a_refusal_is_a_failed_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is answered with an error ends its spans as failed, with the status."""
    with collecting(monkeypatch) as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        with pytest.raises(RequestError):
            bench.router.route(replace(REQUEST, model="gpt-9"), 0.0)
        traces.close()
    outer = collector.spans["gateway.request"]
    assert outer.status.code == 2
    assert [item.value.int_value for item in outer.attributes] == [404]
    assert "run_scheduler_profile" not in collector.spans


def test_what_the_caller_does_not_sample_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampling decision of the caller's context holds."""
    with collecting(monkeypatch) as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        bench.router.route(replace(REQUEST, headers=unsampled), 0.0)
        bench.router.route(replace(REQUEST, headers={"traceparent": "nonsense"}), 0.0)
        traces.close()
    assert collector.spans == {}
