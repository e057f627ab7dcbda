"""A stream answered message by message, on its connection's own thread unless messages are large."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from router.h2.calls import Call
from router.h2.messages import MessageError
from router.h2.streams import Stream

if TYPE_CHECKING:
    from router.h2.peer import Peer

_log = logging.getLogger(__name__)

# Tiny messages take many times their bytes while they wait to be served.
_WAITING_MAX = 10_000
# What a stream ends with, for whoever counts.
_OK, _CANCELED, _UNKNOWN = "OK", "Canceled", "Unknown"


class Exchange(Protocol):
    """One stream, served message by message."""

    finished: bool  # whether the stream is to be closed from our side
    is_routed: bool  # whether what follows can be answered without waiting for anything

    def answers(self, message: Any) -> Iterable[Any]:
        """The answers to one message."""

    def last(self) -> Iterable[Any]:
        """The answers to the client's end."""

    def close(self) -> None:
        """The stream has ended, however it did."""


@dataclass(frozen=True, slots=True)
class ExchangeMethod:
    """A method whose streams are exchanges."""

    open: Callable[[ExchangeCall], Exchange]
    read: Callable[[bytes], Any]
    written: Callable[[Any], bytes]
    cut: Callable[[], object] = bool  # told of each stream that is cut off as its request comes too slowly
    # Told of each stream; what it returns is called with the code that the stream ends with.
    opened: Callable[[], Callable[[str], object]] | None = None


class ExchangeCall(Call):
    """A stream that an exchange answers; one thread at a time is within the exchange."""

    def __init__(self, peer: Peer, stream: Stream, method: ExchangeMethod) -> None:
        super().__init__(peer, stream)
        self._method = method
        self._room_bytes = self._inline_bytes_max
        # What the thread that serves is to do next.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_serving = False
        self._code = _CANCELED
        # None once it is closed: it leads back to the call, which shall go with its last user.
        self._exchange: Exchange | None = method.open(self)
        self._tell_end = method.opened() if method.opened is not None else None

    @property
    def is_slow(self) -> bool:
        """Whether nothing is answered because the client has not sent its request yet."""
        exchange = self._exchange
        is_routed = exchange is None or exchange.is_routed
        return not (is_routed or self._has_headers or self._is_serving or self.is_over)

    def cut(self) -> None:
        """Ends a slow stream, as if the client had."""
        self._method.cut()
        self.cancel()

    def interrupt(self, answers: Callable[[], Iterable[Any]]) -> None:
        """Ends the stream from outside, with these answers, behind what is being answered; does not block."""
        self._do(partial(self._say_last, answers), here=False)

    def _message(self, message: bytes, size: int) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if len(self._waiting) >= _WAITING_MAX:
            details = f"more than {_WAITING_MAX} messages wait to be served"
            raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        self._room_bytes -= size
        is_routed = exchange.is_routed
        if not is_routed:
            self._peer.flush_before(size)
        self._do(partial(self._answer, exchange, message, size), here=is_routed or self._room_bytes >= 0)

    def _all_received(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._do(partial(self._say_last, exchange.last), here=True)

    def _do(self, task: Callable[[], None], *, here: bool) -> None:
        """Does a task: behind those of the thread that serves, or on this one, or on another."""
        with self._lock:
            self._waiting.append(task)
            if self._is_serving:
                return
            self._is_serving = True
        if here:
            self._serve()
        else:
            self._peer.host.run(self._serve)

    def _serve(self) -> None:
        """Does the tasks that wait, of which there is one."""
        while True:
            task = self._waiting.popleft()
            if not self.is_over:
                try:
                    task()
                except Exception as error:
                    self._fail(error)
            with self._lock:
                if not self._waiting:
                    self._is_serving = False
                    break
        if self.is_over:
            # Whoever ended the call meanwhile has left that to us.
            self._released()

    def _fail(self, error: Exception) -> None:
        self._code = _UNKNOWN
        if isinstance(error, MessageError):
            self._end(error.status, str(error))
            return
        _log.error("a call failed: %s", self._stream.head.path, exc_info=error)
        self._end(grpc.StatusCode.UNKNOWN, f"Exception iterating responses: {error}")

    def _answer(self, exchange: Exchange, data: bytes, size: int) -> None:
        try:
            message = self._method.read(data)
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
        answers = self._joined(exchange.answers(message))
        if exchange.finished:
            self._code = _OK
            self._end(grpc.StatusCode.OK, data=answers)
        elif answers:
            self._say(answers, consumed=size)
        else:
            self._peer.consumed(self._stream, size)

    def _say_last(self, answers: Callable[[], Iterable[Any]]) -> None:
        data = self._joined(answers())
        self._code = _OK
        self._end(grpc.StatusCode.OK, data=data)

    def _joined(self, answers: Iterable[Any]) -> bytes:
        written = self._method.written
        return b"".join([self._framed(written(answer)) for answer in answers])

    def _released(self) -> None:
        """Close the exchange when the call is over and nobody is within it."""
        with self._lock:
            exchange = self._exchange
            if exchange is None or self._is_serving:
                return
            self._exchange = None
        try:
            exchange.close()
        except Exception:
            _log.exception("a stream's end failed: %s", self._stream.head.path)
        if self._tell_end is not None:
            self._tell_end(self._code)
        self._ended()
