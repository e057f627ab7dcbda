"""A call with a thread of its own: for grpcio handlers that read or write streams of messages."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition
from typing import Any

import grpc

from indexer.repeated_log import RepeatedLog
from router.h2.calls import Call, CallLimits, Link
from router.h2.context import CallAborted, CallCancelled, CallContext
from router.h2.messages import MessageError
from router.h2.methods import deserialized, not_one_message, serialized
from router.h2.streams import Stream

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

# Answers beyond it wait for the client to take some.
_PENDING_BYTES_MAX = 1 << 20


class ThreadedCall(Call):
    """See above."""

    def __init__(
        self, link: Link, stream: Stream, limits: CallLimits, ended: Callable[[], object], handler: Any
    ) -> None:
        super().__init__(link, stream, limits, ended)
        self._handler = handler
        self._context = CallContext(stream.head, link.peer, self.cancel)
        self._messages: deque[tuple[bytes, int]] = deque()
        self._is_all = False
        self._changed = Condition(self._lock)
        link.run(self._run)

    def drained(self) -> None:
        """See `Call`."""
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
        with self._changed:
            self._changed.notify_all()
        self._context.over()

    def _run(self) -> None:
        context = self._context
        try:
            self._serve(context)
        except CallAborted:
            self._end(context.code, context.details_text, context.trailing, initial=context.initial)
        except MessageError as error:
            self._end(error.status, str(error))
        except Exception as error:
            # A client that goes away ends the iteration of its own messages with an error.
            if not self.is_over:
                path = self._stream.head.path
                _repeated.event(
                    "call_failed", path, "a call failed: %s", path, level=logging.ERROR, error=error
                )
            doing = "iterating responses" if self._handler.response_streaming else "calling application"
            self._end(grpc.StatusCode.UNKNOWN, f"Exception {doing}: {error}")
        else:
            self._end(context.code, context.details_text, context.trailing, initial=context.initial)
        finally:
            self._ended()

    def _serve(self, context: CallContext) -> None:
        handler = self._handler
        read = self._read()
        given: Any = read if handler.request_streaming else next(read, None)
        if given is None:
            raise not_one_message(self._stream.head.path)
        if not handler.response_streaming:
            serve = handler.stream_unary if handler.request_streaming else handler.unary_unary
            self._write(serve(given, context))
            return
        serve = handler.stream_stream if handler.request_streaming else handler.unary_stream
        answers = serve(given, context)
        try:
            for answer in answers:
                self._write(answer)
        finally:
            # A servicer's own clean-up is not left to the collector.
            if hasattr(answers, "close"):
                answers.close()

    def _read(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._is_all or self.is_over)
                if self.is_over:
                    raise CallCancelled
                if not self._messages:
                    return
                message, size = self._messages.popleft()
            self._link.consumed(self._stream, size)
            yield deserialized(message, self._handler.request_deserializer)

    def _write(self, answer: Any) -> None:
        data = self._framed(serialized(answer, self._handler.response_serializer))
        self._say(data, self._context.initial)
        with self._changed:
            self._changed.wait_for(lambda: self.is_over or self._stream.pending_bytes <= _PENDING_BYTES_MAX)
            if self.is_over:
                raise CallCancelled
