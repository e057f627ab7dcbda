"""The router's doors on a real gRPC server, and an Envoy-like client of their streams."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.doors.access_log import AccessLogDoor
from router.doors.ext_authz import CheckDoor
from router.doors.ext_proc import ExtProcDoor, ExtProcOptions
from router.doors.ext_proc_forms import OwnForm
from router.doors.health import CHECK_SERVICE, EXT_PROC_SERVICE, PICK_SERVICE
from router.doors.pick import PickDoor
from router.h2 import GrpcServer
from router.prompts.body_guard import BodyGuard
from tests.unit.router_support import Bench

TIMEOUT_S = 300.0


@dataclass
class Doors:
    """A served bench.

    Attributes:
        address: "ip:port" of the server.
        distrusted: Pods that the access log complained about.
    """

    bench: Bench
    channel: grpc.Channel
    address: str
    distrusted: list[tuple[str, str]] = field(default_factory=list)

    def stream(self) -> Stream:
        """Opens an ext_proc stream."""
        return Stream(pb_grpc.ExternalProcessorStub(self.channel))

    def exchange(self, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Sends messages, closes, and collects every answer."""
        stub = pb_grpc.ExternalProcessorStub(self.channel)
        return list(stub.Process(iter(messages), timeout=TIMEOUT_S))


# Who serves the doors of a test (see `each_transport`), and what of them on the connection's own thread.
_transport: ContextVar[str] = ContextVar("transport", default="native")
_PATHS = (
    f"/{EXT_PROC_SERVICE}/Process",
    f"/{CHECK_SERVICE}/Check",
    f"/{PICK_SERVICE}/PickEndpoint",
    f"/{PICK_SERVICE}/ReportOutcome",
)
INLINE: dict[str, dict[str, int]] = {
    "native": dict.fromkeys(_PATHS, 1 << 20),
    "threads": {},
}


@contextmanager
def served_by(name: str) -> Iterator[None]:
    """All listeners made meanwhile are of this transport: "native" or "threads"."""
    token = _transport.set(name)
    try:
        yield
    finally:
        _transport.reset(token)


def transport() -> str:
    """Who serves now."""
    return _transport.get()


@contextmanager
def doors(
    bench: Bench,
    options: ExtProcOptions | None = None,
    *,
    threads: int = 80,
    guard: BodyGuard | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
    form: OwnForm | None = None,
    message_bytes_max: int = 8 << 20,
) -> Iterator[Doors]:
    """Serves a bench on a free port; ext_proc answers in the router's own form unless another is made."""
    distrusted: list[tuple[str, str]] = []
    guard = guard or BodyGuard()
    options = options or ExtProcOptions()
    form = form or OwnForm(router=bench.router, guard=guard, metrics=bench.metrics)
    ext_proc = ExtProcDoor(form, bench.lifecycle, options)
    check = CheckDoor(bench.router, guard, bench.metrics, options.max_request_bytes)
    picks = PickDoor(bench.router, bench.lifecycle, bench.metrics, bench.pods)
    logs = AccessLogDoor(bench.lifecycle, bench.metrics, lambda pod, why: distrusted.append((pod, why)))
    server = GrpcServer(
        "--grpc-port",
        "127.0.0.1",
        0,
        threads=threads,
        requests_max=threads,
        message_bytes_max=message_bytes_max,
        services=(
            ext_proc.add_to,
            picks.add_to,
            check.add_to,
            logs.add_to,
        ),
        tls=tls,
        inline=INLINE[transport()],
    )
    server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        with grpc.insecure_channel(address) as channel:
            yield Doors(bench, channel, address, distrusted)
    finally:
        server.close()


class Stream:
    """One ext_proc stream, message by message."""

    def __init__(self, stub: pb_grpc.ExternalProcessorStub) -> None:
        self._outgoing: SimpleQueue[pb.ProcessingRequest | None] = SimpleQueue()
        self._call = stub.Process(iter(self._outgoing.get, None), timeout=TIMEOUT_S)

    @property
    def is_open(self) -> bool:
        """Whether neither side has ended it."""
        return bool(self._call.is_active())

    def send(self, *messages: pb.ProcessingRequest) -> None:
        """Sends without waiting."""
        for message in messages:
            self._outgoing.put(message)

    def receive(self) -> pb.ProcessingResponse:
        """The next answer."""
        answer: pb.ProcessingResponse = next(self._call)
        return answer

    def rest(self) -> list[pb.ProcessingResponse]:
        """Closes our side and collects what still comes."""
        self._outgoing.put(None)
        return list(self._call)

    def cancel(self) -> None:
        """Resets the stream."""
        self._call.cancel()
        self._outgoing.put(None)


def wait_until(condition: Any, what: str) -> None:
    """Waits for a condition that another thread brings about."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {TIMEOUT_S:.0f} s: {what}"
        time.sleep(0.01)


def headers(
    *, end: bool = False, config: tuple[int, int] | None = None, **values: str
) -> pb.ProcessingRequest:
    """A request_headers message; underscores in names are hyphens, `path` is `:path`."""
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=end))
    _fill(message.request_headers, values)
    if config is not None:
        message.protocol_config.request_body_mode = config[0]
        message.protocol_config.response_body_mode = config[1]
    return message


def body(data: bytes, *, end: bool = True, subset: Sequence[str] | None = None) -> pb.ProcessingRequest:
    """A request_body message, with the gateway's subset hint if given."""
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end))
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": list(subset)}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def response_headers(*, end: bool = False, **values: str) -> pb.ProcessingRequest:
    """A response_headers message."""
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(end_of_stream=end))
    _fill(message.response_headers, values)
    return message


def response_body(data: bytes, *, end: bool) -> pb.ProcessingRequest:
    """A response_body message."""
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end))


def set_headers(answer: pb.ProcessingResponse) -> dict[str, str]:
    """The headers that an answer sets, whichever message it answers."""
    match answer.WhichOneof("response"):
        case "request_headers":
            mutation = answer.request_headers.response.header_mutation
        case "request_body":
            mutation = answer.request_body.response.header_mutation
        case "response_headers":
            mutation = answer.response_headers.response.header_mutation
        case _:
            mutation = answer.immediate_response.headers
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def streamed_bytes(
    answers: Sequence[pb.ProcessingResponse], phase: str = "request_body"
) -> tuple[bytes, list[bool]]:
    """The joined streamed body of a phase's answers, and each one's end_of_stream."""
    chunks = [getattr(answer, phase).response.body_mutation.streamed_response for answer in answers]
    return b"".join(chunk.body for chunk in chunks), [chunk.end_of_stream for chunk in chunks]


def _fill(message: pb.HttpHeaders, values: dict[str, str]) -> None:
    for name, value in values.items():
        key = ":path" if name == "path" else ":status" if name == "status" else name.replace("_", "-")
        message.headers.headers.add(key=key, raw_value=value.encode())
