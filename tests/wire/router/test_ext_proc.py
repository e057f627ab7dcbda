"""The request phase of ext_proc over real gRPC: order, chunks, headers, subset, errors, modes."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import json_format

from router.doors.ext_proc import ExtProcOptions
from router.doors.ext_proc_dialects import BodyMode
from tests.support.router.bench import TINY, Bench, ready_pod
from tests.support.router.doors import body, headers, serving, set_headers, streamed_bytes

pytestmark = pytest.mark.usefixtures("each_transport")

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": TINY, "prompt": "hello"}).encode()
DESTINATION = "x-gateway-destination-endpoint"


def both() -> Bench:
    """Return a bench with two ready pods."""
    return Bench().with_pods(A, B)


def test_a_streamed_request_is_answered_after_its_end_headers_first() -> None:
    """In streamed mode all responses follow the end of the body: pod, body, close."""
    with serving(both()) as served:
        stream = served.stream()
        stream.send(headers(path=COMPLETIONS, x_request_id="r1"), body(BODY[:9], end=False), body(BODY[9:]))
        first = stream.receive()
        pod = set_headers(first)[DESTINATION]
        assert pod in (A.address, B.address)
        assert set_headers(first) == {DESTINATION: pod, "content-length": str(len(BODY))}
        assert first.request_headers.response.clear_route_cache
        assert json_format.MessageToDict(first.dynamic_metadata) == {"envoy.lb": {DESTINATION: pod}}
        assert streamed_bytes(stream.rest()) == (BODY, [True])
        assert served.bench.ledger.load_table.work(pod).awaiting == 1


@pytest.mark.parametrize(("size", "answers"), [(61_999, 1), (62_000, 1), (62_001, 2), (125_000, 3)])
def test_a_large_body_is_answered_in_chunks(size: int, answers: int) -> None:
    """No response carries more than 62,000 bytes, and only the last one ends the stream."""
    filler = size - len(json.dumps({"model": TINY, "prompt": ""}))
    data = json.dumps({"model": TINY, "prompt": "a" * filler}).encode()
    with serving(both()) as served:
        got = served.exchange(headers(path=COMPLETIONS), body(data[:40_000], end=False), body(data[40_000:]))
        echoed, ends = streamed_bytes(got[1:])
        assert (echoed, ends) == (data, [False] * (answers - 1) + [True])


def test_an_empty_body_is_one_answer() -> None:
    """An empty body on an unknown path is passed through as one empty response."""
    with serving(both()) as served:
        got = served.exchange(headers(path="/tokenize", x_request_id="r"), body(b""))
        assert list(set_headers(got[0])) == [DESTINATION]
        assert streamed_bytes(got[1:]) == (b"", [True])


def test_a_request_without_a_body_is_answered_at_once() -> None:
    """Headers that end the stream get a pod by load and no content-length."""
    with serving(both()) as served:
        (answer,) = served.exchange(headers(path="/v1/models", end=True, x_request_id="r"))
        assert list(set_headers(answer)) == [DESTINATION]
        assert len(served.bench.ledger) == 0


def test_an_unusable_request_id_is_generated() -> None:
    """A request without a usable id gets a UUID as a header and in the decision log; a usable id is kept."""
    with serving(both()) as served:
        for given in ({}, {"x_request_id": "x" * 1000}, {"x_request_id": "caf\u00e9"}):
            got = served.exchange(headers(path=COMPLETIONS, **given), body(BODY))
            made = set_headers(got[0])["x-request-id"]
            assert str(uuid.UUID(made)) == made
            assert served.bench.decision_log.find(made) is not None


def test_gateway_only_headers_of_a_client_are_overwritten_or_removed() -> None:
    """A client cannot choose its pod or pass on control headers: they are overwritten or removed."""
    with serving(both()) as served:
        forged = {
            "x_gateway_destination_endpoint": "6.6.6.6:666",
            "x_gateway_destination_endpoint_subset": "6.6.6.6:666",
            "x_llm_d_inference_objective": "mine",
        }
        (answer, *_) = served.exchange(headers(path=COMPLETIONS, hi="mom", **forged), body(BODY))
        mutation = answer.request_headers.response.header_mutation
        assert set_headers(answer)[DESTINATION] in (A.address, B.address)
        assert set(mutation.remove_headers) == {
            "x-gateway-destination-endpoint-subset",
            "x-llm-d-inference-objective",
        }


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.STREAMED])
def test_a_call_for_a_picked_request_is_counted_as_such(mode: BodyMode) -> None:
    """A call counts as repeated if the request is in flight at the named pod, with or without its body."""
    with serving(both()) as served:

        def call(request_id: str, **named: str) -> str:
            config = mode, BodyMode.NONE
            named |= {"x_request_id": request_id, "content_length": str(len(BODY))}
            first = headers(path=COMPLETIONS, config=config, **named)
            return set_headers(served.exchange(first, body(BODY))[0])[DESTINATION]

        pod = call("r")
        assert served.bench.sample("kvroute_router_served_requests_total", outcome="again") == 0
        call("other", x_gateway_destination_endpoint=pod)
        call("r", x_gateway_destination_endpoint="6.6.6.6:666")
        assert served.bench.sample("kvroute_router_served_requests_total", outcome="again") == 0
        call("r", x_gateway_destination_endpoint=pod)
        assert served.bench.sample("kvroute_router_served_requests_total", outcome="again") == 1


@pytest.mark.parametrize("on_body", [True, False])
def test_the_subset_hint_is_taken_from_either_message(on_body: bool) -> None:
    """The gateway's subset applies whether it arrives with the headers or with the body."""
    first, second = headers(path=COMPLETIONS), body(BODY, subset=[B.address] if on_body else None)
    if not on_body:
        first.metadata_context.CopyFrom(body(b"", subset=[B.address]).metadata_context)
    with serving(both()) as served:
        answers = [served.exchange(first, second)[0] for _ in range(5)]
        assert {set_headers(answer)[DESTINATION] for answer in answers} == {B.address}


@pytest.mark.parametrize(
    ("bench", "data", "subset", "status", "reason"),
    [
        (both(), b"{nonsense", None, 400, None),
        (both(), b'{"prompt":"hello"}', None, 400, None),
        (both(), b'{"model":"kvroute-tiny","prompt":{}}', None, 400, None),
        (both(), b'{"model":"gpt-9","prompt":"hello"}', None, 404, None),
        (both(), BODY, ["10.9.9.9:1"], 503, "rejected-no-endpoints"),
        (Bench(), BODY, None, 503, "rejected-no-endpoints"),
    ],
)
def test_errors_are_immediate_openai_shaped_answers(
    bench: Bench, data: bytes, subset: list[str] | None, status: int, reason: str | None
) -> None:
    """A request that cannot be routed gets an immediate response with status, JSON body and reason."""
    with serving(bench) as served:
        (answer,) = served.exchange(headers(path=COMPLETIONS), body(data, subset=subset))
        immediate = answer.immediate_response
        expected = {"content-type": "application/json"}
        if reason is not None:
            expected["x-llm-d-request-dropped-reason"] = reason
        assert (immediate.status.code, set_headers(answer)) == (status, expected)
        assert json.loads(immediate.body)["error"]["code"] == status
        assert len(bench.ledger) == 0


def test_a_body_above_the_limit_is_refused_while_it_grows_and_when_announced() -> None:
    """A body above the limit gets 413 as soon as the limit is passed, or at once by its content-length."""
    with serving(both(), ExtProcOptions(max_request_bytes=1000)) as served:
        grown = served.exchange(
            headers(path=COMPLETIONS), body(b" " * 600, end=False), body(b" " * 600, end=False)
        )
        told = served.exchange(headers(path=COMPLETIONS, content_length="1001"))
        absurd = served.exchange(headers(path=COMPLETIONS, content_length="9" * 5000))
        codes = [answer.immediate_response.status.code for (answer,) in (grown, told, absurd)]
        assert codes == [413, 413, 413]


def test_buffered_mode_routes_on_the_bodys_answer() -> None:
    """In buffered mode the headers' response is empty and the body's response carries the pod."""
    with serving(both()) as served:
        stream = served.stream()
        stream.send(headers(path=COMPLETIONS, x_request_id="r", config=(BodyMode.BUFFERED, BodyMode.NONE)))
        assert stream.receive() == pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        stream.send(body(BODY))
        answer = stream.receive()
        assert list(set_headers(answer)) == [DESTINATION]
        assert answer.request_body.response.clear_route_cache
        assert not answer.request_body.response.HasField("body_mutation")
        assert stream.rest() == []


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED])
def test_a_body_after_the_pick_is_routed_by_load(mode: int) -> None:
    """If Envoy forwards the headers before the body has arrived, the pick is by load alone."""
    with serving(both()) as served:
        stream = served.stream()
        stream.send(headers(path=COMPLETIONS, config=(mode, BodyMode.NONE)))
        assert DESTINATION in set_headers(stream.receive())
        if mode == BodyMode.STREAMED:
            stream.send(body(BODY[:5], end=False), body(BODY[5:]))
            assert stream.receive() == pb.ProcessingResponse(request_body=pb.BodyResponse())
            assert stream.receive() == pb.ProcessingResponse(request_body=pb.BodyResponse())
        assert stream.rest() == []


def test_trailers_end_a_body_as_well() -> None:
    """A request that ends with trailers gets responses in the order headers, body, trailers."""
    with serving(both()) as served:
        got = served.exchange(
            headers(path=COMPLETIONS),
            body(BODY, end=False),
            pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
        )
        assert DESTINATION in set_headers(got[0])
        assert streamed_bytes(got[1:-1]) == (BODY, [False])
        assert got[-1].WhichOneof("response") == "request_trailers"


def test_a_repeated_end_of_stream_is_ignored() -> None:
    """A repeated end of stream, which Envoy sends for large bodies, is ignored."""
    with serving(both(), ExtProcOptions(responses_full=True)) as served:
        stream = served.stream()
        stream.send(headers(path=COMPLETIONS), body(BODY))
        assert [stream.receive().WhichOneof("response") for _ in range(2)] == [
            "request_headers",
            "request_body",
        ]
        stream.send(body(b""), body(BODY))
        assert stream.rest() == []
        sample = served.bench.sample
        assert (
            sample("kvroute_router_dropped_messages_total", door="ext_proc", reason="repeated_end_of_stream")
            == 2
        )


def test_messages_out_of_order_are_dropped_and_counted() -> None:
    """Messages out of order are dropped and counted, and the request is still served."""
    with serving(both()) as served:
        got = served.exchange(
            pb.ProcessingRequest(),
            body(b"early", end=False),
            pb.ProcessingRequest(request_trailers=pb.HttpTrailers()),
            headers(path=COMPLETIONS),
            headers(path="/v1/chat/completions"),
            body(BODY),
        )
        assert [answer.WhichOneof("response") for answer in got] == ["request_headers", "request_body"]
        reasons = (
            "unknown_message",
            "body_before_headers",
            "trailers_before_headers",
            "second_request_headers",
        )
        counts = [
            served.bench.sample("kvroute_router_dropped_messages_total", door="ext_proc", reason=reason)
            for reason in reasons
        ]
        assert counts == [1, 1, 1, 1]


def test_an_unexpected_failure_is_a_500_and_not_a_broken_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """If routing fails unexpectedly, the client gets a 500 in OpenAI's format."""
    bench = both()
    monkeypatch.setattr(bench.index, "match", lambda keys, pods: {})
    with serving(bench) as served:
        data = json.dumps({"model": TINY, "prompt": "hello " * 50}).encode()
        (answer,) = served.exchange(headers(path=COMPLETIONS), body(data))
        assert answer.immediate_response.status.code == 500
        assert json.loads(answer.immediate_response.body)["error"]["type"] == "InternalServerError"


def test_parallel_streams_are_all_answered() -> None:
    """Each of 64 concurrent requests gets its own body back and one ledger entry."""
    with serving(both()) as served, ThreadPoolExecutor(64) as pool:

        def one(number: int) -> bool:
            data = json.dumps({"model": TINY, "prompt": f"request {number}"}).encode()
            got = served.exchange(headers(path=COMPLETIONS, x_request_id=f"r{number}"), body(data))
            return DESTINATION in set_headers(got[0]) and streamed_bytes(got[1:]) == (data, [True])

        assert all(pool.map(one, range(256)))
        assert len(served.bench.ledger) == 256
