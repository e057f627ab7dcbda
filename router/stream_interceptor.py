"""What stands around every stream of one gRPC method: a method's name in, calls to `watch` out.

Knows nothing of what is watched, nor of what the method does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import grpc

# serve(messages, context): the answers.
Serve = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]


class StreamInterceptor(grpc.ServerInterceptor):
    """Watches the streams of one method.

    Args:
        method: "/package.Service/Method".
    """

    def __init__(self, method: str) -> None:
        self._method = method

    @abstractmethod
    def watch(self, serve: Serve, messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Serves one stream; runs as long as it is open."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """gRPC's."""
        handler: Any = continuation(details)
        if handler is None or details.method != self._method:
            return handler  # type: ignore[no-any-return]
        serve = handler.stream_stream

        def watched(messages: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            return self.watch(serve, messages, context)

        return grpc.stream_stream_rpc_method_handler(
            watched, handler.request_deserializer, handler.response_serializer
        )
