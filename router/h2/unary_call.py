"""A unary call: one message in, one out, by a grpcio handler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import grpc

from indexer.repeated_log import RepeatedLog
from router.h2.calls import Call, CallLimits, Link
from router.h2.context import CallAborted, CallContext
from router.h2.messages import MessageError
from router.h2.methods import deserialized, not_one_message, serialized
from router.h2.streams import Stream

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)


class UnaryCall(Call):
    """See above."""

    def __init__(
        self, link: Link, stream: Stream, limits: CallLimits, ended: Callable[[], object], handler: Any
    ) -> None:
        super().__init__(link, stream, limits, ended)
        self._handler = handler
        self._is_elsewhere = False
        self._request: bytes | None = None
        self._context = CallContext(stream.head, link.peer, self.cancel)

    def _message(self, message: bytes, size: int) -> None:
        # One that is all and answered at once is given back with its stream.
        if size > self._limits.inline_bytes_max or not self._stream.is_remote_closed:
            self._link.consumed(self._stream, size)
        if self._request is not None:
            raise not_one_message(self._stream.head.path)
        self._request = message

    def _all_received(self) -> None:
        if self._request is None:
            raise not_one_message(self._stream.head.path)
        size = len(self._request)
        if size > self._limits.inline_bytes_max:
            self._is_elsewhere = True
            self._link.run(self._serve_elsewhere)
        else:
            self._link.flush_before(size)
            self._serve(self._request)

    def _serve_elsewhere(self) -> None:
        assert self._request is not None
        try:
            self._serve(self._request)
        finally:
            self._ended()

    def _serve(self, message: bytes) -> None:
        if self.is_over:
            return
        handler, context = self._handler, self._context
        try:
            request = deserialized(message, handler.request_deserializer)
            answer = handler.unary_unary(request, context)
            data = self._framed(serialized(answer, handler.response_serializer))
        except CallAborted:
            self._end(context.code, context.details_text, context.trailing, initial=context.initial)
        except MessageError as error:
            self._end(error.status, str(error))
        except Exception as error:
            path = self._stream.head.path
            _repeated.event("call_failed", path, "a call failed: %s", path, level=logging.ERROR, error=error)
            self._end(grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}")
        else:
            self._end(
                context.code, context.details_text, context.trailing, data=data, initial=context.initial
            )

    def _released(self) -> None:
        self._context.over()
        if not self._is_elsewhere:
            self._ended()
