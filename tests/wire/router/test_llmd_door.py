"""ext_proc in the reference picker's dialect, beyond its own cases: modes, trailers, bounds, rewrites."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.config.picker_file import RewriteRule, RewriteRules
from router.doors.boundary import BodyGuard
from router.doors.ext_proc import ExtProcOptions
from router.doors.ext_proc_dialects import BodyMode, LlmdDialect
from router.prompts.parsers import DEFAULT_PARSERS, Parsers
from tests.support.router.bench import TINY, Bench, ready_pod
from tests.support.router.doors import (
    ServedBench,
    body,
    headers,
    response_body,
    response_headers,
    serving,
    set_headers,
    streamed_bytes,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("each_transport")

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
DESTINATION = "x-gateway-destination-endpoint"
BODY = json.dumps({"model": TINY, "prompt": "hello"}).encode()
RULES = [RewriteRule(frozenset({"public"}), [(TINY, None)])]
TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
RESPONSE_TRAILERS = pb.ProcessingRequest(response_trailers=pb.HttpTrailers())


@contextmanager
def serving_llmd(
    options: ExtProcOptions | None = None,
    *,
    parsers: Sequence[str] = DEFAULT_PARSERS,
    guard: BodyGuard | None = None,
) -> Iterator[ServedBench]:
    """Serve two pods in the reference picker's dialect."""
    bench = Bench().with_pods(A, B)
    options = options or ExtProcOptions(responses_full=True)

    guard = guard or BodyGuard()
    dialect = LlmdDialect(
        router=bench.router,
        guard=guard,
        metrics=bench.metrics,
        parsers=Parsers(parsers),
        buffered_bytes_max=options.max_request_bytes,
        pods=bench.pods,
        rewrites=RewriteRules(RULES, np.random.default_rng(1)),
    )
    with serving(bench, options, guard=guard, dialect=dialect) as served:
        yield served


def test_a_buffered_request_is_answered_on_its_body() -> None:
    """In buffered mode the body's response carries the pod, and the new body if it was rewritten."""
    mode = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with serving_llmd() as served:
        got = served.exchange(headers(config=mode), body(BODY))
        assert [one.WhichOneof("response") for one in got] == ["request_headers", "request_body"]
        assert not got[0].request_headers.response.header_mutation.set_headers
        assert set_headers(got[1])[DESTINATION] in (A.address, B.address)
        assert not got[1].request_body.response.HasField("body_mutation")
        got = served.exchange(headers(config=mode), body(BODY.replace(TINY.encode(), b"public")))
        sent = got[1].request_body.response.body_mutation.body
        assert json.loads(sent) == json.loads(BODY)
        assert set_headers(got[1])["Content-Length"] == str(len(sent))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/unknown"])
def test_forbidden_fields_are_removed_from_the_body(path: str) -> None:
    """Forbidden fields are removed from the body, streamed or buffered."""
    told = BODY[:-1] + rb', "kv_transfer\u005fparams": {}, "vllm_xargs": {"kv_hints": 1}}'
    expected = {**json.loads(BODY), "vllm_xargs": {}}
    mode = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with serving_llmd() as served:
        got = served.exchange(headers(path=path), body(told))
        sent, _ = streamed_bytes(got[1:])
        assert json.loads(sent) == expected
        assert set_headers(got[0])["Content-Length"] == str(len(sent))
        got = served.exchange(headers(path=path, config=mode), body(told))
        sent = got[1].request_body.response.body_mutation.body
        assert json.loads(sent) == expected
        assert set_headers(got[1])["Content-Length"] == str(len(sent))


def test_a_clients_gateway_headers_are_removed() -> None:
    """Rank and host headers sent by a client are removed."""
    told = {"x_data_parallel_rank": "1", "x_prefiller_host_port": "10.0.0.9:1"}
    buffered = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with serving_llmd() as served:
        streamed = served.exchange(headers(**told), body(BODY))[0].request_headers.response
        whole = served.exchange(headers(config=buffered, **told), body(BODY))[1].request_body.response
        empty = served.exchange(headers(end=True, **told))[0].request_headers.response
    expected = ["x-data-parallel-rank", "x-prefiller-host-port"]
    for common in (streamed, whole, empty):
        assert list(common.header_mutation.remove_headers) == expected
        assert not {one.header.key for one in common.header_mutation.set_headers}.intersection(expected)


def test_a_forbidden_field_inside_protobuf_is_refused() -> None:
    """A forbidden field in JSON inside a gRPC message is rejected with its name."""
    data = b'{"model": "m", "input": "x", "kv_hints": {}}'
    inner = b"\x12" + bytes([len(data)]) + data
    message = b"\x12" + bytes([len(inner)]) + inner
    with serving_llmd(parsers=["vertexai-parser"]) as served:
        framed = b"\0" + len(message).to_bytes(4, "big") + message
        (answer,) = served.exchange(headers(path="/x.PredictionService/RawPredict"), body(framed))
    assert answer.immediate_response.status.code == 400
    assert b"kv_hints" in answer.immediate_response.body


@pytest.mark.parametrize("has_connector", [False, True])
def test_an_unreadable_body_is_rejected_with_a_kv_connector(has_connector: bool) -> None:
    """A body that cannot be checked is rejected where an engine has a KV connector."""
    message = b"\x1a\x05hello"
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    unseen = (BodyMode.NONE, BodyMode.NONE)
    parsers = ["vllmgrpc-parser", "passthrough-parser"]
    with serving_llmd(parsers=parsers, guard=BodyGuard(has_connector=lambda: has_connector)) as served:
        for told in (
            (headers(path="/vllm.grpc.engine.VllmEngine/Generate"), body(framed)),
            (headers(path="/v1/audio/transcriptions"), body(b"--b\r\n\r\n--b--")),
            (headers(path="/v1/completions", config=unseen),),
        ):
            answer = served.exchange(*told)[0]
            assert (answer.immediate_response.status.code == 400) is has_connector
            assert (DESTINATION in set_headers(answer)) is not has_connector
        assert DESTINATION in set_headers(served.exchange(headers(path="/v1/models", end=True))[0])


def test_a_buffered_response_has_its_model_restored() -> None:
    """In buffered mode a body is replaced only if the model's name in it changes."""
    mode = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with serving_llmd() as served:
        asked = (headers(config=mode), body(BODY.replace(TINY.encode(), b"public")))
        answer = json.dumps({"model": TINY}, separators=(",", ":")).encode()
        for told, expected in ((answer, b'{"model":"public"}'), (b"{}", b"")):
            got = served.exchange(*asked, response_headers(), response_body(told, end=True))
            common = got[3].response_body.response
            assert common.body_mutation.body == expected
            lengths = [option.header.raw_value for option in common.header_mutation.set_headers]
            assert lengths == ([str(len(expected)).encode()] if expected else [])


def test_a_repeated_end_of_stream_is_not_answered() -> None:
    """A repeated end of stream, which Envoy sends for large bodies, gets no response."""
    with serving_llmd() as served:
        got = served.exchange(headers(), body(BODY), body(b""))
        assert streamed_bytes(got[1:]) == (BODY, [True])
        assert served.bench.sample("kvroute_router_picks_total", degraded="") == 1


def test_request_trailers_end_the_body() -> None:
    """A body that ends with trailers is routed at the trailers, whose response ends the stream."""
    with serving_llmd() as served:
        got = served.exchange(headers(), body(BODY, end=False), TRAILERS)
        assert streamed_bytes(got[1:2]) == (BODY, [False])
        assert got[2].WhichOneof("response") == "request_trailers"


def test_a_response_too_long_to_buffer_is_passed_on_in_chunks() -> None:
    """A response above the buffer's limit is passed on in full, and later chunks at once."""
    options = ExtProcOptions(max_request_bytes=1000, responses_full=True)
    with serving_llmd(options) as served:
        chunks = [b"a" * 600, b"b" * 600, b"c" * 10]
        messages = [response_body(chunk, end=chunk is chunks[-1]) for chunk in chunks]
        got = served.exchange(headers(), body(BODY), response_headers(), *messages)
        echoes = [one.response_body.response.body_mutation.streamed_response for one in got[3:]]
        assert [one.body for one in echoes] == [chunks[0] + chunks[1], chunks[2]]
        assert [one.end_of_stream for one in echoes] == [False, True]


def test_buffered_bytes_are_sent_before_the_trailers() -> None:
    """A buffered response that ends with trailers is sent before the trailers."""
    with serving_llmd() as served:
        got = served.exchange(
            headers(), body(BODY), response_headers(), response_body(b"x", end=False), RESPONSE_TRAILERS
        )
        assert got[3].response_body.response.body_mutation.streamed_response.body == b"x"
        assert got[4].WhichOneof("response") == "response_trailers"
        assert len(served.bench.ledger) == 0


def test_a_response_without_body_messages_is_ended_by_its_status() -> None:
    """If Envoy does not send bodies, the status ends a non-streamed response; events end elsewhere."""
    mode = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
    with serving_llmd() as served:
        for status in ("200", "200", "503"):
            served.exchange(headers(config=mode), body(BODY), response_headers(status=status))
        wait_until(lambda: len(served.bench.ledger) == 0, "the ends")
        ended = [
            served.bench.sample("kvroute_router_request_ends_total", source="response", outcome=outcome)
            for outcome in ("done", "failed")
        ]
        assert ended == [2, 1]
        events = response_headers(status="200", content_type="text/event-stream")
        served.exchange(headers(config=mode), body(BODY), events)
        wait_until(lambda: served.bench.metrics.requests_inside == 0, "the stream's end")
        assert len(served.bench.ledger) == 1


def test_events_are_renamed_one_by_one() -> None:
    """Each chunk of an event stream is passed on before the next arrives, with the client's model name."""
    with serving_llmd() as served:
        stream = served.stream()
        stream.send(headers(), body(BODY.replace(TINY.encode(), b"public")))
        stream.receive(), stream.receive()
        stream.send(response_headers(content_type="text/event-stream"))
        stream.receive()
        for _ in range(3):
            stream.send(response_body(f'data: {{"model":"{TINY}"}}\n\n'.encode(), end=False))
            echoed = stream.receive().response_body.response.body_mutation.streamed_response.body
            assert echoed == b'data: {"model":"public"}\n\n'
        assert stream.rest() == []


def test_a_body_beyond_the_limit_is_refused() -> None:
    """A body above the limit gets 413 before it is buffered."""
    with serving_llmd(ExtProcOptions(max_request_bytes=100)) as served:
        (answer,) = served.exchange(headers(), body(b"x" * 101, end=False))
        assert answer.immediate_response.status.code == 413


def test_prefer_if_available_needs_a_cached_block() -> None:
    """`prefer: if-available` gets 412 on a pod without a cached block, else the pick."""
    text = "hello " * 200
    asked = (headers(prefer="if-available"), body(json.dumps({"model": TINY, "prompt": text}).encode()))
    with serving_llmd() as served:
        (answer,) = served.exchange(*asked)
        assert answer.immediate_response.status.code == 412
        assert len(served.bench.ledger) == 0
        served.bench.index.hold(B.address, served.bench.keys(text))
        assert set_headers(served.exchange(*asked)[0])[DESTINATION] == B.address


def test_a_subset_with_another_port_matches_no_pod() -> None:
    """A subset entry with another port is another endpoint, and matches no pod."""
    with serving_llmd() as served:
        (first, *_) = served.exchange(headers(), body(BODY, subset=["10.0.0.2:9"]))
        assert first.immediate_response.status.code == 503


def test_a_disabled_subset_filter_ignores_the_subset() -> None:
    """With --disable-endpoint-subset-filter a pod outside the gateway's subset may be picked."""
    options = ExtProcOptions(subset_filter=False)
    with serving_llmd(options) as served:
        (first, *_) = served.exchange(headers(), body(BODY, subset=["10.9.9.9:9"]))
        assert set_headers(first)[DESTINATION] in (A.address, B.address)


def test_a_request_without_a_body_keeps_to_the_subset() -> None:
    """A request without body gets a random pod of the gateway's subset, or an error without one."""
    asked = headers(end=True, path="/v1/models")
    hint = asked.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    with serving_llmd() as served:
        for allowed in (A.address, B.address):
            hint.update({"x-gateway-destination-endpoint-subset": [allowed]})
            assert {set_headers(*served.exchange(asked))[DESTINATION] for _ in range(8)} == {allowed}
        hint.update({"x-gateway-destination-endpoint-subset": ["10.9.9.9:9"]})
        (refused,) = served.exchange(asked)
        assert refused.immediate_response.status.code == 503


def test_a_rewritten_model_name_is_bounded_too() -> None:
    """A model name above the length limit is rejected even if a rewrite rule matches it."""
    with serving_llmd() as served:
        data = json.dumps({"model": "x" * 1_000_000, "prompt": "hello"}).encode()
        (answer,) = served.exchange(headers(x_llm_d_model_name_rewrite=TINY), body(data))
        assert answer.immediate_response.status.code == 400
