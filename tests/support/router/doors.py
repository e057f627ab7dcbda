"""The router's gRPC services on a real server, and an Envoy-like client of ext_proc streams."""

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

from router.doors.access_log import AccessLogService
from router.doors.boundary import BodyGuard, TenantSalt
from router.doors.ext_authz import ExtAuthzService
from router.doors.ext_proc import ExtProcOptions, ExtProcService
from router.doors.ext_proc_dialects import NativeDialect
from router.doors.health import CHECK_SERVICE, EXT_PROC_SERVICE, PICK_SERVICE
from router.doors.pick import EndpointPickerService
from router.h2 import GrpcServer
from tests.support.router.bench import Bench

TIMEOUT_S = 300.0


@dataclass
class ServedBench:
    """The running services of a bench.

    Attributes:
        address: "ip:port" of the server.
        failed_connections: Pods that the access log reported as unreachable: address and reason.
    """

    bench: Bench
    channel: grpc.Channel
    address: str
    failed_connections: list[tuple[str, str]] = field(default_factory=list)

    def stream(self) -> Stream:
        """Open an ext_proc stream."""
        return Stream(pb_grpc.ExternalProcessorStub(self.channel))

    def exchange(self, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Send messages, close the stream and return all responses."""
        stub = pb_grpc.ExternalProcessorStub(self.channel)
        return list(stub.Process(iter(messages), timeout=TIMEOUT_S))


# Whether calls run inline on their connection's thread or on other threads (see `each_transport`).
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
    """Run all listeners created in this context in the given mode: "native" (inline) or "threads"."""
    token = _transport.set(name)
    try:
        yield
    finally:
        _transport.reset(token)


def transport() -> str:
    """Return the current mode: "native" or "threads"."""
    return _transport.get()


@contextmanager
def serving(
    bench: Bench,
    options: ExtProcOptions | None = None,
    *,
    threads: int = 80,
    guard: BodyGuard | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
    dialect: NativeDialect | None = None,
    message_bytes_max: int = 8 << 20,
    salt: TenantSalt | None = None,
) -> Iterator[ServedBench]:
    """Serve a bench on a free port, with ext_proc in the native dialect unless another is given."""
    failed_connections: list[tuple[str, str]] = []
    guard = guard or BodyGuard()
    options = options or ExtProcOptions()
    dialect = dialect or NativeDialect(router=bench.router, guard=guard, metrics=bench.metrics)
    ext_proc = ExtProcService(dialect, bench.lifecycle, options)
    check = ExtAuthzService(bench.router, guard, bench.metrics, options.max_request_bytes, salt)
    picks = EndpointPickerService(bench.router, bench.lifecycle, bench.metrics, bench.pods, salt)
    logs = AccessLogService(bench.lifecycle, bench.metrics, lambda *report: failed_connections.append(report))
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
            yield ServedBench(bench, channel, address, failed_connections)
    finally:
        server.close()


class Stream:
    """Client of one ext_proc stream, message by message."""

    def __init__(self, stub: pb_grpc.ExternalProcessorStub) -> None:
        self._outgoing: SimpleQueue[pb.ProcessingRequest | None] = SimpleQueue()
        self._call = stub.Process(iter(self._outgoing.get, None), timeout=TIMEOUT_S)

    @property
    def is_open(self) -> bool:
        """True while neither side has closed the stream."""
        return bool(self._call.is_active())

    def send(self, *messages: pb.ProcessingRequest) -> None:
        """Send messages without waiting for responses."""
        for message in messages:
            self._outgoing.put(message)

    def receive(self) -> pb.ProcessingResponse:
        """Return the next response."""
        answer: pb.ProcessingResponse = next(self._call)
        return answer

    def rest(self) -> list[pb.ProcessingResponse]:
        """Close the client's side and return the remaining responses."""
        self._outgoing.put(None)
        return list(self._call)

    def cancel(self) -> None:
        """Reset the stream."""
        self._call.cancel()
        self._outgoing.put(None)


def wait_until(condition: Any, what: str) -> None:
    """Wait until `condition` returns true, or fail after 300 s."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {TIMEOUT_S:.0f} s: {what}"
        time.sleep(0.01)


def headers(
    *, end: bool = False, config: tuple[int, int] | None = None, **values: str
) -> pb.ProcessingRequest:
    """Build a request_headers message; underscores in names become hyphens, `path` becomes `:path`."""
    message = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=end))
    _fill(message.request_headers, values)
    if config is not None:
        message.protocol_config.request_body_mode = config[0]
        message.protocol_config.response_body_mode = config[1]
    return message


def body(data: bytes, *, end: bool = True, subset: Sequence[str] | None = None) -> pb.ProcessingRequest:
    """Build a request_body message, with the gateway's subset hint if given."""
    message = pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=end))
    if subset is not None:
        hint = {"x-gateway-destination-endpoint-subset": list(subset)}
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
    return message


def response_headers(*, end: bool = False, **values: str) -> pb.ProcessingRequest:
    """Build a response_headers message."""
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(end_of_stream=end))
    _fill(message.response_headers, values)
    return message


def response_body(data: bytes, *, end: bool) -> pb.ProcessingRequest:
    """Build a response_body message."""
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=end))


def set_headers(answer: pb.ProcessingResponse) -> dict[str, str]:
    """Return the headers that a response sets, whichever message it responds to."""
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
    """Return the joined body of streamed responses, and each response's end_of_stream."""
    chunks = [getattr(answer, phase).response.body_mutation.streamed_response for answer in answers]
    return b"".join(chunk.body for chunk in chunks), [chunk.end_of_stream for chunk in chunks]


def _fill(message: pb.HttpHeaders, values: dict[str, str]) -> None:
    for name, value in values.items():
        key = ":path" if name == "path" else ":status" if name == "status" else name.replace("_", "-")
        message.headers.headers.add(key=key, raw_value=value.encode())
