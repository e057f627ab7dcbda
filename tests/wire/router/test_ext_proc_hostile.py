"""Hostile ext_proc streams on a real gRPC server: any messages, idle and half-closed streams, floods."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.config.picker_file import RewriteRules
from router.doors.boundary import BodyGuard
from router.doors.ext_proc import ExtProcOptions
from router.doors.ext_proc_dialects import BodyMode, LlmdDialect, NativeDialect
from router.prompts.parsers import Parsers
from tests.support.depth import examples
from tests.support.router.bench import TINY, Bench, ready_pod
from tests.support.router.doors import (
    ServedBench,
    Stream,
    body,
    headers,
    serving,
    set_headers,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("each_transport")

DESTINATION = "x-gateway-destination-endpoint"
GOOD = json.dumps({"model": TINY, "prompt": "hello"}).encode()
DIALECTS = ("ours", "reference")


class Served:
    """One ext_proc service on a real server."""

    def __init__(self, service: ServedBench) -> None:
        self.bench = service.bench
        self.exchange = service.exchange
        self.stub = pb_grpc.ExternalProcessorStub(service.channel)

    def works(self) -> bool:
        """Return whether a plain request still gets a pod."""
        answers = self.exchange(headers(path="/v1/completions"), body(GOOD))
        return DESTINATION in set_headers(answers[0])

    def has_place(self) -> bool:
        """Return whether a plain request gets a pod rather than RESOURCE_EXHAUSTED."""
        try:
            return self.works()
        except grpc.RpcError as refused:
            error: Any = refused
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False


@contextmanager
def served(kind: str, *, streams: int = 32) -> Iterator[Served]:
    """Serve two pods by one ext_proc service with a limit of concurrent streams."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000"))

    own: dict[str, Any] = {"router": bench.router, "guard": BodyGuard(), "metrics": bench.metrics}
    if kind == "ours":
        dialect = NativeDialect(**own)
    else:
        rewrites = RewriteRules([], np.random.default_rng(1))
        dialect = LlmdDialect(
            **own, parsers=Parsers(), buffered_bytes_max=1 << 20, pods=bench.pods, rewrites=rewrites
        )
    options = ExtProcOptions(1 << 20, responses_full=True)
    with serving(bench, options, threads=streams, dialect=dialect, message_bytes_max=1 << 20) as opened:
        yield Served(opened)


BYTES = st.binary(max_size=200) | st.sampled_from(
    [
        GOOD,
        b"{",
        b"[]",
        b'{"model": 1}',
        b'{"model": "m", "model": "n", "prompt": "x"}',
        b"\xff\xfe",
        b"9" * 400,
    ]
)
TEXTS = st.text(max_size=30)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/messages", "/x", "", "\x00"]) | TEXTS


@st.composite
def messages(draw: st.DrawFn) -> pb.ProcessingRequest:
    """Draw any message of a stream, valid or not."""
    kind = draw(
        st.sampled_from(
            [
                "request_headers",
                "request_body",
                "request_trailers",
                "response_headers",
                "response_body",
                "response_trailers",
                "nothing",
            ]
        )
    )
    message = pb.ProcessingRequest()
    if kind == "nothing":
        return message
    part = getattr(message, kind)
    part.SetInParent()
    if kind.endswith("_headers"):
        named = {":path": draw(PATHS)} | draw(st.dictionaries(TEXTS, TEXTS, max_size=4))
        for name, value in named.items():
            part.headers.headers.add(key=name, raw_value=value.encode())
        part.headers.headers.add(key="x-bytes", raw_value=draw(st.binary(max_size=20)))
    if kind.endswith("_body"):
        part.body = draw(BYTES)
    if not kind.endswith("_trailers"):
        part.end_of_stream = draw(st.booleans())
    if draw(st.booleans()):
        modes = st.sampled_from([BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED, 4, 77])
        message.protocol_config.request_body_mode = draw(modes)
        message.protocol_config.response_body_mode = draw(modes)
    hint = draw(st.none() | st.lists(st.text(max_size=12), max_size=3))
    if hint is not None:
        namespace = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        namespace.update({"x-gateway-destination-endpoint-subset": hint})
    return message


def check_order(answers: Sequence[pb.ProcessingResponse]) -> None:
    """Assert the order of responses: headers first and once, request before response, none after an error."""
    kinds = [answer.WhichOneof("response") for answer in answers]
    assert None not in kinds
    if "immediate_response" in kinds:
        assert kinds.index("immediate_response") == len(kinds) - 1
        refusal = answers[-1].immediate_response
        assert 400 <= refusal.status.code <= 599
        assert refusal.body
    assert kinds.count("request_headers") <= 1
    if "request_body" in kinds and "request_headers" in kinds:
        assert kinds.index("request_headers") < kinds.index("request_body")
    for answer in answers:
        for phase in ("request_body", "response_body"):
            chunk = getattr(answer, phase).response.body_mutation.streamed_response.body
            assert len(chunk) <= 62_000


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", DIALECTS)
def test_any_stream_gets_wellformed_responses_and_a_clean_end(kind: str) -> None:
    """Any messages in any order get well-formed responses and a clean end, and leave no ledger entry."""
    with served(kind) as service:

        @settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(messages(), max_size=8))
        def play(sent: list[pb.ProcessingRequest]) -> None:
            check_order(service.exchange(*sent))
            wait_until(lambda: len(service.bench.ledger) == 0, "the ends")

        play()
        assert service.works()


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_half_closed_stream_ends_and_frees_its_slot(kind: str) -> None:
    """A stream closed after any part of the request ends without a response and frees its slot."""
    start, part, whole = headers(path="/v1/completions"), body(GOOD[:5], end=False), body(GOOD)
    with served(kind, streams=4) as service:
        for sent in ([], [start], [start, part], [start, whole]):
            for _ in range(6):
                check_order(service.exchange(*sent))
        wait_until(lambda: len(service.bench.ledger) == 0, "the ends")
        assert service.works()


@pytest.mark.parametrize("kind", DIALECTS)
def test_slow_streams_are_ended_when_slots_run_out(kind: str) -> None:
    """Idle streams keep their slots until others need them; then the oldest without a pick is ended."""
    with served(kind, streams=8) as service:
        answered, *idle = (Stream(service.stub) for _ in range(8))
        answered.send(headers(path="/v1/completions"), body(GOOD))
        assert DESTINATION in set_headers(answered.receive())
        answered.receive()
        for stream in idle:
            stream.send(headers(path="/v1/completions"), body(GOOD[:5], end=False))
        wait_until(service.has_place, "a place")
        wait_until(lambda: not all(stream.is_open for stream in idle), "the end of one")
        dropped = "kvroute_router_dropped_messages_total"
        assert service.bench.sample(dropped, door="ext_proc", reason="slow_request") == 1
        (gone,) = (stream for stream in idle if not stream.is_open)
        with pytest.raises(grpc.RpcError) as caught:
            gone.receive()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert answered.is_open
        rest = [stream for stream in idle if stream is not gone]
        rest[0].send(body(GOOD[5:]))
        assert DESTINATION in set_headers(rest[0].receive())
        for stream in (answered, *rest):
            stream.rest()


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_header_flood_is_refused_or_bounded(kind: str) -> None:
    """Thousands of headers within the message limit are accepted; gRPC rejects more; other calls go on."""
    with served(kind) as service:
        flood = headers(path="/v1/completions")
        for number in range(5000):
            flood.request_headers.headers.headers.add(key=f"x-{number % 1000}", raw_value=b"v" * 10)
        answers = service.exchange(flood, body(GOOD))
        assert DESTINATION in set_headers(answers[0])
        for _ in range(3):
            flood.request_headers.headers.headers.add(key="x-long", raw_value=b"v" * (1 << 20))
        with pytest.raises(grpc.RpcError) as caught:
            service.exchange(flood)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.works()
