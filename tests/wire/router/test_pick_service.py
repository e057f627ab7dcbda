"""PickEndpoint and ReportOutcome over real gRPC."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router._pb import endpoint_picker_pb2 as pb
from router.doors.pick import route_request
from router.errors import RequestError
from tests.support.router.bench import TINY, TOKENIZER, Bench, long_text, ready_pod
from tests.support.router.doors import TIMEOUT_S, ServedBench, serving
from tests.support.stubs import picker_stub

pytestmark = pytest.mark.usefixtures("each_transport")

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
TEXT = long_text(200)
MESSAGES = json.dumps([{"role": "user", "content": TEXT}]).encode()
OUTCOME = pb.ReportOutcomeRequest


def pick(served: ServedBench, **fields: Any) -> pb.PickEndpointResponse:
    """Call PickEndpoint."""
    stub = picker_stub(served.channel)
    answer: pb.PickEndpointResponse = stub.PickEndpoint(pb.PickEndpointRequest(**fields), timeout=TIMEOUT_S)
    return answer


def report(served: ServedBench, request_id: str, outcome: OUTCOME.Outcome, **fields: Any) -> bool:
    """Call ReportOutcome; return whether the request is known."""
    stub = picker_stub(served.channel)
    request = OUTCOME(request_id=request_id, outcome=outcome, **fields)
    return bool(stub.ReportOutcome(request, timeout=TIMEOUT_S).known)


def test_the_answer_ranks_all_candidates_with_their_costs() -> None:
    """The pod with the cached prefix ranks first, each endpoint has its cost; a missing id is generated."""
    bench = Bench().with_pods(A, B)
    bench.index.hold(B.address, bench.keys(TEXT))
    with serving(bench) as served:
        answer = pick(served, model=TINY, prompt=TEXT)
        assert [endpoint.address for endpoint in answer.endpoints] == [B.address, A.address]
        best, other = answer.endpoints
        assert (best.pod_name, best.view, answer.degraded) == ("pod-8000", "EXACT", "")
        assert answer.prompt_tokens == len(TOKENIZER.encode(TEXT))
        assert best.cached_tokens > other.cached_tokens == 0
        assert best.cost_s < other.cost_s
        assert answer.reason.startswith("longest cached prefix")
        assert bench.decision_log.find(answer.request_id) is not None


def test_text_chat_and_token_ids_are_all_understood() -> None:
    """Text and chats are tokenized as by the engine; token ids are used as they are."""
    with serving(Bench().with_pods(A)) as served:
        ids = TOKENIZER.encode(TEXT)
        chat = pb.ChatInput(messages_json=MESSAGES, options_json=b'{"add_generation_prompt": false}')
        counts = [
            pick(served, model=TINY, prompt=TEXT).prompt_tokens,
            pick(served, model=TINY, token_ids=pb.TokenIds(ids=ids)).prompt_tokens,
            pick(served, model=TINY, chat=chat).prompt_tokens,
            pick(served, model=TINY, chat=pb.ChatInput(messages_json=MESSAGES)).prompt_tokens,
        ]
        assert counts[0] == counts[1] == len(ids)
        assert counts[0] < counts[2] < counts[3]


def test_candidates_and_a_missing_input_narrow_the_pick() -> None:
    """Only the given candidates are ranked, and without an input the pick is by load."""
    with serving(Bench().with_pods(A, B)) as served:
        answer = pick(served, model=TINY, candidates=[B.address])
        assert [endpoint.address for endpoint in answer.endpoints] == [B.address]
        assert answer.degraded == "passthrough"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "p"}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": TINY, "prompt": "p", "request_id": "x" * 999}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": TINY, "chat": pb.ChatInput(messages_json=b"{")}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"model": TINY, "chat": pb.ChatInput(messages_json=b"7")}, grpc.StatusCode.INVALID_ARGUMENT),
        (
            {"model": TINY, "chat": pb.ChatInput(messages_json=MESSAGES, options_json=b'{"model": "x"}')},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        ({"model": "gpt-9", "prompt": "p"}, grpc.StatusCode.NOT_FOUND),
        ({"model": TINY, "prompt": "p", "candidates": ["10.9.9.9:1"]}, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_errors_are_grpc_codes(fields: dict[str, Any], code: grpc.StatusCode) -> None:
    """Invalid input, an unknown model and missing pods have different status codes."""
    with serving(Bench().with_pods(A)) as served, pytest.raises(grpc.RpcError) as caught:
        pick(served, **fields)
    assert caught.value.code() is code
    assert caught.value.details()


def test_the_error_for_an_overlong_model_fits_a_grpc_status() -> None:
    """The error for an overlong model name is short enough for a gRPC status."""
    with serving(Bench().with_pods(A)) as served, pytest.raises(grpc.RpcError) as caught:
        pick(served, model="\u00e9" * 100_000, prompt="hi")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_unexpected_failure_is_counted_and_internal(monkeypatch: pytest.MonkeyPatch) -> None:
    """If routing fails unexpectedly, the call ends with INTERNAL and no internal details."""

    def fails(*_: object, **__: object) -> None:
        raise ValueError("a plugin tripped")

    bench = Bench().with_pods(A)
    monkeypatch.setattr(bench.index, "block_keys", fails)
    with serving(bench) as served, pytest.raises(grpc.RpcError) as caught:
        pick(served, model=TINY, prompt=TEXT)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "tripped" not in caught.value.details()
    labels = {"model_name": "", "target_model_name": "", "fairness_id": "", "priority": "0"}
    assert bench.sample("llm_d_epp_request_error_total", **labels, error_code="InternalServerError") == 1


def test_a_shed_request_gets_resource_exhausted_with_a_reason() -> None:
    """A request with priority below 0 is shed with RESOURCE_EXHAUSTED and the protocol's reason."""
    bench = Bench(priorities={"batch": -1}).with_pods(A)
    headers = {"x-llm-d-inference-objective": "batch"}
    with serving(bench) as served, pytest.raises(grpc.RpcError) as caught:
        pick(served, model=TINY, prompt=TEXT, headers=headers)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("x-llm-d-request-dropped-reason", "rejected-saturated") in caught.value.trailing_metadata()


def test_outcomes_reach_the_ledger() -> None:
    """First token and end count once; repeated reports are known, those of unknown ids are not."""
    bench = Bench().with_pods(A)
    with serving(bench) as served:
        pick(served, model=TINY, prompt=TEXT, request_id="r")
        assert report(served, "r", OUTCOME.OUTCOME_FIRST_TOKEN)
        assert bench.ledger.load_table.work(A.address).decoding == 1
        assert report(served, "r", OUTCOME.OUTCOME_DONE, cached_tokens=0)
        assert report(served, "r", OUTCOME.OUTCOME_DONE)
        assert bench.sample("kvroute_router_request_ends_total", source="report", outcome="done") == 1
        assert not report(served, "stranger", OUTCOME.OUTCOME_FAILED)
        record = bench.decision_log.find("r")
        assert record is not None
        assert record["delivered_cached_tokens"] == 0


def test_a_failed_outcome_costs_its_pod() -> None:
    """A reported failure costs the pod that the gateway names, else the picked one."""
    for address, failing in (("", A), (B.address, B)):
        bench = Bench().with_pods(A, B)
        with serving(bench) as served:
            pick(served, model=TINY, prompt=TEXT, request_id="r", candidates=[A.address])
            report(served, "r", OUTCOME.OUTCOME_FAILED, address=address)
        assert [bench.failure_s(pod) > 0.0 for pod in (A, B)] == [failing is A, failing is B]


def test_an_outcome_must_be_named() -> None:
    """A report without an outcome is rejected."""
    with serving(Bench()) as served, pytest.raises(grpc.RpcError) as caught:
        report(served, "r", OUTCOME.OUTCOME_UNSPECIFIED)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_parallel_picks_are_spread_over_pods() -> None:
    """64 concurrent picks are spread over both pods and are all in the ledger."""
    bench = Bench().with_pods(A, B)
    with serving(bench) as served, ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: pick(served, model=TINY, prompt=long_text(50, n)), range(64)))
    on_a = sum(answer.endpoints[0].address == A.address for answer in answers)
    assert len(bench.ledger) == 64
    assert 20 <= on_a <= 44


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(messages=st.binary(max_size=60), tools=st.binary(max_size=30), options=st.binary(max_size=30))
def test_hostile_calls_are_requests_or_400s(messages: bytes, tools: bytes, options: bytes) -> None:
    """Any bytes in the JSON fields give either a request or a 400."""
    chat = pb.ChatInput(messages_json=messages, tools_json=tools, options_json=options)
    status = 400
    try:
        route_request(pb.PickEndpointRequest(model="m", chat=chat), size_bytes=100)
    except RequestError as error:
        status = error.status
    assert status == 400
