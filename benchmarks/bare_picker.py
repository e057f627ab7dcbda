"""Floor of the pick benchmark: the router's servers with services that always return the same pod.

`python -m benchmarks.bare_picker GRPC_PORT POD skip|full`. The router's CPU above this floor is routing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import grpc
from envoy.service.auth.v3 import external_auth_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.ext_authz import ok_response
from router.doors.ext_proc_dialects import response_headers_reply, routing_response, streamed_body_responses
from router.doors.health import CHECK_SERVICE, EXT_PROC_SERVICE
from router.h2 import GrpcServer
from router.h2.exchange_call import ExchangeMethod

_MESSAGE_BYTES_MAX = 8 << 20
_THREADS = 320
_INLINE_BYTES = 64 << 10


class _BareExtProc:
    def __init__(self, pod: str, responses: str) -> None:
        self._answer = routing_response("request_headers", pod, {})
        self._is_full = responses == "full"

    def exchange(self, _stream: object = None) -> _BareExchange:
        return _BareExchange(self._answer, self._is_full)


class _BareExchange:
    def __init__(self, answer: pb.ProcessingResponse, is_full: bool) -> None:
        self._answer = answer
        self._is_full = is_full
        self._body = b""
        self.finished = self.is_routed = False

    def answers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        match message.WhichOneof("request"):
            case "request_body":
                self._body += message.request_body.body
                if message.request_body.end_of_stream:
                    self.is_routed, self.finished = True, not self._is_full
                    yield self._answer
                    yield from streamed_body_responses("request_body", self._body, end_of_stream=True)
            case "response_headers":
                yield response_headers_reply({})
            case "response_body":
                body = message.response_body
                yield from streamed_body_responses(
                    "response_body", body.body, end_of_stream=body.end_of_stream
                )

    def last(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        pass


def main(port: int, pod: str, responses: str) -> None:
    """Serve until the process is killed."""
    answer = ok_response(pod)

    def check(_message: external_auth_pb2.CheckRequest, _context: grpc.ServicerContext) -> bytes:
        return answer

    method = grpc.unary_unary_rpc_method_handler(
        check, request_deserializer=external_auth_pb2.CheckRequest.FromString
    )
    exchanges = ExchangeMethod(
        _BareExtProc(pod, responses).exchange,
        pb.ProcessingRequest.FromString,
        pb.ProcessingResponse.SerializeToString,
    )
    inline = {f"/{EXT_PROC_SERVICE}/Process": _INLINE_BYTES, f"/{CHECK_SERVICE}/Check": _INLINE_BYTES}
    server = GrpcServer(
        "PORT",
        "127.0.0.1",
        port,
        threads=_THREADS,
        requests_max=4 * _THREADS,
        message_bytes_max=_MESSAGE_BYTES_MAX,
        services=(
            lambda server: server.add_registered_method_handlers(CHECK_SERVICE, {"Check": method}),
            lambda server: server.add_exchange(f"/{EXT_PROC_SERVICE}/Process", exchanges),
        ),
        inline=inline,
    )
    server.start()
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
