"""Calls of grpcio handlers: one message in, one out; or streams of messages, with a thread of their own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Any

import grpc

from indexer.repeated_log import RepeatedLog
from router.h2.calls import Call
from router.h2.context import CallAborted, CallCancelled, CallContext
from router.h2.messages import MessageError
from router.h2.streams import Stream

if TYPE_CHECKING:
    from router.h2.peer import Peer

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

# Answers beyond it wait for the client to take some.
_PENDING_BYTES_MAX = 1 << 20


class ServicerCall(Call):
    """A call that a servicer answers."""

    def __init__(self, peer: Peer, stream: Stream, handler: Any) -> None:
        super().__init__(peer, stream)
        self._handler = handler
        self._context = CallContext(stream.head, peer.peer, self.cancel)

    def _serve(self, serve: Callable[[], bytes]) -> None:
        """End the call with what a servicer answers last, and as it says, or with its error."""
        context, data = self._context, b""
        try:
            data = serve()
        except CallAborted:
            pass
        except MessageError as error:
            self._end(error.status, str(error))
            return
        except Exception as error:
            # A client that goes away ends the iteration of its own messages with an error.
            if not self.is_over:
                path = self._stream.head.path
                _repeated.event(
                    "call_failed", path, "a call failed: %s", path, level=logging.ERROR, error=error
                )
            doing = "iterating responses" if self._handler.response_streaming else "calling application"
            self._end(grpc.StatusCode.UNKNOWN, f"Exception {doing}: {error}")
            return
        self._end(context.code, context.details_text, context.trailing, data=data, initial=context.initial)


class UnaryCall(ServicerCall):
    """One message in, one out: on the connection's own thread, unless it is large."""

    def __init__(self, peer: Peer, stream: Stream, handler: Any) -> None:
        super().__init__(peer, stream, handler)
        self._is_elsewhere = False
        self._request: bytes | None = None

    def _message(self, message: bytes, size: int) -> None:
        # One that is all and answered at once is given back with its stream.
        if size > self._limits.inline_bytes_max or not self._stream.is_remote_closed:
            self._peer.consumed(self._stream, size)
        if self._request is not None:
            raise _not_one_message(self._stream.head.path)
        self._request = message

    def _all_received(self) -> None:
        if self._request is None:
            raise _not_one_message(self._stream.head.path)
        size = len(self._request)
        if size > self._limits.inline_bytes_max:
            self._is_elsewhere = True
            self._peer.host.run(partial(self._serve_elsewhere, self._request))
        else:
            self._peer.flush_before(size)
            self._serve(partial(self._answer, self._request))

    def _serve_elsewhere(self, message: bytes) -> None:
        try:
            if not self.is_over:
                self._serve(partial(self._answer, message))
        finally:
            self._ended()

    def _answer(self, message: bytes) -> bytes:
        request = _deserialized(message, self._handler.request_deserializer)
        answer = self._handler.unary_unary(request, self._context)
        return self._framed(_serialized(answer, self._handler.response_serializer))

    def _released(self) -> None:
        self._context.over()
        if not self._is_elsewhere:
            self._ended()


class ThreadedCall(ServicerCall):
    """Streams of messages, which a thread of the server's pool reads or writes."""

    def __init__(self, peer: Peer, stream: Stream, handler: Any) -> None:
        super().__init__(peer, stream, handler)
        self._messages: deque[tuple[bytes, int]] = deque()
        self._is_all = False
        self._changed = Condition(self._lock)
        peer.host.run(self._run)

    def drained(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _message(self, message: bytes, size: int) -> None:
        self._check_waiting(len(self._messages))
        with self._changed:
            self._messages.append((message, size))
            self._changed.notify_all()

    def _all_received(self) -> None:
        with self._changed:
            self._is_all = True
            self._changed.notify_all()

    def _released(self) -> None:
        # Called without the lock; whoever waits sees that the call is over.
        self.drained()
        self._context.over()

    def _run(self) -> None:
        try:
            self._serve(self._exchange)
        finally:
            self._ended()

    def _exchange(self) -> bytes:
        """Have the servicer read and write; nothing is left to be sent."""
        handler, context, read = self._handler, self._context, self._read()
        given: Any = read if handler.request_streaming else next(read, None)
        if given is None:
            raise _not_one_message(self._stream.head.path)
        if not handler.response_streaming:
            serve = handler.stream_unary if handler.request_streaming else handler.unary_unary
            self._write(serve(given, context))
            return b""
        serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
        answers = serve(given, context)
        try:
            for answer in answers:
                self._write(answer)
        finally:
            # A servicer's own clean-up is not left to the collector.
            if hasattr(answers, "close"):
                answers.close()
        return b""

    def _read(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._is_all or self.is_over)
                if self.is_over:
                    raise CallCancelled
                if not self._messages:
                    return
                message, size = self._messages.popleft()
            self._peer.consumed(self._stream, size)
            yield _deserialized(message, self._handler.request_deserializer)

    def _write(self, answer: Any) -> None:
        data = self._framed(_serialized(answer, self._handler.response_serializer))
        self._say(data, self._context.initial)
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self._stream.pending_bytes <= _PENDING_BYTES_MAX)
            if self.is_over:
                raise CallCancelled


def _not_one_message(path: str) -> MessageError:
    """What ends a call that must have one message, and has not (gRPC's statuscodes.md)."""
    return MessageError(grpc.StatusCode.UNIMPLEMENTED, f'"{path}" requires exactly one request message.')


def _serialized(message: Any, serializer: Callable[[Any], bytes] | None) -> bytes:
    """A message's bytes; without a serializer it is bytes already.

    Raises:
        MessageError: It cannot be written.
    """
    try:
        return message if serializer is None else serializer(message)
    except Exception as error:
        _log.exception("an answer cannot be serialized")
        raise MessageError(grpc.StatusCode.INTERNAL, "Failed to serialize response!") from error


def _deserialized(data: bytes, deserializer: Callable[[bytes], Any] | None) -> Any:
    """A message of its bytes; without a deserializer it stays bytes.

    Raises:
        MessageError: It is none.
    """
    try:
        return data if deserializer is None else deserializer(data)
    except Exception as error:
        raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
