"""Envoy's access log service over real gRPC: joins by request id, failures, strange entries."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from indexer import PodMatches
from router.feedback.lifecycle import Heard
from tests.unit.router_support import Bench, completion, ready_pod
from tests.wire.router_wire_support import TIMEOUT_S, Doors, doors

pytestmark = pytest.mark.usefixtures("each_transport")

A = ready_pod("10.0.0.1:8000")


def entry(request_id: str = "r", code: int = 200, **common: object) -> accesslog_pb2.HTTPAccessLogEntry:
    """An entry as Envoy writes it at a response's end."""
    made = accesslog_pb2.HTTPAccessLogEntry(
        common_properties=accesslog_pb2.AccessLogCommon(**common),
        request=accesslog_pb2.HTTPRequestProperties(request_id=request_id, request_body_bytes=100),
    )
    made.response.response_code.value = code
    return made


def send(served: Doors, *entries: accesslog_pb2.HTTPAccessLogEntry) -> None:
    """Sends each entry as a message of one stream and waits for the stream's end."""
    messages = [
        als_pb2.StreamAccessLogsMessage(
            http_logs=als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry])
        )
        for entry in entries
    ]
    als_pb2_grpc.AccessLogServiceStub(served.channel).StreamAccessLogs(iter(messages), timeout=TIMEOUT_S)


def in_flight() -> Bench:
    """A bench with one request in flight."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", "hello"), 0.0)
    return bench


def flags(**values: bool) -> accesslog_pb2.ResponseFlags:
    """Response flags."""
    return accesslog_pb2.ResponseFlags(**values)


@pytest.mark.parametrize(
    ("logged", "outcome"),
    [
        (entry(), "done"),
        (entry(code=404), "done"),
        (entry(code=503), "failed"),
        (entry(code=0), "failed"),
        (entry(response_flags=flags(downstream_connection_termination=True)), "failed"),
        (entry(response_flags=flags(upstream_connection_termination=True)), "failed"),
    ],
)
def test_an_entry_ends_its_request(logged: accesslog_pb2.HTTPAccessLogEntry, outcome: str) -> None:
    """A finished request is done, or failed where the answer was an error or not whole."""
    bench = in_flight()
    with doors(bench) as served:
        send(served, logged)
    assert len(bench.ledger) == 0
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome=outcome) == 1


def test_an_id_that_is_not_utf8_ends_its_request_and_harms_no_other() -> None:
    """A client's request id of any bytes joins its own request, and the entries beside it are not lost."""
    bench = Bench().with_pods(A)
    for request_id in ("other", b"caf\xe9".decode("utf-8", "replace")):
        bench.router.route(completion(request_id, "hello"), 0.0)
    # Envoy writes the id into both fields.
    strange = entry("caf?", stream_id="caf?")
    with doors(bench) as served:
        logs = als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[strange, entry("other")])
        batch = als_pb2.StreamAccessLogsMessage(http_logs=logs).SerializeToString()
        call = served.channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")
        call(iter([batch.replace(b"caf?", b"caf\xe9")]), timeout=TIMEOUT_S)
    assert len(bench.ledger) == 0
    assert bench.sample("kvroute_router_access_log_entries_total", join="joined") == 2


def test_entries_that_join_nothing_are_counted() -> None:
    """Unknown ids, missing ids and entries of unfinished requests end nothing."""
    bench = in_flight()
    with doors(bench) as served:
        send(served, entry("stranger"), entry(""), entry(intermediate_log_entry=True))
        served_joins = {
            join: bench.sample("kvroute_router_access_log_entries_total", join=join)
            for join in ("unknown", "no_request_id", "intermediate", "joined")
        }
    assert served_joins == {"unknown": 1, "no_request_id": 1, "intermediate": 1, "joined": 0}
    assert len(bench.ledger) == 1


def test_entries_of_another_routers_request_are_told_apart_and_passed_on() -> None:
    """Where several routers share Envoy's log, most entries of each are others', and none of them is lost."""
    bench, heard = in_flight(), []

    class Others:
        def heard(self, news: Heard) -> None:
            heard.append(news.request_id)

        def know(self, request_id: str) -> bool:
            return request_id == "theirs"

    bench.outcomes.join(Others())
    with doors(bench) as served:
        send(served, entry("theirs"), entry("nobodys"), entry())
        for join in ("other_router", "unknown", "joined"):
            assert bench.sample("kvroute_router_access_log_entries_total", join=join) == 1
    assert heard == ["theirs", "nobodys"]


def without_body(method: base_pb2.RequestMethod, **common: object) -> accesslog_pb2.HTTPAccessLogEntry:
    """An entry of a request that had no body."""
    made = entry(**common)
    made.request.request_method = method
    made.request.ClearField("request_body_bytes")
    return made


def refused(details: str) -> accesslog_pb2.HTTPAccessLogEntry:
    """An entry of a request that a door of ours has refused."""
    made = entry(code=429)
    made.response.response_code_details = details
    return made


CUT = {"response_flags": accesslog_pb2.ResponseFlags(downstream_connection_termination=True)}


@pytest.mark.parametrize(
    "logged",
    [
        refused("ext_authz_denied"),
        refused("kvroute"),
        without_body(base_pb2.GET),
        without_body(base_pb2.GET, **CUT),
        without_body(base_pb2.POST),
    ],
    ids=["check", "ext_proc", "get", "get_cut_off", "post_without_body"],
)
def test_what_was_no_work_ends_no_other_request_of_its_id(logged: accesslog_pb2.HTTPAccessLogEntry) -> None:
    """Meshes use an id for many requests: one that was refused, or has no body, ends none of the others."""
    bench = in_flight()
    with doors(bench) as served:
        send(served, logged)
    assert len(bench.ledger) == 1
    assert bench.sample("kvroute_router_access_log_entries_total", join="no_work") == 1


def test_a_post_that_was_cut_off_before_its_body_came_is_over() -> None:
    """A pod may be picked by headers alone, so of a request that failed the missing body says nothing."""
    bench = in_flight()
    with doors(bench) as served:
        send(served, without_body(base_pb2.POST, **CUT))
    assert len(bench.ledger) == 0


@pytest.mark.parametrize(("ip", "pod"), [("10.0.0.1", "10.0.0.1:8000"), ("fd00::1", "[fd00::1]:8000")])
def test_a_failed_connection_makes_its_pod_suspect(ip: str, pod: str) -> None:
    """Where Envoy could not connect, the pod it tried is reported at once, whichever request it was for."""
    with doors(in_flight()) as served:
        failed = entry("stranger", 503, response_flags=flags(upstream_connection_failure=True))
        address = failed.common_properties.upstream_remote_address.socket_address
        address.address, address.port_value = ip, 8000
        send(served, failed, entry())
        assert [suspect for suspect, _ in served.mismatched] == [pod]


def test_an_entry_that_comes_before_its_pick_ends_its_request() -> None:
    """The log of a client that left while its request was tokenized or waited leaves no load behind."""
    bench, deciding, may_decide = Bench().with_pods(A), Event(), Event()
    match = bench.index.match

    def slow_match(*arguments: Any, **named: Any) -> PodMatches:
        deciding.set()
        assert may_decide.wait(TIMEOUT_S)
        return match(*arguments, **named)

    bench.index.match = slow_match  # type: ignore[method-assign]
    bench.clock = bench.router.clock = time.monotonic
    with doors(bench) as served, ThreadPoolExecutor() as threads:
        picked = threads.submit(bench.router.route, completion("r", "hello " * 20), time.monotonic())
        assert deciding.wait(TIMEOUT_S)
        send(served, entry(code=0, response_flags=flags(downstream_connection_termination=True)))
        may_decide.set()
        picked.result(TIMEOUT_S)
    assert (len(bench.ledger), bench.index.speculative) == (0, {})
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="failed") == 1


def test_other_logs_are_let_pass() -> None:
    """An empty message and TCP logs disturb nothing."""
    bench = in_flight()
    with doors(bench) as served:
        messages = [als_pb2.StreamAccessLogsMessage(), als_pb2.StreamAccessLogsMessage()]
        messages[1].tcp_logs.log_entry.add()
        als_pb2_grpc.AccessLogServiceStub(served.channel).StreamAccessLogs(iter(messages), timeout=TIMEOUT_S)
        send(served, entry())
    assert len(bench.ledger) == 0
