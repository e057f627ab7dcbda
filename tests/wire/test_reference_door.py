"""The door in the reference's form beyond its cases: modes, trailers, bounds, rewrites."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.config.resources import RewriteRule, RewriteRules
from router.doors.ext_proc import ExtProcOptions
from router.doors.ext_proc_dialects import LlmdDialect
from router.doors.ext_proc_messages import BodyMode
from router.prompts.body_guard import BodyGuard
from router.prompts.parsers import DEFAULT_PARSERS, Parsers
from tests.unit.router_support import TINY, Bench, ready_pod
from tests.wire.router_wire_support import (
    Doors,
    body,
    doors,
    headers,
    response_body,
    response_headers,
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
def door(
    options: ExtProcOptions | None = None,
    *,
    parsers: Sequence[str] = DEFAULT_PARSERS,
    guard: BodyGuard | None = None,
) -> Iterator[Doors]:
    """Serves two pods."""
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
    with doors(bench, options, guard=guard, dialect=dialect) as served:
        yield served


def test_a_buffered_request_is_answered_on_its_body() -> None:
    """Headers get an empty answer; the body's carries the pod, and another body if it was rewritten."""
    mode = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with door() as served:
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
    """The pod gets the client's body without what only gateways may send, streamed or in one piece."""
    told = BODY[:-1] + rb', "kv_transfer\u005fparams": {}, "vllm_xargs": {"kv_hints": 1}}'
    expected = {**json.loads(BODY), "vllm_xargs": {}}
    mode = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with door() as served:
        got = served.exchange(headers(path=path), body(told))
        sent, _ = streamed_bytes(got[1:])
        assert json.loads(sent) == expected
        assert set_headers(got[0])["Content-Length"] == str(len(sent))
        got = served.exchange(headers(path=path, config=mode), body(told))
        sent = got[1].request_body.response.body_mutation.body
        assert json.loads(sent) == expected
        assert set_headers(got[1])["Content-Length"] == str(len(sent))


def test_a_clients_gateway_headers_are_removed() -> None:
    """Ranks and hosts that a client names are removed."""
    told = {"x_data_parallel_rank": "1", "x_prefiller_host_port": "10.0.0.9:1"}
    buffered = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with door() as served:
        streamed = served.exchange(headers(**told), body(BODY))[0].request_headers.response
        whole = served.exchange(headers(config=buffered, **told), body(BODY))[1].request_body.response
        empty = served.exchange(headers(end=True, **told))[0].request_headers.response
    expected = ["x-data-parallel-rank", "x-prefiller-host-port"]
    for common in (streamed, whole, empty):
        assert list(common.header_mutation.remove_headers) == expected
        assert not {one.header.key for one in common.header_mutation.set_headers}.intersection(expected)


def test_a_forbidden_field_inside_protobuf_is_refused() -> None:
    """JSON that a gRPC message carries is not rewritten: the client is told which field is wrong."""
    data = b'{"model": "m", "input": "x", "kv_hints": {}}'
    inner = b"\x12" + bytes([len(data)]) + data
    message = b"\x12" + bytes([len(inner)]) + inner
    with door(parsers=["vertexai-parser"]) as served:
        framed = b"\0" + len(message).to_bytes(4, "big") + message
        (answer,) = served.exchange(headers(path="/x.PredictionService/RawPredict"), body(framed))
    assert answer.immediate_response.status.code == 400
    assert b"kv_hints" in answer.immediate_response.body


@pytest.mark.parametrize("has_connector", [False, True])
def test_an_unreadable_body_is_refused_beside_a_connector(has_connector: bool) -> None:
    """What cannot be checked reaches no engine that has a KV connector: protobuf, forms, unseen bodies."""
    message = b"\x1a\x05hello"
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    unseen = (BodyMode.NONE, BodyMode.NONE)
    parsers = ["vllmgrpc-parser", "passthrough-parser"]
    with door(parsers=parsers, guard=BodyGuard(has_connector=lambda: has_connector)) as served:
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
    """A body in one piece is replaced, with its new length; one that needs no change is let pass."""
    mode = (BodyMode.BUFFERED, BodyMode.BUFFERED)
    with door() as served:
        asked = (headers(config=mode), body(BODY.replace(TINY.encode(), b"public")))
        answer = json.dumps({"model": TINY}, separators=(",", ":")).encode()
        for told, expected in ((answer, b'{"model":"public"}'), (b"{}", b"")):
            got = served.exchange(*asked, response_headers(), response_body(told, end=True))
            common = got[3].response_body.response
            assert common.body_mutation.body == expected
            lengths = [option.header.raw_value for option in common.header_mutation.set_headers]
            assert lengths == ([str(len(expected)).encode()] if expected else [])


def test_a_repeated_end_of_stream_is_not_answered() -> None:
    """Envoy repeats it for large bodies; the first counts."""
    with door() as served:
        got = served.exchange(headers(), body(BODY), body(b""))
        assert streamed_bytes(got[1:]) == (BODY, [True])
        assert served.bench.sample("kvroute_router_picks_total", degraded="") == 1


def test_request_trailers_end_the_body() -> None:
    """A body that ends in trailers is routed then, and its answer leaves the end to them."""
    with door() as served:
        got = served.exchange(headers(), body(BODY, end=False), TRAILERS)
        assert streamed_bytes(got[1:2]) == (BODY, [False])
        assert got[2].WhichOneof("response") == "request_trailers"


def test_a_response_too_long_to_hold_is_echoed_as_it_comes() -> None:
    """What is held has a bound; beyond it nothing is lost, and later chunks pass at once."""
    options = ExtProcOptions(max_request_bytes=1000, responses_full=True)
    with door(options) as served:
        chunks = [b"a" * 600, b"b" * 600, b"c" * 10]
        messages = [response_body(chunk, end=chunk is chunks[-1]) for chunk in chunks]
        got = served.exchange(headers(), body(BODY), response_headers(), *messages)
        echoes = [one.response_body.response.body_mutation.streamed_response for one in got[3:]]
        assert [one.body for one in echoes] == [chunks[0] + chunks[1], chunks[2]]
        assert [one.end_of_stream for one in echoes] == [False, True]


def test_held_bytes_come_before_the_trailers() -> None:
    """A response that ends in trailers is let go in front of them."""
    with door() as served:
        got = served.exchange(
            headers(), body(BODY), response_headers(), response_body(b"x", end=False), RESPONSE_TRAILERS
        )
        assert got[3].response_body.response.body_mutation.streamed_response.body == b"x"
        assert got[4].WhichOneof("response") == "response_trailers"
        assert len(served.bench.ledger) == 0


def test_a_response_whose_body_does_not_come_here_is_done_by_its_status() -> None:
    """Where Envoy sends the headers alone, they end an answer in one piece, and its events end elsewhere."""
    mode = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
    with door() as served:
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
    """Each chunk of an event stream is echoed before the next one comes, under the client's name."""
    with door() as served:
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
    """413 as soon as it is known, before it is held."""
    with door(ExtProcOptions(max_request_bytes=100)) as served:
        (answer,) = served.exchange(headers(), body(b"x" * 101, end=False))
        assert answer.immediate_response.status.code == 413


def test_decoding_only_if_cached_is_refused_where_nothing_is() -> None:
    """`prefer: if-available` is 412 on a pod without a cached block, and a pick on one that has some."""
    text = "hello " * 200
    asked = (headers(prefer="if-available"), body(json.dumps({"model": TINY, "prompt": text}).encode()))
    with door() as served:
        (answer,) = served.exchange(*asked)
        assert answer.immediate_response.status.code == 412
        assert len(served.bench.ledger) == 0
        served.bench.index.hold(B.address, served.bench.keys(text))
        assert set_headers(served.exchange(*asked)[0])[DESTINATION] == B.address


def test_a_subset_with_a_wrong_port_allows_nobody() -> None:
    """A subset names endpoints by address and port: another port is another endpoint."""
    with door() as served:
        (first, *_) = served.exchange(headers(), body(BODY, subset=["10.0.0.2:9"]))
        assert first.immediate_response.status.code == 503


def test_a_subset_is_not_looked_at_where_it_is_switched_off() -> None:
    """--disable-endpoint-subset-filter routes to any pod."""
    options = ExtProcOptions(subset_filter=False)
    with door(options) as served:
        (first, *_) = served.exchange(headers(), body(BODY, subset=["10.9.9.9:9"]))
        assert set_headers(first)[DESTINATION] in (A.address, B.address)


def test_a_request_without_a_body_keeps_to_the_subset() -> None:
    """Whatever needs no pod in particular goes to one that the gateway allows, or is refused."""
    asked = headers(end=True, path="/v1/models")
    hint = asked.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    with door() as served:
        for allowed in (A.address, B.address):
            hint.update({"x-gateway-destination-endpoint-subset": [allowed]})
            assert {set_headers(*served.exchange(asked))[DESTINATION] for _ in range(8)} == {allowed}
        hint.update({"x-gateway-destination-endpoint-subset": ["10.9.9.9:9"]})
        (refused,) = served.exchange(asked)
        assert refused.immediate_response.status.code == 503


def test_a_name_that_a_rule_would_replace_is_bounded_too() -> None:
    """What is kept with a decision is a name: megabytes in its place are refused, whatever the rules say."""
    with door() as served:
        data = json.dumps({"model": "x" * 1_000_000, "prompt": "hello"}).encode()
        (answer,) = served.exchange(headers(x_llm_d_model_name_rewrite=TINY), body(data))
        assert answer.immediate_response.status.code == 400
