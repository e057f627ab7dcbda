"""Unary and server-streaming calls, served by handlers written for grpcio."""

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

# A servicer's stream pauses while more response bytes wait for the client's flow-control window.
_PENDING_BYTES_MAX = 1 << 20


class CallAborted(Exception):  # noqa: N818 (a requested status, not an error)
    """Raised by `abort()` to end a servicer's call."""


class ServicerCall(Call):
    """Call with one request message, served on the connection's thread unless the message is large.

    The call is also the context that its servicer receives: it implements the methods of
    grpc.ServicerContext that the servicers here use.
    """

    def __init__(self, peer: Peer, stream: Stream, handler: Any) -> None:
        super().__init__(peer, stream)
        self._handler = handler
        self._is_elsewhere = False
        self._request: bytes | None = None
        # Notified when the client reads responses; only for streaming responses.
        self._changed = Condition(self._lock) if handler.response_streaming else None
        self._callbacks: list[Callable[[], object]] = []
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: Metadata = ()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        with self._lock:
            if not self.is_ended:
                self._callbacks.append(callback)
            return not self.is_ended

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
        # A complete message served inline needs no window update: closing the stream returns its bytes.
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
            self._peer.server.run(self._serve_elsewhere)
        else:
            self._peer.flush_before(size)
            self._serve()

    def _not_one_message(self) -> MessageError:
        """Return the error for a unary request without exactly one message (gRPC's statuscodes.md)."""
        path = self._stream.head.path
        return MessageError(grpc.StatusCode.UNIMPLEMENTED, f'"{path}" requires exactly one request message.')

    def _serve_elsewhere(self) -> None:
        try:
            if not self.is_ended:
                self._serve()
        finally:
            self._release_stream()

    def _serve(self) -> None:
        """Run the servicer and end the call with its last response and status, or with its error."""
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
            _repeated.event(
                "call_failed", path, "call failed: method=%s", path, level=logging.ERROR, error=error
            )
            doing = "iterating responses" if self._handler.response_streaming else "calling application"
            self._end(grpc.StatusCode.UNKNOWN, f"Exception {doing}: {error}")
            return
        self._end(self._code, self._details, self._trailing, data=data)

    def _answer(self) -> bytes:
        """Return the response of a unary call; a stream's responses are sent, and b"" is returned."""
        handler = self._handler
        try:
            # A handler without a deserializer receives bytes.
            request = (handler.request_deserializer or bytes)(self._request or b"")
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
        if self._changed is None:
            return self._written(handler.unary_unary(request, self))
        answers = handler.unary_stream(request, self)
        try:
            for answer in answers:
                self._send(self._written(answer))
                with self._changed:
                    self._changed.wait_for(self._has_room)
                if self.is_ended:
                    break
        finally:
            # Run the servicer's cleanup now instead of at garbage collection.
            answers.close()
        return b""

    def _has_room(self) -> bool:
        return self.is_ended or self._stream.pending_bytes <= _PENDING_BYTES_MAX

    def _written(self, answer: Any) -> bytes:
        try:
            data = (self._handler.response_serializer or bytes)(answer)
        except Exception as error:
            _log.exception("serializing response failed: method=%s", self._stream.head.path)
            raise MessageError(grpc.StatusCode.INTERNAL, "Failed to serialize response!") from error
        return self._framed(data)

    def _on_ended(self) -> None:
        self.drained()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("call callback failed: method=%s", self._stream.head.path)
        if not self._is_elsewhere:
            self._release_stream()
