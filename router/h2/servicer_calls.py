"""Calls of grpcio handlers: one message in, one answer or a stream of answers out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from common.repeated_log import RepeatedLog
from router.h2.calls import Call
from router.h2.messages import MessageError
from router.h2.streams import Stream

if TYPE_CHECKING:
    from router.h2.header_blocks import Metadata
    from router.h2.peer import Peer

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

# Answers beyond it wait for the client to take some.
_PENDING_BYTES_MAX = 1 << 20


class CallAborted(Exception):  # noqa: N818 (no error: it is what the servicer asked for)
    """A servicer ended its call by abort()."""


class ServicerCall(Call):
    """A call with one message, served on the connection's own thread unless that message is large.

    Its servicer is given the call itself as its context: the methods of grpc.ServicerContext that our
    servicers use.
    """

    def __init__(self, peer: Peer, stream: Stream, handler: Any) -> None:
        super().__init__(peer, stream)
        self._handler = handler
        self._is_elsewhere = False
        self._request: bytes | None = None
        # Notified of room for more answers, where there are several.
        self._changed = Condition(self._lock) if handler.response_streaming else None
        self._callbacks: list[Callable[[], object]] = []
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: Metadata = ()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        with self._lock:
            if not self.is_over:
                self._callbacks.append(callback)
            return not self.is_over

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._code, self._details = code, details
        raise CallAborted

    def drained(self) -> None:
        if self._changed is not None:
            with self._changed:
                self._changed.notify_all()

    def _message(self, message: bytes, size: int) -> None:
        # One that is all and answered at once is given back with its stream.
        if size > self._inline_bytes_max or not self._stream.is_remote_closed:
            self._peer.consumed(self._stream, size)
        if self._request is not None:
            raise self._not_one_message()
        self._request = message

    def _all_received(self) -> None:
        if self._request is None:
            raise self._not_one_message()
        size = len(self._request)
        if size > self._inline_bytes_max:
            self._is_elsewhere = True
            self._peer.host.run(self._serve_elsewhere)
        else:
            self._peer.flush_before(size)
            self._serve()

    def _not_one_message(self) -> MessageError:
        """Return what ends a call that must have one message, and has not (gRPC's statuscodes.md)."""
        path = self._stream.head.path
        return MessageError(grpc.StatusCode.UNIMPLEMENTED, f'"{path}" requires exactly one request message.')

    def _serve_elsewhere(self) -> None:
        try:
            if not self.is_over:
                self._serve()
        finally:
            self._ended()

    def _serve(self) -> None:
        """End the call with what its servicer answers last, and as it says, or with its error."""
        data = b""
        try:
            data = self._answer()
        except CallAborted:
            pass
        except MessageError as error:
            self._end(error.status, str(error))
            return
        except Exception as error:
            path = self._stream.head.path
            _repeated.event("call_failed", path, "a call failed: %s", path, level=logging.ERROR, error=error)
            doing = "iterating responses" if self._handler.response_streaming else "calling application"
            self._end(grpc.StatusCode.UNKNOWN, f"Exception {doing}: {error}")
            return
        self._end(self._code, self._details, self._trailing, data=data)

    def _answer(self) -> bytes:
        """Return the one answer; a stream's are sent, and nothing is left."""
        handler = self._handler
        try:
            # Without a deserializer a message stays bytes.
            request = (handler.request_deserializer or bytes)(self._request or b"")
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
        if self._changed is None:
            return self._written(handler.unary_unary(request, self))
        answers = handler.unary_stream(request, self)
        try:
            for answer in answers:
                self._say(self._written(answer))
                with self._changed:
                    self._changed.wait_for(self._has_room)
                if self.is_over:
                    break
        finally:
            # A servicer's own clean-up is not left to the collector.
            answers.close()
        return b""

    def _has_room(self) -> bool:
        return self.is_over or self._stream.pending_bytes <= _PENDING_BYTES_MAX

    def _written(self, answer: Any) -> bytes:
        try:
            data = (self._handler.response_serializer or bytes)(answer)
        except Exception as error:
            _log.exception("an answer cannot be serialized")
            raise MessageError(grpc.StatusCode.INTERNAL, "Failed to serialize response!") from error
        return self._framed(data)

    def _released(self) -> None:
        self.drained()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("a call's callback failed: %s", self._stream.head.path)
        if not self._is_elsewhere:
            self._ended()
