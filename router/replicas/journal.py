"""What this router tells others: its ledger's changes in, in order; messages for each that follows out.

A change is noted under the ledger's lock, for next to nothing, and written once for all who follow when
`tell` is called. While nobody follows, nothing is noted. Has no thread; see `teller`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from indexer.errors import PeerError
from indexer.keys import Keys
from router.dispatch import Dispatch, InFlight
from router.ledger import Ledger
from router.outcomes import Heard
from router.replicas.news import News, Sent, news_messages, sent_of

HEARTBEAT_S = 1.0
"""So often something is told, so that silence means something."""

READERS_MAX = 64
"""Who may follow at once."""

# Of one that takes too little.
_UNREAD_BYTES_MAX = 16 << 20
# Seconds' worth, which are there only if nobody tells them.
_CHANGES_MAX = 1_000_000


# Kinds of changes; an enum's members take ten times as long to look up, and every pick would.
_JOINED, _SENT, _OVERDUE, _PREFILLED, _ENDED, _HEARD = range(6)


class Journal:
    """Tells followers what the ledger has in flight. Thread-safe.

    Args:
        ledger: Whose changes are told.
        clock: Of the ledger's times.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._clock = clock
        self._changes: deque[tuple[int, Any]] = deque()
        self._sleeps = False
        self._wake = threading.Event()
        # Guards who follows; taken before the ledger's lock, never within it.
        self._lock = threading.Lock()
        self._joining: Reader | None = None
        self._readers: list[Reader] = []
        self._is_closed = False

    @property
    def readers(self) -> int:
        """Who follow now."""
        return len(self._readers)

    def join(self) -> Reader:
        """One more follows: its messages begin with all that is in flight.

        Raises:
            PeerError: "busy": too many do.
        """
        reader = Reader()
        with self._lock:
            if len(self._readers) >= READERS_MAX or self._is_closed:
                raise PeerError("busy", f"{len(self._readers)} routers follow already")
            self._readers.append(reader)
            self._joining = reader
            self._ledger.tell(self)
        return reader

    def leave(self, reader: Reader) -> None:
        """One follows no more."""
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)
            if not self._readers:
                self._ledger.tell(None)

    def close(self) -> None:
        """Ends all following; idempotent."""
        with self._lock:
            self._is_closed = True
        self.end_all("gone", "this router ends")
        self._wake.set()

    def end_all(self, reason: str, why: str) -> None:
        """Ends following for all who do now; who asks again is told all anew."""
        with self._lock:
            readers, self._readers = self._readers, []
            self._ledger.tell(None)
            self._changes.clear()
        for reader in readers:
            reader.end(reason, why)

    def wait(self) -> None:
        """Waits until there is something to tell, for a heartbeat at most."""
        self._sleeps = True
        if not self._changes:
            self._wake.wait(HEARTBEAT_S)
        self._sleeps = False
        self._wake.clear()

    def begin(self, in_flight: Sequence[InFlight]) -> None:
        """See `ledger.Changes`."""
        self._note(_JOINED, (self._joining, in_flight))

    def sent(self, number: int, dispatch: Dispatch, keys: Keys | None) -> None:
        """See `ledger.Changes`."""
        self._note(_SENT, (number, dispatch, keys))

    def overdue(self, number: int) -> None:
        """See `ledger.Changes`."""
        self._note(_OVERDUE, number)

    def prefilled(self, number: int) -> None:
        """See `ledger.Changes`."""
        self._note(_PREFILLED, number)

    def ended(self, number: int) -> None:
        """See `ledger.Changes`."""
        self._note(_ENDED, number)

    def heard(self, heard: Heard) -> None:
        """Something was heard of a request that is another router's, if anybody's."""
        if self._readers:
            self._note(_HEARD, heard)

    def tell(self) -> None:
        """Tells what was noted until now.

        Raises:
            OverflowError: It was too much; nobody's account is whole any more.
        """
        if len(self._changes) >= _CHANGES_MAX:
            raise OverflowError(f"{_CHANGES_MAX} changes were not told")
        gathered = _Gathered()
        while self._changes:
            kind, change = self._changes.popleft()
            if kind == _JOINED:
                self._hand_out(gathered.news(self._clock()))
                gathered = _Gathered()
                self._begin_with(*change)
            else:
                gathered.take(kind, change)
        self._hand_out(gathered.news(self._clock()))

    def _note(self, kind: int, change: object) -> None:
        if len(self._changes) < _CHANGES_MAX:
            self._changes.append((kind, change))
        if self._sleeps:
            self._wake.set()

    def _hand_out(self, news: News) -> None:
        messages = list(news_messages(news))
        with self._lock:
            readers = [reader for reader in self._readers if reader.has_begun]
        for reader in readers:
            reader.put(messages)

    def _begin_with(self, reader: Reader, in_flight: Sequence[InFlight]) -> None:
        now_s = self._clock()
        sent = [
            sent_of(one.number, one.dispatch, None, now_s, prefilled=one.has_left_queue) for one in in_flight
        ]
        reader.put(list(news_messages(News(sent))))
        reader.has_begun = True


class Reader:
    """Messages for one that follows, as long as it takes them.

    Attributes:
        has_begun: Whether it was told what is in flight.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._messages: deque[bytes] = deque()
        self._unread_bytes = 0
        self._over: PeerError | None = None
        self._changed = threading.Condition()

    def take(self, wait_s: float) -> bytes:
        """The next message; empty, as an empty message is, if none comes for so long.

        Raises:
            PeerError: There will be no more; carries the reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._over, wait_s)
            if self._over is not None:
                raise self._over
            if not self._messages:
                return b""
            message = self._messages.popleft()
            self._unread_bytes -= len(message)
            return message

    def put(self, messages: Sequence[bytes]) -> None:
        """More for it; too much ends it."""
        with self._changed:
            self._messages.extend(messages)
            self._unread_bytes += sum(map(len, messages))
            if self._unread_bytes > _UNREAD_BYTES_MAX:
                self._finish("behind", f"{self._unread_bytes} bytes were not taken")
            self._changed.notify_all()

    def end(self, reason: str, message: str) -> None:
        """Nothing more comes."""
        with self._changed:
            self._finish(reason, message)
            self._changed.notify_all()

    def _finish(self, reason: str, message: str) -> None:
        self._messages.clear()
        self._unread_bytes = 0
        self._over = self._over or PeerError(reason, message)


@dataclass(slots=True)
class _Gathered:
    """Changes between two messages."""

    sent: list[tuple[int, Dispatch, Keys | None]] = field(default_factory=list)
    numbers: dict[int, list[int]] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)

    def take(self, kind: int, change: Any) -> None:
        if kind == _SENT:
            self.sent.append(change)
        elif kind == _HEARD:
            self.heard.append(change)
        else:
            self.numbers.setdefault(kind, []).append(change)

    def news(self, now_s: float) -> News:
        # Whoever is over already leaves nothing to be told of.
        over = set(self.numbers.get(_ENDED, ()))
        begun = {number for number, _, _ in self.sent}
        sent: list[Sent] = [
            sent_of(number, dispatch, keys, now_s, prefilled=False)
            for number, dispatch, keys in self.sent
            if number not in over
        ]
        overdue, prefilled, ended = (self.numbers.get(kind, ()) for kind in (_OVERDUE, _PREFILLED, _ENDED))
        gone = over & begun
        return News(
            sent,
            [number for number in overdue if number not in gone],
            [number for number in prefilled if number not in gone],
            [number for number in ended if number not in gone],
            self.heard,
        )
