"""A stream answered message by message, on its connection's own thread unless messages are large."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from router.h2.calls import Call
from router.h2.messages import MessageError
from router.h2.methods import Exchange, ExchangeMethod
from router.h2.streams import Stream

if TYPE_CHECKING:
    from router.h2.peer import Peer

_log = logging.getLogger(__name__)

# What a stream ends with, for whoever counts.
_OK, _CANCELED, _UNKNOWN = "OK", "Canceled", "Unknown"
# One thing to do for the stream.
_Task = Callable[[], None]


class ExchangeCall(Call):
    """A stream that an exchange answers; one thread at a time is within the exchange."""

    def __init__(self, peer: Peer, stream: Stream, method: ExchangeMethod) -> None:
        super().__init__(peer, stream)
        self._method = method
        self._room_bytes = self._limits.inline_bytes_max
        # What the thread that serves is to do next.
        self._waiting: deque[_Task] = deque()
        self._is_serving = self._is_closed = False
        self._code = _CANCELED
        self._exchange: Exchange = method.open(self)
        self._tell_end = method.opened() if method.opened is not None else None

    @property
    def is_slow(self) -> bool:
        """Whether nothing is answered because the client has not sent its request yet."""
        return not (self._has_headers or self._is_serving or self.is_over)

    def is_active(self) -> bool:
        return not self.is_over

    def cut(self) -> None:
        """Ends a slow stream, as if the client had."""
        self._method.cut()
        self.cancel()

    def interrupt(self, answers: Callable[[], Iterable[Any]]) -> None:
        """Ends the stream from outside, with these answers, behind what is being answered; does not block."""
        self._do(partial(self._say_last, answers), here=False)

    def _message(self, message: bytes, size: int) -> None:
        if self._waiting:
            self._check_waiting(len(self._waiting))
        self._room_bytes -= size
        is_routed = self._exchange.is_routed
        if not is_routed:
            self._peer.flush_before(size)
        self._do(partial(self._answer, message, size), here=is_routed or self._room_bytes >= 0)

    def _all_received(self) -> None:
        self._do(self._finish, here=True)

    def _do(self, task: _Task, *, here: bool) -> None:
        """Does a task: behind those of the thread that serves, or on this one, or on another."""
        with self._lock:
            is_alone, self._is_serving = not self._is_serving, True
            if not is_alone or not here:
                self._waiting.append(task)
        if not is_alone:
            return
        if here:
            self._serve(task)
        else:
            self._peer.host.run(partial(self._serve, None))

    def _serve(self, task: _Task | None) -> None:
        """Does a task and those that wait."""
        while True:
            if task is not None and not self.is_over:
                try:
                    task()
                except Exception as error:
                    self._fail(error)
            with self._lock:
                if not self._waiting:
                    self._is_serving = False
                    break
                task = self._waiting.popleft()
        if self.is_over:
            # Whoever ended the call meanwhile has left that to us.
            self._close_once()

    def _fail(self, error: Exception) -> None:
        self._code = _UNKNOWN
        if isinstance(error, MessageError):
            self._end(error.status, str(error))
            return
        _log.error("a call failed: %s", self._stream.head.path, exc_info=error)
        self._end(grpc.StatusCode.UNKNOWN, f"Exception iterating responses: {error}")

    def _answer(self, data: bytes, size: int) -> None:
        exchange = self._exchange
        try:
            message = self._method.read(data)
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
        written = self._method.written
        answers = b"".join([self._framed(written(answer)) for answer in exchange.answers(message)])
        if exchange.finished:
            self._code = _OK
            self._end(grpc.StatusCode.OK, data=answers)
            return
        if not answers:
            self._peer.consumed(self._stream, size)
            return
        self._say(answers, consumed=size)

    def _say_last(self, answers: Callable[[], Iterable[Any]]) -> None:
        self._code = _OK
        data = b"".join(map(self._framed, map(self._method.written, answers())))
        self._end(grpc.StatusCode.OK, data=data)

    def _finish(self) -> None:
        self._code = _OK
        self._end(grpc.StatusCode.OK)

    def _released(self) -> None:
        self._close_once()

    def _close_once(self) -> None:
        """Closes the exchange when the call is over and nobody is within it."""
        with self._lock:
            if self._is_closed or not self.is_over or self._is_serving:
                return
            self._is_closed = True
        try:
            self._exchange.close()
        except Exception:
            _log.exception("a stream's end failed: %s", self._stream.head.path)
        if self._tell_end is not None:
            self._tell_end(self._code)
        # It leads back to the call, which shall go with its last user and not wait for a collector.
        self._exchange = _GONE
        self._ended()


class _Gone:
    """The exchange of a call that is over."""

    finished = is_routed = True

    def answers(self, _message: object) -> Iterable[Any]:
        return ()

    def close(self) -> None:
        pass


_GONE = _Gone()
