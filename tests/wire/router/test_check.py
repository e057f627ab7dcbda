"""The ext_authz service over real gRPC: its response to each kind of request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from envoy.service.auth.v3 import external_auth_pb2 as pb
from envoy.service.auth.v3 import external_auth_pb2_grpc as pb_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.doors.ext_proc import ExtProcOptions
from tests.support.depth import examples
from tests.support.router.bench import TINY, Bench, long_text, ready_pod
from tests.support.router.doors import TIMEOUT_S, ServedBench, serving

pytestmark = pytest.mark.usefixtures("each_transport")

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
BODY = json.dumps({"model": TINY, "prompt": TEXT}).encode()
DESTINATION = "x-gateway-destination-endpoint"


def request(
    body: bytes = BODY, path: str = "/v1/completions", *, as_text: bool = False, **headers: str
) -> pb.CheckRequest:
    """Build a CheckRequest as Envoy does; underscores in header names become hyphens."""
    message = pb.CheckRequest()
    http = message.attributes.request.http
    http.method, http.path, http.size = "POST", path, len(body)
    given = {"content-length": str(len(body)), "x-request-id": "r", "x-envoy-auth-partial-body": "false"}
    http.headers.update(given | {name.replace("_", "-"): value for name, value in headers.items()})
    if as_text:
        http.body = body.decode()
    else:
        http.raw_body = body
    return message


def check(served: ServedBench, message: pb.CheckRequest) -> pb.CheckResponse:
    """Call Check."""
    stub: Any = pb_grpc.AuthorizationStub(served.channel)
    answer: pb.CheckResponse = stub.Check(message, timeout=TIMEOUT_S)
    return answer


def set_headers(answer: pb.CheckResponse) -> dict[str, str]:
    """Return the headers set by a response, on the request or on the error sent to the client."""
    part = answer.ok_response if answer.HasField("ok_response") else answer.denied_response
    return {option.header.key: option.header.value for option in part.headers}


@pytest.mark.parametrize(
    ("path", "fields", "rank"),
    [
        ("/v1/completions", {"prompt": TEXT}, "1"),
        ("/v1/completions", {"prompt": [TEXT, TEXT]}, None),
        ("/v1/responses", {"input": TEXT}, None),
    ],
)
def test_the_rank_is_sent_where_engines_obey_it(path: str, fields: dict[str, Any], rank: str | None) -> None:
    """The chosen rank of a pod is a header of requests with one prompt, but not of the Responses API."""
    bench = Bench().with_pods(A)
    bench.index.ranks = {A.address: 1}
    with serving(bench) as served:
        body = json.dumps({"model": TINY, **fields}).encode()
        answer = check(served, request(body, path, x_data_parallel_rank="0"))
    assert set_headers(answer).get("x-data-parallel-rank") == rank
    assert list(answer.ok_response.headers_to_remove) == ([] if rank else ["x-data-parallel-rank"])
    record = bench.decision_log.find("r")
    assert record is not None
    assert record["rank"] == (int(rank) if rank else None)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_request_gets_the_pod_with_its_prefix(as_text: bool) -> None:
    """The picked pod is set as a header and as metadata, whether the body came as bytes or as text."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    with serving(bench) as served:
        answer = check(served, request(as_text=as_text))
        assert answer.status.code == 0
        assert set_headers(answer) == {DESTINATION: B.address}
        assert answer.dynamic_metadata["envoy.lb"][DESTINATION] == B.address
        assert not answer.ok_response.headers_to_remove
        record = bench.decision_log.find("r")
        assert record is not None
        assert record["degraded"] is None
        assert len(bench.ledger) == 1


def test_gateway_only_headers_are_removed() -> None:
    """Control headers sent by a client are removed; its other headers are kept."""
    with serving(Bench().with_pods(A)) as served:
        answer = check(served, request(x_llm_d_inference_objective="mine", hi="mom"))
        assert list(answer.ok_response.headers_to_remove) == ["x-llm-d-inference-objective"]


@pytest.mark.parametrize("given_id", ["", "x" * 300, "caf\u00e9"])
def test_an_unusable_request_id_is_replaced(given_id: str) -> None:
    """Without a usable request id the router generates a different one for each request."""
    bench = Bench().with_pods(A)
    with serving(bench) as served:
        made = [set_headers(check(served, request(x_request_id=given_id)))["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(bench.decision_log.find(request_id) is not None for request_id in made)


def test_the_gateways_subset_is_obeyed() -> None:
    """Only pods listed in the gateway's metadata are picked."""
    message = request()
    hint = {"x-gateway-destination-endpoint-subset": [B.address]}
    message.attributes.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    with serving(Bench().with_pods(A, B)) as served:
        assert {set_headers(check(served, message))[DESTINATION] for _ in range(8)} == {B.address}


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        (request(b"{nonsense"), 400, None),
        (request(b'{"model": 7}'), 400, "model"),
        (request(json.dumps({"model": "gpt-9", "prompt": "hi"}).encode()), 404, "model"),
        (request(b" " * 5000), 413, None),
    ],
)
def test_errors_are_answered_in_openais_form(
    message: pb.CheckRequest, status: int, param: str | None
) -> None:
    """Each error rejects the request with its status and a JSON body, and a gRPC code other than OK."""
    bench = Bench().with_pods(A)
    with serving(bench, ExtProcOptions(max_request_bytes=4096)) as served:
        answer = check(served, message)
    assert answer.status.code != 0
    assert answer.denied_response.status.code == status
    error = json.loads(answer.denied_response.body)["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert set_headers(answer)["content-type"] == "application/json"
    assert bench.sample(
        "llm_d_epp_request_error_total",
        model_name="",
        target_model_name="",
        fairness_id="",
        priority="0",
        error_code=error["type"],
    )


def test_no_pod_is_a_503_with_the_protocols_reason() -> None:
    """Without ready pods the response is 503 with the protocol's reason header."""
    with serving(Bench()) as served:
        answer = check(served, request())
    assert answer.denied_response.status.code == 503
    assert set_headers(answer)["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


@pytest.mark.parametrize(
    "headers", [{"x_envoy_auth_partial_body": "true"}, {"content_length": str(len(BODY) + 1)}]
)
def test_a_partial_body_is_routed_by_load_and_logged_once(
    headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A request with a partial body is routed by load alone, counted each time and logged once."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    with serving(bench) as served:
        for _ in range(2):
            assert check(served, request(**headers)).status.code == 0
    record = bench.decision_log.find("r")
    assert record is not None
    assert record["degraded"] == "passthrough"
    assert bench.sample("kvroute_router_dropped_messages_total", door="check", reason="partial_body") == 2
    assert caplog.text.count("ext_authz partial body") == 1


def test_requests_without_a_body_and_unknown_paths_pass() -> None:
    """A GET and an unknown API are routed to some pod."""
    bench = Bench().with_pods(A)
    with serving(bench) as served:
        for message in (request(b"", "/v1/models"), request(b"any", "/tokenize"), request(b"")):
            assert set_headers(check(served, message))[DESTINATION] == A.address
    assert bench.sample("kvroute_router_dropped_messages_total", door="check", reason="partial_body") == 0


@pytest.mark.hypothesis
def test_hostile_requests_are_always_answered() -> None:
    """Any body, path and headers get a pod or an error, never a broken call."""
    with serving(Bench().with_pods(A)) as served:

        @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=examples(60), deadline=None)
        @given(
            body=st.binary(max_size=80),
            path=st.text(max_size=20),
            headers=st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=5),
        )
        def try_out(body: bytes, path: str, headers: dict[str, str]) -> None:
            message = request(body, path)
            message.attributes.request.http.headers.update(headers)
            answer = check(served, message)
            assert answer.HasField("ok_response") != answer.HasField("denied_response")
            assert answer.denied_response.status.code in (0, 400, 404, 413)

        try_out()
