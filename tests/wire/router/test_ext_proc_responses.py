"""The response phase of ext_proc over real gRPC: passing chunks on, usage, the end of the request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.ext_proc import ExtProcOptions
from router.doors.ext_proc_dialects import BodyMode
from router.inflight.failures import COST_S
from tests.support.router.bench import TINY, Bench, long_text, ready_pod
from tests.support.router.doors import (
    ServedBench,
    Stream,
    body,
    headers,
    response_body,
    response_headers,
    serving,
    set_headers,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("each_transport")

A = ready_pod("10.0.0.1:8000")
FULL = ExtProcOptions(responses_full=True)
HEADERS_ALONE = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
TEXT = long_text(100)
USAGE = {"usage": {"prompt_tokens_details": {"cached_tokens": 32}}}


def requested(served: ServedBench, request_id: str = "r", config: tuple[int, int] | None = None) -> Stream:
    """Return a stream whose request phase is complete."""
    stream = served.stream()
    data = json.dumps({"model": TINY, "prompt": TEXT, "stream": True}).encode()
    stream.send(headers(path="/v1/completions", x_request_id=request_id, config=config), body(data))
    assert set_headers(stream.receive())["x-gateway-destination-endpoint"] == A.address
    assert stream.receive().request_body.response.body_mutation.streamed_response.end_of_stream
    return stream


def echoed(answer: pb.ProcessingResponse) -> tuple[bytes, bool]:
    """Return the body and end_of_stream of a response_body response."""
    chunk = answer.response_body.response.body_mutation.streamed_response
    return chunk.body, chunk.end_of_stream


def ends(bench: Bench, outcome: str) -> float:
    """Return the number of requests whose end the response phase reported."""
    return bench.sample("kvroute_router_request_ends_total", source="response", outcome=outcome)


def test_a_streamed_response_is_echoed_chunk_by_chunk() -> None:
    """Each chunk is passed on before the next arrives; first token, usage and end are recorded."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        stream.send(response_headers(content_type="text/event-stream", status="200"))
        assert set_headers(stream.receive()) == {"x-went-into-resp-headers": "true"}
        stream.send(response_body(b"data: {}\n\n", end=False))
        assert echoed(stream.receive()) == (b"data: {}\n\n", False)
        wait_until(lambda: bench.ledger.load_table.work(A.address).decoding == 1, "first token")
        last = b"data: " + json.dumps(USAGE).encode() + b"\n\ndata: [DONE]\n\n"
        stream.send(response_body(last, end=False), response_body(b"", end=True))
        assert [echoed(stream.receive()) for _ in range(2)] == [(last, False), (b"", True)]
        assert stream.rest() == []
        wait_until(lambda: ends(bench, "done") == 1, "end")
    record = bench.decision_log.find("r")
    assert record is not None
    assert (record["delivered_cached_tokens"], record["prefill_end"]["source"]) == (32, "response")
    assert (len(bench.ledger), bench.index.settled[-1]) == (0, "r")


def test_a_response_that_is_not_streamed_has_no_first_token() -> None:
    """A response that is not streamed reports usage and end, but no first token."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        stream.send(response_headers(content_type="application/json", status="200"))
        stream.send(response_body(json.dumps(USAGE).encode(), end=True))
        answers = [stream.receive(), stream.receive()]
        assert echoed(answers[1])[1]
        stream.rest()
        wait_until(lambda: ends(bench, "done") == 1, "end")
    record = bench.decision_log.find("r")
    assert record is not None
    assert (record["delivered_cached_tokens"], record["prefill_end"]) == (32, None)


def test_large_chunks_are_cut_for_envoy() -> None:
    """A response chunk above 62,000 bytes is split, and only the last part ends the stream."""
    with serving(Bench().with_pods(A), FULL) as served:
        stream = requested(served)
        stream.send(response_headers(status="200"), response_body(b"x" * 100_000, end=True))
        stream.receive()
        pieces = [echoed(stream.receive()) for _ in range(2)]
        assert [(len(data), end) for data, end in pieces] == [(62_000, False), (38_000, True)]


@pytest.mark.parametrize("status", ["500", "503"])
def test_a_server_error_is_a_failed_request(status: str) -> None:
    """A 5xx status of the pod ends the request as failed."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        stream.send(response_headers(status=status, end=True))
        stream.receive()
        stream.rest()
        wait_until(lambda: ends(bench, "failed") == 1, "end")


@pytest.mark.parametrize(
    ("fields", "is_fault"),
    [
        ({"status": "500"}, True),
        ({"status": "503"}, True),
        ({"status": "503", "x_envoy_overloaded": "true"}, False),
        ({"status": "504"}, False),
        ({"status": "501"}, False),
        ({"status": "400"}, False),
        ({"status": "200", "content_type": "application/grpc", "grpc_status": "13"}, True),
        ({"status": "200", "content_type": "application/grpc", "grpc_status": "3"}, False),
    ],
)
def test_only_failures_of_the_pod_cost(fields: dict[str, str], is_fault: bool) -> None:
    """A pod's 5xx and internal gRPC errors cost; errors of clients, time limits and Envoy's own do not."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        stream.send(response_headers(end=True, **fields))
        stream.rest()
        wait_until(lambda: ends(bench, "failed") + ends(bench, "done") == 1, "end")
    assert bench.failure_s(A) == (COST_S if is_fault else 0.0)


def test_trailers_end_a_response() -> None:
    """A response that ends with trailers is complete, and the trailers are passed on."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        trailers = pb.ProcessingRequest(response_trailers=pb.HttpTrailers())
        stream.send(response_headers(status="200"), response_body(b"x", end=False), trailers)
        kinds = [stream.receive().WhichOneof("response") for _ in range(3)]
        assert kinds == ["response_headers", "response_body", "response_trailers"]
        stream.rest()
        wait_until(lambda: ends(bench, "done") == 1, "end")


def grpc_trailers(status: str) -> pb.ProcessingRequest:
    """Build the trailers of a gRPC response."""
    message = pb.ProcessingRequest(response_trailers=pb.HttpTrailers())
    message.response_trailers.trailers.headers.add(key="grpc-status", raw_value=status.encode())
    return message


@pytest.mark.parametrize("config", [None, HEADERS_ALONE], ids=["whole", "headers_alone"])
@pytest.mark.parametrize(("status", "outcome"), [("0", "done"), ("13", "failed")])
def test_grpc_status_in_trailers_decides_on_failure(
    status: str, outcome: str, config: tuple[int, int] | None
) -> None:
    """A gRPC response does not end with its headers, and grpc-status in its trailers decides on failure."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served, config=config)
        stream.send(response_headers(status="200", content_type="application/grpc"))
        stream.receive()
        assert len(bench.ledger) == 1
        stream.send(grpc_trailers(status))
        stream.rest()
        wait_until(lambda: ends(bench, outcome) == 1, "end")


def test_grpc_status_in_headers_decides_without_a_body() -> None:
    """In a gRPC response without body, grpc-status in the headers decides on failure."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        stream.send(
            response_headers(status="200", content_type="application/grpc", grpc_status="8", end=True)
        )
        stream.rest()
        wait_until(lambda: ends(bench, "failed") == 1, "end")


def test_a_client_that_goes_away_ends_its_request() -> None:
    """A reset in the middle of a response ends the request at once, as failed."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served)
        stream.send(response_headers(status="200", content_type="text/event-stream"))
        stream.receive()
        stream.cancel()
        wait_until(lambda: len(bench.ledger) == 0, "the cancelled request's end")
        wait_until(lambda: bench.metrics.requests_inside == 0, "the stream's end")
        assert ends(bench, "failed") == 1


@pytest.mark.parametrize(("status", "outcome"), [("200", "done"), ("429", "done"), ("503", "failed")])
def test_without_a_body_the_status_decides_on_failure(status: str, outcome: str) -> None:
    """If Envoy does not send bodies, a non-streamed response ends with its headers, by status."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served, config=HEADERS_ALONE)
        stream.send(response_headers(status=status, content_type="application/json"))
        assert stream.receive().WhichOneof("response") == "response_headers"
        stream.rest()
        wait_until(lambda: len(bench.ledger) == 0, "end")
        assert ends(bench, outcome) == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_an_event_stream_without_body_messages_is_ended_elsewhere(is_reset: bool) -> None:
    """If Envoy does not send bodies, the end of the stream does not end an event stream's request."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        stream = requested(served, config=HEADERS_ALONE)
        stream.send(response_headers(status="200", content_type="text/event-stream"))
        stream.receive()
        stream.cancel() if is_reset else stream.rest()
        wait_until(lambda: bench.metrics.requests_inside == 0, "the stream's end")
        assert (len(bench.ledger), ends(bench, "failed"), bench.index.lost) == (1, 0, [])
        stream = requested(served, "with trailers", config=HEADERS_ALONE)
        trailers = pb.ProcessingRequest(response_trailers=pb.HttpTrailers())
        stream.send(response_headers(status="200", content_type="text/event-stream"), trailers)
        stream.rest()
        wait_until(lambda: ends(bench, "done") == 1, "end")


def test_a_stream_that_ends_before_response_headers_has_failed() -> None:
    """A stream that ends before the response headers has failed, even where no body is expected."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        requested(served, config=HEADERS_ALONE).rest()
        wait_until(lambda: ends(bench, "failed") == 1, "end")


def test_a_stream_reset_after_the_last_answer_is_a_done_request() -> None:
    """A reset after the last response does not change a request that is done, nor its usage."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        for number in range(20):
            stream = requested(served, f"r{number}")
            stream.send(response_headers(status="200"), response_body(json.dumps(USAGE).encode(), end=True))
            answers = [stream.receive(), stream.receive()]
            assert echoed(answers[1])[1]
            stream.cancel()
        wait_until(lambda: len(bench.ledger) == 0, "all requests' ends")
        assert (ends(bench, "done"), ends(bench, "failed")) == (20, 0)
        assert {record["delivered_cached_tokens"] for record in bench.decision_log.latest(20)} == {32}


def test_a_response_phase_without_request_phase_is_passed_on() -> None:
    """A stream with only the response phase is passed on and recorded nowhere."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        answers = served.exchange(response_headers(status="200"), response_body(b"{}", end=True))
        assert [answer.WhichOneof("response") for answer in answers] == ["response_headers", "response_body"]
        assert bench.decision_log.latest(9) == []


def test_other_body_modes_get_responses_without_body() -> None:
    """In modes other than full duplex, the response to a chunk carries no body."""
    with serving(Bench().with_pods(A), FULL) as served:
        stream = served.stream()
        stream.send(headers(path="/v1/models", end=True, config=(BodyMode.BUFFERED, BodyMode.BUFFERED)))
        stream.receive()
        stream.send(response_headers(status="200"), response_body(b"{}", end=True))
        stream.receive()
        assert stream.receive() == pb.ProcessingResponse(response_body=pb.BodyResponse())


def test_parallel_responses_stay_apart() -> None:
    """Each of 64 concurrent responses gets its own chunks, and no entry stays in the ledger."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served, ThreadPoolExecutor(64) as pool:

        def one(number: int) -> bool:
            stream = requested(served, f"r{number}")
            chunks = [f"data: {number} {at}\n\n".encode() for at in range(5)]
            stream.send(response_headers(status="200", content_type="text/event-stream"))
            stream.send(*(response_body(chunk, end=False) for chunk in chunks), response_body(b"", end=True))
            answers = stream.rest()
            return [echoed(answer)[0] for answer in answers[1:]] == [*chunks, b""]

        assert all(pool.map(one, range(128)))
        wait_until(lambda: len(bench.ledger) == 0, "all requests' ends")
        assert ends(bench, "done") == 128


def test_a_request_without_a_body_ends_no_other_of_its_id() -> None:
    """The response to a GET does not end a request in flight with the same id."""
    bench = Bench().with_pods(A)
    with serving(bench, FULL) as served:
        working, asking = requested(served), served.stream()
        asking.send(headers(path="/v1/models", x_request_id="r", end=True), response_headers(end=True))
        assert set_headers(asking.receive())["x-gateway-destination-endpoint"] == A.address
        asking.receive()
        assert asking.rest() == []
        wait_until(lambda: bench.metrics.requests_inside == 1, "the GET's end")
        assert len(bench.ledger) == 1
        working.cancel()
