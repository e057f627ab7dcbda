"""Tests of the spans of picks, as a collector receives them over OTLP."""

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

from router.errors import ConfigError, RequestError
from router.observe.tracing import Traces
from tests.support.router.bench import Bench, completion, long_text, ready_pod

A = ready_pod("10.0.0.1:8000")
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
REQUEST = replace(completion("r", long_text(100)), headers=SAMPLED)


class Collector(pb_grpc.TraceServiceServicer):
    """Collector that records spans, or rejects them if `full`."""

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self.calls = self.requests = 0
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()
        self.came = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the name is OTLP's)
        """Record the spans of an export."""
        self.calls += 1
        if self.full:
            context.abort(grpc.StatusCode.UNAVAILABLE, "full")
        for resource in request.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
                self.requests += sum(span.name == "gateway.request" for span in scope.spans)
        self.came.set()
        return pb.ExportTraceServiceResponse()


@contextmanager
def collecting(
    monkeypatch: pytest.MonkeyPatch, *, full: bool = False, **environment: str
) -> Iterator[tuple[Collector, Traces]]:
    """Run a collector; yield it and traces that export to it, without sampling by default."""
    collector, server = Collector(full=full), grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    for name, value in (environment or {"OTEL_TRACES_SAMPLER": "parentbased_always_off"}).items():
        monkeypatch.setenv(name, value)
    try:
        yield collector, Traces()
    finally:
        server.stop(None).wait()


def test_spans_of_a_pick_are_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pick's spans have the llm-d picker's names and nesting, and the caller's span as parent."""
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


def test_rejected_request_has_failed_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans of a rejected request have an error status and the HTTP status code."""
    with collecting(monkeypatch) as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        with pytest.raises(RequestError):
            bench.router.route(replace(REQUEST, model="gpt-9"), 0.0)
        traces.close()
    outer = collector.spans["gateway.request"]
    assert outer.status.code == 2
    assert [item.value.int_value for item in outer.attributes] == [404]
    assert "run_scheduler_profile" not in collector.spans


def test_callers_sampling_decision_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the caller does not sample is not exported."""
    with collecting(monkeypatch) as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        unsampled = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        bench.router.route(replace(REQUEST, headers=unsampled), 0.0)
        bench.router.route(replace(REQUEST, headers={"traceparent": "nonsense"}), 0.0)
        traces.close()
    assert collector.spans == {}


def test_unexpected_exception_has_failed_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spans of a pick that raises an unexpected exception have an error status and code 500."""
    with collecting(monkeypatch) as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        monkeypatch.setattr(bench.index, "match", lambda *_, **__: 1 / 0)
        with pytest.raises(RequestError, match="failed to route"):
            bench.router.route(REQUEST, 0.0)
        traces.close()
    outer = collector.spans["gateway.request"]
    assert outer.status.code == 2
    assert [item.value.int_value for item in outer.attributes] == [500]


def test_sampler_argument_applies_without_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER_ARG applies without OTEL_TRACES_SAMPLER: 1.0 samples all requests."""
    with collecting(monkeypatch, OTEL_TRACES_SAMPLER_ARG="1.0") as (collector, traces):
        bench = Bench(traces=traces).with_pods(A)
        for number in range(30):
            bench.router.route(completion(f"r{number}", "hi"), 0.0)
        traces.close()
    assert collector.requests == 30


@pytest.mark.parametrize("share", ["half", "1.5", "-1", "nan"])
def test_invalid_sampler_argument_stops_the_start(monkeypatch: pytest.MonkeyPatch, share: str) -> None:
    """A value that is no number from 0 to 1 raises an error that names the variable."""
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
    with pytest.raises(ConfigError, match="OTEL_TRACES_SAMPLER_ARG: expected a number from 0 to 1"):
        Traces()


def test_close_does_not_wait_for_an_unavailable_collector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After `limit_s` the remaining spans are dropped, which is logged."""
    with collecting(monkeypatch, full=True) as (collector, traces):
        Bench(traces=traces).with_pods(A).router.route(REQUEST, 0.0)
        traces.close(limit_s=0.1)
    # Without the limit the library makes four calls, the last one 7 s after the first.
    assert collector.calls < 4
    assert "trace export timed out, last spans are lost: timeout_s=0.1" in caplog.text
