"""Connections of one HTTP server that are served in the order in which they ask, by one thread at a time.

Those that ask at once go step by step together. Before a request waits, or when it is large, another thread
takes the others over. What slow, idle and deaf clients may take of its time is bounded. Knows nothing of what
is asked.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from router.http_connection import HttpConnection
from router.http_requests import HttpRequest, HttpRequestError
from router.lead import Lead
from router.steps import AT_ONCE_BYTES, AT_ONCE_MAX, Steps, alone

_log = logging.getLogger(__name__)

_RECEIVE_BYTES = 64 << 10
# How often it is looked whose time is over.
_LOOK_S = 1.0


class Host(Protocol):
    """The server, as far as its desks know it.

    Attributes:
        inline_bytes_max: A request with a longer body holds up nobody, at the price of a hand-over, and so do
            several that one client asks at once; -1: none does.
        is_draining: Whether connections end behind the next answer.
    """

    inline_bytes_max: int
    is_draining: bool

    def serve(self, request: HttpRequest, closes: bool, is_active: Callable[[], bool]) -> Steps[bytes]:
        """Makes the whole answer; with `closes` it says that the connection ends behind it.

        Args:
            is_active: Whether the client still waits, as is seen once another thread takes the others over.
        """

    def refuse(self, error: HttpRequestError) -> bytes:
        """The answer to what is no request."""


class _Begun(NamedTuple):
    """A request that is being answered; with `closes` its connection ends behind the answer."""

    connection: HttpConnection
    steps: Steps[bytes]
    closes: bool


class HttpDesk:
    """Serves from `start` to `close`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._connections: set[HttpConnection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        # The thread that leads selects; others may add and take away what they have in hand.
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lead = Lead("http", self._turn, self._leave)
        # The leading thread's own.
        self._room = memoryview(bytearray(_RECEIVE_BYTES))
        self._look_due_s = 0.0
        self._at_hand: HttpConnection
        # Whoever leads goes on with these: requests that go together, and their bytes.
        self._together: deque[_Begun] = deque()
        self._together_bytes = 0

    def __len__(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Begins to serve.

        Raises:
            RuntimeError: The system has no more threads.
        """
        self._lead.start()

    def add(self, connection: HttpConnection) -> bool:
        """Takes a connection; False: it serves none any more.

        Raises:
            OSError: It cannot be watched.
        """
        with self._lock:
            if self._is_closed:
                return False
            self._watch(connection)
            self._connections.add(connection)
        return True

    def end_asking(self) -> None:
        """Takes nobody any more, and has those who are there end once they are answered."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            connection.end_asking()
        self._waker.close()

    def close(self, timeout_s: float) -> None:
        """Waits for the end, but not for longer; behind `end_asking`. Idempotent."""
        if self._lead.join(timeout_s):
            self._selector.close()
            self._woken.close()

    def _turn(self) -> bool:
        """Serves whoever has asked; whether somebody may still ask."""
        # What another thread that led has left.
        if not self._go_on():
            return True
        for key, _ in self._selector.select(_LOOK_S):
            if key.data is None:
                self._selector.unregister(key.fileobj)
                continue
            if key.data.is_in_hand:
                self._look_after(key.data)
                continue
            self._do(key.data, partial(self._attend, key.data))
            is_enough = len(self._together) >= AT_ONCE_MAX or self._together_bytes >= AT_ONCE_BYTES
            if not self._lead.is_mine or (is_enough and not self._go_on()):
                # Who leads now hears of the others, too.
                return True
        if not self._go_on():
            return True
        if time.monotonic() >= self._look_due_s:
            self._look()
        # In this order: once it is closed, none is added.
        return not self._is_closed or bool(self._connections)

    def _look(self) -> None:
        """Ends the connections that have had their time."""
        now_s = time.monotonic()
        self._look_due_s = now_s + _LOOK_S
        with self._lock:
            late = [one for one in self._connections if not one.is_in_hand and now_s > one.due_s]
        for connection in late:
            self._do(connection, partial(self._give_up, connection))

    def _do(self, connection: HttpConnection, act: Callable[[], object]) -> None:
        """Does something for a connection, and sees to it that it goes on, or ends."""
        self._at_hand = connection
        had_unsent = connection.has_unsent
        try:
            act()
        except OSError:
            connection.is_over = True  # the client is gone
        except Exception:
            _log.exception("a connection failed")
            connection.is_over = True
        if connection.is_over:
            self._end(connection)
        elif connection.is_in_hand:
            connection.was_served(time.monotonic())
            with self._lock:
                self._watch(connection)
        elif connection.has_unsent != had_unsent:
            self._selector.modify(connection.socket, _awaited(connection), connection)

    def _attend(self, connection: HttpConnection) -> None:
        if connection.has_unsent:
            connection.send_unsent()
            return
        try:
            requests = connection.receive(self._room, time.monotonic())
        except HttpRequestError as error:
            connection.refuse(self._host.refuse(error), time.monotonic())
            return
        if len(requests) == 1 and (size := len(requests[0].body)) <= self._host.inline_bytes_max:
            self._together.append(self._begun(connection, requests.popleft()))
            self._together_bytes += size
            return
        while requests:
            begun = self._begun(connection, requests.popleft())
            self._answer_alone(begun)
            if begun.closes:
                return

    def _begun(self, connection: HttpConnection, request: HttpRequest) -> _Begun:
        closes = self._host.is_draining or not request.keeps_alive
        return _Begun(connection, self._host.serve(request, closes, connection.is_active), closes)

    def _answer_alone(self, begun: _Begun) -> None:
        """Answers a request that may hold up others, who are left to another thread."""
        self._lead.hand_over()
        begun.connection.send(alone(begun.steps), is_last=begun.closes)

    def _go_on(self) -> bool:
        """Has requests that go together take a step each in turn, until they are answered.

        Returns:
            Whether this thread still leads; if not, the next one that does goes on with what is left.
        """
        together = self._together
        while together:
            begun = together.popleft()
            connection, steps, closes = begun
            try:
                may_wait = next(steps)
            except StopIteration as end:
                self._do(connection, partial(connection.send, end.value, is_last=closes))
                continue
            except Exception:
                _log.exception("a request failed")
                self._end(connection)
                continue
            if not may_wait:
                together.append(begun)
                continue
            self._do(connection, partial(self._answer_alone, begun))
            if not self._lead.is_mine:
                return False
        self._together_bytes = 0
        return True

    def _give_up(self, connection: HttpConnection) -> None:
        error = connection.too_slow()
        if error is None:
            connection.is_over = True
        else:
            connection.refuse(self._host.refuse(error), time.monotonic())

    def _leave(self) -> None:
        self._at_hand.is_in_hand = True

    def _look_after(self, connection: HttpConnection) -> None:
        """The client of a request that is served elsewhere has gone away, or asks more, which has to wait."""
        with self._lock:
            # Whoever had it in hand may have ended it or given it back just now.
            if connection.is_in_hand and connection.is_watched:
                connection.look()
                self._unwatch(connection)

    def _watch(self, connection: HttpConnection) -> None:
        """Gives it to whoever leads; with the lock held."""
        if connection.is_watched:
            self._selector.modify(connection.socket, _awaited(connection), connection)
        else:
            self._selector.register(connection.socket, _awaited(connection), connection)
            connection.is_watched = True
        # At last: from here on it is the leading thread's.
        connection.is_in_hand = False

    def _unwatch(self, connection: HttpConnection) -> None:
        connection.is_watched = False
        self._selector.unregister(connection.socket)

    def _end(self, connection: HttpConnection) -> None:
        with self._lock:
            if connection.is_watched:
                self._unwatch(connection)
            connection.socket.close()
            self._connections.remove(connection)


def _awaited(connection: HttpConnection) -> int:
    return selectors.EVENT_WRITE if connection.has_unsent else selectors.EVENT_READ
