"""Bidirectional streaming calls, answered message by message.

Small messages are handled on the connection's thread, large ones in the server's thread pool.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from router.h2.calls import Call, MessageError
from router.h2.peer import Peer
from router.h2.streams import Stream

_log = logging.getLogger(__name__)

# Limit of queued messages per stream; a small message takes many times its size in memory.
_WAITING_MAX = 10_000
# gRPC status names reported to the callback of `on_open`.
_OK, _CANCELED, _UNKNOWN = "OK", "Canceled", "Unknown"


class Exchange:
    """Handler of one bidirectional stream."""

    finished = False  # whether the server should close the stream
    is_routed = True  # whether further messages can be answered without blocking

    def answers(self, message: Any) -> Iterable[Any]:
        """Return the responses to one request message."""
        raise NotImplementedError

    def last(self) -> Iterable[Any]:
        """Return the responses to the client's half-close."""
        return ()

    def close(self) -> None:
        """Release resources; called once when the stream has ended, for any reason."""


@dataclass(frozen=True, slots=True)
class ExchangeMethod:
    """Method of a gRPC service whose streams are handled by an `Exchange`."""

    open: Callable[[ExchangeCall], Exchange]
    parse: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]
    on_slow_request: Callable[[], object] = bool  # called per stream cancelled because its request was slow
    # Called when a stream opens; its result is called with the stream's final status name.
    on_open: Callable[[], Callable[[str], object]] | None = None


class ExchangeCall(Call):
    """Stream that an `Exchange` answers; only one thread at a time runs the exchange."""

    def __init__(self, peer: Peer, stream: Stream, method: ExchangeMethod) -> None:
        super().__init__(peer, stream)
        peer.server.track_exchange(stream)
        self._method = method
        self._room_bytes = self._inline_bytes_max
        # Tasks for the thread that runs the exchange.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_serving = False
        self._code = _CANCELED
        # None once closed, which breaks the reference cycle with the call.
        self._exchange: Exchange | None = method.open(self)
        self._report_end = method.on_open() if method.on_open is not None else None

    @property
    def is_slow(self) -> bool:
        """Return whether the call is still waiting for the client's request."""
        exchange = self._exchange
        is_routed = exchange is None or exchange.is_routed
        return not (is_routed or self._has_headers or self._is_serving or self.is_ended)

    def cancel_slow(self) -> None:
        """Cancel a stream whose request arrives too slowly."""
        self._method.on_slow_request()
        self.cancel()

    def interrupt(self, answers: Callable[[], Iterable[Any]]) -> None:
        """Send these responses after those in progress and end the stream; thread-safe, never blocks."""
        self._do(partial(self._send_last, answers), here=False)

    def _message(self, message: bytes, size: int) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if len(self._waiting) >= _WAITING_MAX:
            details = f"more than {_WAITING_MAX} messages are queued"
            raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        self._room_bytes -= size
        is_routed = exchange.is_routed
        if not is_routed:
            self._peer.flush_before(size)
        self._do(partial(self._answer, exchange, message, size), here=is_routed or self._room_bytes >= 0)

    def _all_received(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._do(partial(self._send_last, exchange.last), here=True)

    def _do(self, task: Callable[[], None], *, here: bool) -> None:
        """Queue a task and, if no thread serves yet, start on this thread (`here`) or in the pool."""
        with self._lock:
            self._waiting.append(task)
            if self._is_serving:
                return
            self._is_serving = True
        if here:
            self._serve()
        else:
            self._peer.server.run(self._serve)

    def _serve(self) -> None:
        """Run queued tasks until the queue is empty; it holds at least one."""
        while True:
            task = self._waiting.popleft()
            if not self.is_ended:
                try:
                    task()
                except MessageError as error:
                    self._code = _UNKNOWN
                    self._end(error.status, str(error))
                except Exception as error:
                    self._code = _UNKNOWN
                    _log.exception("call failed: method=%s", self._stream.head.path)
                    self._end(grpc.StatusCode.UNKNOWN, f"Exception iterating responses: {error}")
            with self._lock:
                if not self._waiting:
                    self._is_serving = False
                    break
        if self.is_ended:
            # Another thread ended the call meanwhile and left the cleanup to this one.
            self._on_ended()

    def _answer(self, exchange: Exchange, data: bytes, size: int) -> None:
        try:
            message = self._method.parse(data)
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
        answers = self._joined(exchange.answers(message))
        if exchange.finished:
            self._code = _OK
            self._end(grpc.StatusCode.OK, data=answers)
        elif answers:
            self._send(answers, consumed=size)
        else:
            self._peer.consumed(self._stream, size)

    def _send_last(self, answers: Callable[[], Iterable[Any]]) -> None:
        data = self._joined(answers())
        self._code = _OK
        self._end(grpc.StatusCode.OK, data=data)

    def _joined(self, answers: Iterable[Any]) -> bytes:
        written = self._method.serialize
        return b"".join([self._framed(written(answer)) for answer in answers])

    def _on_ended(self) -> None:
        """Close the exchange once the call has ended and no thread runs it."""
        with self._lock:
            exchange = self._exchange
            if exchange is None or self._is_serving:
                return
            self._exchange = None
        try:
            exchange.close()
        except Exception:
            _log.exception("closing stream failed: method=%s", self._stream.head.path)
        if self._report_end is not None:
            self._report_end(self._code)
        self._peer.call_ended(self._stream)
