"""The floor: the same servers as the router's, whose doors always answer the same pod.

`python -m benchmarks.bare_picker GRPC_PORT CHECK_PORT POD`; what the router costs above this is what it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import grpc
from envoy.service.auth.v3 import external_auth_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router import check_answers
from router.check_messages import ok_answer
from router.ext_proc_messages import request_headers_answer, streamed
from router.grpc_listen import listen
from router.health import CHECK_SERVICE
from router.http_listen import HttpServer

_MESSAGE_BYTES_MAX = 8 << 20
_THREADS = 320


class _BareExtProc(pb_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, pod: str) -> None:
        self._answer = request_headers_answer(pod, {}, ())

    def Process(  # noqa: N802 (the name is Envoy's)
        self, request_iterator: Iterator[pb.ProcessingRequest], _context: grpc.ServicerContext
    ) -> Iterator[pb.ProcessingResponse]:
        body = b""
        for message in request_iterator:
            if message.WhichOneof("request") != "request_body":
                continue
            body += message.request_body.body
            if message.request_body.end_of_stream:
                yield self._answer
                for answer in streamed(body, end_of_stream=True):
                    yield pb.ProcessingResponse(request_body=answer)
                return


def main(port: int, check_port: int, pod: str) -> None:
    """Serves until it is killed."""
    answer = ok_answer(pod, None, ())

    def check(_message: external_auth_pb2.CheckRequest, _context: grpc.ServicerContext) -> bytes:
        return answer

    method = grpc.unary_unary_rpc_method_handler(
        check, request_deserializer=external_auth_pb2.CheckRequest.FromString
    )
    handlers: Any = grpc.method_handlers_generic_handler(CHECK_SERVICE, {"Check": method})
    server, _ = listen(
        "PORT",
        "127.0.0.1",
        port,
        threads=_THREADS,
        requests_max=4 * _THREADS,
        message_bytes_max=_MESSAGE_BYTES_MAX,
        services=(
            lambda server: server.add_generic_rpc_handlers((handlers,)),
            lambda server: pb_grpc.add_ExternalProcessorServicer_to_server(_BareExtProc(pod), server),
        ),
    )
    http_answer = check_answers.ok_answer(pod, None, (), False)
    http = HttpServer(
        "CHECK_PORT",
        "127.0.0.1",
        check_port,
        lambda _request, _closes: http_answer,
        lambda _error: b"",
        body_bytes_max=_MESSAGE_BYTES_MAX,
        connections_max=4 * _THREADS,
        refused=lambda: None,
    )
    http.start()
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
