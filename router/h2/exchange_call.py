"""A stream answered message by message, on its connection's own thread as long as that does not wait."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import grpc

from router.h2.calls import Call, CallLimits, Link
from router.h2.messages import MessageError
from router.h2.methods import ExchangeMethod
from router.h2.streams import Stream
from router.stream_watch import CANCELED, OK, UNKNOWN

_log = logging.getLogger(__name__)


class ExchangeCall(Call):
    """See above."""

    def __init__(
        self,
        link: Link,
        stream: Stream,
        limits: CallLimits,
        ended: Callable[[], object],
        method: ExchangeMethod,
    ) -> None:
        super().__init__(link, stream, limits, ended)
        self._method = method
        self._exchange = method.open()
        self._watches = [watcher.opened(self) for watcher in method.watchers]
        for watch in self._watches:
            watch.waits()
        self._room_bytes = limits.inline_bytes_max
        # What another thread is to serve; None: the client has said all.
        self._waiting: deque[tuple[bytes, int] | None] = deque()
        self._is_elsewhere = self._is_serving = self._is_closed = False
        self._code = CANCELED

    def _message(self, message: bytes, size: int) -> None:
        self._room_bytes -= size
        if self._room_bytes >= 0 or self._exchange.is_routed:
            if not self._goes_elsewhere((message, size), only_behind_others=True):
                self._serve(message, size)
        else:
            self._goes_elsewhere((message, size))

    def _all_received(self) -> None:
        if not self._goes_elsewhere(None, only_behind_others=True):
            self._finish()

    def _goes_elsewhere(self, item: tuple[bytes, int] | None, *, only_behind_others: bool = False) -> bool:
        """Hands over to another thread; `only_behind_others`: unless nothing is there already."""
        with self._lock:
            is_new = not self._is_elsewhere
            if is_new and only_behind_others:
                return False
            self._is_elsewhere = True
            self._waiting.append(item)
        if is_new:
            self._link.run(self._serve_waiting)
        return True

    def _serve_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_elsewhere = False
                    break
                item = self._waiting.popleft()
            if item is None:
                self._finish()
            else:
                self._serve(*item)
        self._close_once()

    def _serve(self, data: bytes, size: int) -> None:
        with self._lock:
            if self.is_over:
                return
            self._is_serving = True
        for watch in self._watches:
            watch.serves()
        try:
            self._answer(data)
        except MessageError as error:
            self._code = UNKNOWN
            self._end(error.status, str(error))
        except Exception as error:
            _log.exception("a call failed: %s", self._stream.head.path)
            self._code = UNKNOWN
            self._end(grpc.StatusCode.UNKNOWN, f"Exception iterating responses: {error}")
        self._link.consumed(self._stream, size)
        self._is_serving = False
        for watch in self._watches:
            watch.waits()
        # Whoever ended the call meanwhile has left that to us.
        self._close_once()

    def _answer(self, data: bytes) -> None:
        exchange, method = self._exchange, self._method
        try:
            message = method.read(data)
        except Exception:
            self._code = UNKNOWN
            self._end(grpc.StatusCode.INTERNAL, "Exception deserializing request!")
            return
        answers = b"".join([self._framed(method.written(answer)) for answer in exchange.answers(message)])
        if exchange.finished:
            self._code = OK
            self._end(grpc.StatusCode.OK, data=answers)
        elif answers:
            self._say(answers)
            for watch in self._watches:
                watch.answered()

    def _finish(self) -> None:
        self._code = OK
        self._end(grpc.StatusCode.OK)

    def _released(self) -> None:
        self._close_once()

    def _close_once(self) -> None:
        """Closes the exchange when the call is over and nobody is within it."""
        with self._lock:
            if self._is_closed or not self.is_over or self._is_serving or self._is_elsewhere:
                return
            self._is_closed = True
        try:
            self._exchange.close()
        except Exception:
            _log.exception("a stream's end failed: %s", self._stream.head.path)
        for watch in self._watches:
            watch.closed(self._code)
        self._ended()
