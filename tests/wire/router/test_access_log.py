"""Envoy's access log service over real gRPC: joins by request id, failures, unusual entries."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import msgspec
import pytest
from envoy.config.core.v3 import base_pb2
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from google.protobuf.any_pb2 import Any as AnyMessage

from indexer import PodMatches
from router._pb.token_usage_pb2 import TokenUsage
from router.feedback.outcomes import RESPONSE
from router.inflight.failures import COST_S
from router.pods.pod_set import Pod
from tests.support.router.bench import Bench, completion, ended, ready_pod
from tests.support.router.doors import TIMEOUT_S, ServedBench, serving

pytestmark = pytest.mark.usefixtures("each_transport")

A, B, C = (ready_pod(f"10.0.0.{number}:8000") for number in (1, 2, 3))
ONLY_A = frozenset({A.address})


def entry(request_id: str = "r", code: int = 200, **common: object) -> accesslog_pb2.HTTPAccessLogEntry:
    """Build an entry as Envoy writes it at the end of a response."""
    made = accesslog_pb2.HTTPAccessLogEntry(
        common_properties=accesslog_pb2.AccessLogCommon(**common),
        request=accesslog_pb2.HTTPRequestProperties(request_id=request_id, request_body_bytes=100),
    )
    made.response.response_code.value = code
    return made


def send(served: ServedBench, *entries: accesslog_pb2.HTTPAccessLogEntry) -> None:
    """Send each entry as a message of one stream and wait for the stream's end."""
    messages = [
        als_pb2.StreamAccessLogsMessage(
            http_logs=als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[entry])
        )
        for entry in entries
    ]
    als_pb2_grpc.AccessLogServiceStub(served.channel).StreamAccessLogs(iter(messages), timeout=TIMEOUT_S)


def in_flight() -> Bench:
    """Return a bench with one request in flight."""
    bench = Bench().with_pods(A)
    bench.router.route(completion("r", "hello"), 0.0)
    return bench


def usage(**fields: Any) -> base_pb2.Metadata:
    """Build the metadata in which Envoy logs the usage that it read in a response."""
    told = AnyMessage()
    told.Pack(TokenUsage(**fields))
    return base_pb2.Metadata(typed_filter_metadata={"envoy.ai.token_usage": told})


BROKEN = base_pb2.Metadata(typed_filter_metadata={"envoy.ai.token_usage": AnyMessage(value=b"\xff")})


def flags(**values: bool) -> accesslog_pb2.ResponseFlags:
    """Build response flags."""
    return accesslog_pb2.ResponseFlags(**values)


@pytest.mark.parametrize(
    ("logged", "delivered", "outcome"),
    [
        ({"metadata": usage(input_token_details={"cached_tokens": {"value": 64}})}, 64, "told"),
        ({"metadata": usage(input_token_details={"cached_tokens": {"value": 0}})}, 0, "told"),
        ({"metadata": usage(input_token_details={"cached_tokens": {"value": 1 << 63}})}, None, "untold"),
        ({"metadata": usage(extraction_status=1)}, None, "untold"),
        ({"metadata": usage(extraction_status=3)}, None, "unreadable"),
        ({"metadata": BROKEN}, None, "unreadable"),
        ({}, None, "untold"),
        ({"response_flags": flags(downstream_connection_termination=True)}, None, "aborted"),
        ({"code": 404}, None, "refused"),
    ],
)
def test_the_usage_that_envoy_read_is_shown(
    logged: dict[str, Any], delivered: int | None, outcome: str
) -> None:
    """Cached tokens of a log entry are those of the decision; unknown ones are counted by cause, not as 0."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, entry(**logged))
        record = bench.decision_log.find("r")
    assert record is not None
    assert record["delivered_cached_tokens"] == delivered
    assert bench.sample("kvroute_router_response_usage_total", outcome=outcome) == 1


def test_the_output_tokens_that_envoy_read_are_shown() -> None:
    """Output tokens of a log entry are those of the decision, whether cached tokens are known or not."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, entry(metadata=usage(output_tokens={"value": 7})))
        record = bench.decision_log.find("r")
    assert record is not None
    assert (record["output_tokens"], record["delivered_cached_tokens"]) == (7, None)


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
    """An entry ends its request as done, or as failed if the response was an error or incomplete."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, logged)
    assert len(bench.ledger) == 0
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome=outcome) == 1


def test_an_id_that_is_not_utf8_ends_its_request_and_harms_no_other() -> None:
    """A request id with invalid UTF-8 is joined, and other entries of its batch are kept."""
    bench = Bench().with_pods(A)
    for request_id in ("other", b"caf\xe9".decode("utf-8", "replace")):
        bench.router.route(completion(request_id, "hello"), 0.0)
    # Envoy writes the id into both fields.
    strange = entry("caf?", stream_id="caf?")
    with serving(bench) as served:
        logs = als_pb2.StreamAccessLogsMessage.HTTPAccessLogEntries(log_entry=[strange, entry("other")])
        batch = als_pb2.StreamAccessLogsMessage(http_logs=logs).SerializeToString()
        call = served.channel.stream_unary("/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs")
        call(iter([batch.replace(b"caf?", b"caf\xe9")]), timeout=TIMEOUT_S)
    assert len(bench.ledger) == 0
    assert bench.sample("kvroute_router_access_log_entries_total", join="joined") == 2


def test_entries_that_join_nothing_are_counted() -> None:
    """Entries with unknown or missing ids and of unfinished requests end nothing and are counted."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, entry("stranger"), entry(""), entry(intermediate_log_entry=True))
        served_joins = {
            join: bench.sample("kvroute_router_access_log_entries_total", join=join)
            for join in ("unknown", "no_request_id", "intermediate", "joined")
        }
    assert served_joins == {"unknown": 1, "no_request_id": 1, "intermediate": 1, "joined": 0}
    assert len(bench.ledger) == 1


def test_entries_of_another_routers_request_are_counted_and_forwarded() -> None:
    """Access log entries of other routers' requests are counted as such and forwarded."""
    bench, forwarded = in_flight(), []
    bench.lifecycle.forward_to(lambda report: forwarded.append(report.request_id), {"theirs"}.__contains__)
    with serving(bench) as served:
        send(served, entry("theirs"), entry("nobodys"), entry())
        for join in ("other_router", "unknown", "joined"):
            assert bench.sample("kvroute_router_access_log_entries_total", join=join) == 1
    assert forwarded == ["theirs", "nobodys"]


def without_body(method: base_pb2.RequestMethod, **common: object) -> accesslog_pb2.HTTPAccessLogEntry:
    """Build an entry of a request without body."""
    made = entry(**common)
    made.request.request_method = method
    made.request.ClearField("request_body_bytes")
    return made


def refused(details: str) -> accesslog_pb2.HTTPAccessLogEntry:
    """Build an entry of a request that ext_authz or ext_proc rejected."""
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
def test_an_uncharged_entry_ends_no_other_request_of_its_id(logged: accesslog_pb2.HTTPAccessLogEntry) -> None:
    """An entry of a rejected or bodiless request does not end another request with the same id."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, logged)
    assert len(bench.ledger) == 1
    assert bench.sample("kvroute_router_access_log_entries_total", join="no_work") == 1


def test_a_failed_post_without_body_ends_its_request() -> None:
    """A failed POST ends its request even if its body never arrived: the pick may precede the body."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, without_body(base_pb2.POST, **CUT))
    assert len(bench.ledger) == 0


@pytest.mark.parametrize(("ip", "pod"), [("10.0.0.1", "10.0.0.1:8000"), ("fd00::1", "[fd00::1]:8000")])
def test_a_failed_connection_is_reported_for_its_pod(ip: str, pod: str) -> None:
    """A pod to which Envoy could not connect is reported at once, whatever the request."""
    with serving(in_flight()) as served:
        failed = entry("stranger", 503, response_flags=flags(upstream_connection_failure=True))
        address = failed.common_properties.upstream_remote_address.socket_address
        address.address, address.port_value = ip, 8000
        send(served, failed, entry())
        assert [suspect for suspect, _ in served.failed_connections] == [pod]


def test_an_entry_that_comes_before_its_pick_ends_its_request() -> None:
    """An entry that arrives before the pick of its request ends that request as soon as it is picked."""
    bench, deciding, may_decide = Bench().with_pods(A), Event(), Event()
    match = bench.index.match

    def slow_match(*arguments: Any, **named: Any) -> PodMatches:
        deciding.set()
        assert may_decide.wait(TIMEOUT_S)
        return match(*arguments, **named)

    bench.index.match = slow_match  # type: ignore[method-assign]
    bench.clock = bench.core.clock = time.monotonic
    with serving(bench) as served, ThreadPoolExecutor() as threads:
        picked = threads.submit(bench.router.route, completion("r", "hello " * 20), time.monotonic())
        assert deciding.wait(TIMEOUT_S)
        send(served, entry(code=0, response_flags=flags(downstream_connection_termination=True)))
        may_decide.set()
        picked.result(TIMEOUT_S)
    assert (len(bench.ledger), bench.index.speculative) == (0, {})
    assert bench.sample("kvroute_router_request_ends_total", source="access_log", outcome="failed") == 1


def test_other_log_messages_are_ignored() -> None:
    """Empty messages and TCP log entries are ignored."""
    bench = in_flight()
    with serving(bench) as served:
        messages = [als_pb2.StreamAccessLogsMessage(), als_pb2.StreamAccessLogsMessage()]
        messages[1].tcp_logs.log_entry.add()
        als_pb2_grpc.AccessLogServiceStub(served.channel).StreamAccessLogs(iter(messages), timeout=TIMEOUT_S)
        send(served, entry())
    assert len(bench.ledger) == 0


def at(
    pod: Pod, logged: accesslog_pb2.HTTPAccessLogEntry, attempts: int = 1
) -> accesslog_pb2.HTTPAccessLogEntry:
    """Return the entry as of a request that the pod served."""
    common = logged.common_properties
    common.upstream_request_attempt_count = attempts
    host, _, port = pod.address.rpartition(":")
    common.upstream_remote_address.socket_address.address = host
    common.upstream_remote_address.socket_address.port_value = int(port)
    return logged


def detailed(code: int, details: str) -> accesslog_pb2.HTTPAccessLogEntry:
    """Build an entry with Envoy's reason for the status."""
    made = entry(code=code)
    made.response.response_code_details = details
    return made


@pytest.mark.parametrize(
    ("logged", "is_fault"),
    [
        (entry(code=500), True),
        (detailed(503, "via_upstream"), True),
        (entry(code=503, response_flags=flags(upstream_connection_termination=True)), True),
        (entry(response_flags=flags(upstream_remote_reset=True)), True),
        (entry(code=501), False),
        (entry(code=400), False),
        (entry(code=0, response_flags=flags(downstream_connection_termination=True)), False),
        (detailed(503, "overflow"), False),
        (entry(code=504, response_flags=flags(upstream_request_timeout=True)), False),
    ],
)
def test_only_failures_of_the_pod_cost(logged: accesslog_pb2.HTTPAccessLogEntry, is_fault: bool) -> None:
    """A pod's 5xx and broken connections cost; errors of clients, time limits and Envoy's own do not."""
    bench = in_flight()
    with serving(bench) as served:
        send(served, at(A, logged))
    assert bench.failure_s(A) == (COST_S if is_fault else 0.0)


def outcomes(bench: Bench) -> dict[str, float]:
    """Return the nonzero counts of picked and serving pods."""
    counts = {
        outcome: bench.sample("kvroute_router_served_requests_total", outcome=outcome)
        for outcome in ("same", "other", "retried", "unknown")
    }
    return {outcome: number for outcome, number in counts.items() if number}


def picked_and_served(
    bench: Bench, pod: Pod, *, attempts: int = 1, code: int = 200, full: bool = False, times: int = 1
) -> None:
    """Pick A for requests and log that another pod served them; `full`: the response phase ended them."""
    for number in range(times):
        request = msgspec.structs.replace(completion(f"r{number}", "hello"), candidates=ONLY_A)
        sent = {"pod": A.address, "dispatched_s": bench.router.route(request, 0.0).decided_s}
        if full:
            ended(
                bench.lifecycle, request.request_id, RESPONSE, time.monotonic(), is_fault=code >= 500, **sent
            )
    with serving(bench) as served:
        send(served, *(at(pod, entry(f"r{number}", code), attempts) for number in range(times)))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("pod", "attempts", "outcome"),
    [(A, 1, "same"), (A, 2, "same"), (B, 1, "other"), (B, 2, "retried"), (C, 1, "unknown")],
)
def test_the_serving_pod_is_compared_with_the_pick(pod: Pod, attempts: int, outcome: str, full: bool) -> None:
    """Each log entry of a pod counts once: same, other, after a retry, or at an address that is no pod's."""
    bench = Bench().with_pods(A, B)
    picked_and_served(bench, pod, attempts=attempts, full=full)
    assert outcomes(bench) == {outcome: 1}


@pytest.mark.parametrize("full", [False, True])
def test_a_failure_costs_the_pod_that_caused_it(full: bool) -> None:
    """A retry elsewhere is a failure of the picked pod; without one, a failure is the serving pod's."""
    bench = Bench().with_pods(A, B)
    picked_and_served(bench, B, attempts=2, full=full)
    assert (bench.failure_s(A), bench.failure_s(B)) == (COST_S, 0.0)
    bench = Bench().with_pods(A, B)
    picked_and_served(bench, B, code=500)
    assert (bench.failure_s(A), bench.failure_s(B)) == (0.0, COST_S)
    bench = Bench().with_pods(A, B)
    picked_and_served(bench, A, code=500, full=full)
    assert bench.failure_s(A) == COST_S
    # A proxy in between hides the pod.
    bench = Bench().with_pods(A, B)
    picked_and_served(bench, C, code=500, full=full)
    assert bench.failure_s(A) == COST_S


def test_a_gateway_that_ignores_picks_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Ten of the last hundred requests at another pod are a finding, logged once a minute; not retries."""
    bench = Bench().with_pods(A, B)
    picked_and_served(bench, B, attempts=2, times=12)
    picked_and_served(bench, A, times=3)
    picked_and_served(bench, B, times=9)
    assert bench.lifecycle.outcomes.picks_ignored is None
    picked_and_served(bench, B, times=2)
    finding = bench.lifecycle.outcomes.picks_ignored
    assert finding is not None
    assert "your gateway ignores picks: 11 of the last 14 requests" in finding
    logged = [message for message in caplog.messages if message.startswith("picks ignored: ")]
    (line,) = logged
    assert f"picked={A.address} served={B.address}" in line
    picked_and_served(bench, A, times=100)
    assert bench.lifecycle.outcomes.picks_ignored is None
