"""What this router tells others: its ledger's changes in, in order; a gRPC stream for each that follows out.

A change is noted under the ledger's lock, for next to nothing, and written once for all who follow by the
journal's own thread: at once, and what comes shortly after together. While nobody follows, nothing is noted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from indexer.errors import PeerError
from indexer.peers import PeerIdentity
from router.feedback.lifecycle import Heard
from router.feedback.messages import FOLLOW, FollowRequest, News, heard_of, news_messages, read, sent_of
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""So often something is told, so that silence means something."""

READERS_MAX = 64
"""Who may follow at once."""

_, LEDGER_SERVICE, _METHOD = FOLLOW.split("/")
_CODES = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "behind": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "gone": grpc.StatusCode.UNAVAILABLE,
}

# So that others have fewer messages to read where much comes.
_GATHER_S = 0.01


@dataclass(eq=False)
class Journal:
    """Tells followers what the ledger has in flight. Thread-safe."""

    ledger: Ledger
    clock: Callable[[], float] = time.monotonic  # that of the ledger's times
    unread_bytes_max: int = 16 << 20  # messages that one reader may leave unread
    changes_max: int = 1_000_000  # changes that wait to be sent: seconds' worth, unless the thread is stuck

    def __post_init__(self) -> None:
        # Each by what it is: a field of `News`, or "joined".
        self._changes: deque[tuple[str, Any]] = deque()
        self._wake = threading.Event()
        # Guards who follows; taken before the ledger's lock, never within it.
        self._lock = threading.Lock()
        self._joining: Reader | None = None
        self._readers: list[Reader] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-journal", daemon=True)

    @property
    def readers(self) -> int:
        return len(self._readers)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends all following; idempotent."""
        with self._lock:
            self._is_closed = True
        self._end_all("gone", "this router ends")
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def join(self) -> Reader:
        """One more follows: its messages begin with all that is in flight.

        Raises:
            PeerError: "busy": too many do.
        """
        reader = Reader(self.unread_bytes_max)
        with self._lock:
            if len(self._readers) >= READERS_MAX or self._is_closed:
                raise PeerError("busy", f"{len(self._readers)} routers follow already")
            self._readers.append(reader)
            self._joining = reader
            self.ledger.tell(self)
        return reader

    def leave(self, reader: Reader) -> None:
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)
            if not self._readers:
                self.ledger.tell(None)

    def begin(self, in_flight: Sequence[tuple[int, Dispatch, bool]]) -> None:
        """Note what is in flight now, for the reader that joins; under the ledger's lock, as `note`.

        Args:
            in_flight: Number, dispatch, and whether it is believed to have its first token.
        """
        self.note("joined", (self._joining, in_flight))

    def note(self, kind: str, change: object) -> None:
        """Note a change, to be told soon.

        Args:
            kind: A field of `News`.
            change: A number; of "sent" with the dispatch and the keys of the blocks that it will bring, if
                known; of "heard" what was heard.
        """
        if len(self._changes) < self.changes_max:
            self._changes.append((kind, change))
        self._wake.set()

    def heard(self, heard: Heard) -> None:
        """Something was heard of a request that is another router's, if anybody's."""
        if self._readers:
            self.note("heard", heard)

    def tell(self) -> None:
        """Tells what was noted until now; if it cannot be told, all who follow are told all anew."""
        try:
            if len(self._changes) >= self.changes_max:
                raise OverflowError(f"{self.changes_max} changes were not told")
            noted: dict[str, list[Any]] = defaultdict(list)
            while self._changes:
                kind, change = self._changes.popleft()
                if kind == "joined":
                    self._hand_out(noted)
                    noted.clear()
                    self._begin_with(*change)
                else:
                    noted[kind].append(change)
            self._hand_out(noted)
        except Exception as error:
            if not self._is_closed:
                _log.exception("the routers that follow this one are told all anew")
            # What they were told is no whole account any more.
            self._end_all("behind", str(error))

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            self.tell()
            time.sleep(_GATHER_S)

    def _end_all(self, reason: str, why: str) -> None:
        with self._lock:
            readers, self._readers = self._readers, []
            self.ledger.tell(None)
            self._changes.clear()
        for reader in readers:
            reader.end(reason, why)

    def _hand_out(self, noted: dict[str, list[Any]]) -> None:
        now_s = self.clock()
        # A request that began and ended since leaves nothing to be told of.
        gone = {number for number, _, _ in noted["sent"]}.intersection(noted["ended"])
        sent = [
            sent_of(number, dispatch, keys, now_s, prefilled=False)
            for number, dispatch, keys in noted["sent"]
            if number not in gone
        ]
        overdue, prefilled, ended = (
            [number for number in noted[kind] if number not in gone]
            for kind in ("overdue", "prefilled", "ended")
        )
        heard = [heard_of(heard) for heard in noted["heard"]]
        messages = list(news_messages(News(sent, overdue, prefilled, ended, heard)))
        with self._lock:
            readers = [reader for reader in self._readers if reader.has_begun]
        for reader in readers:
            reader.put(messages)

    def _begin_with(self, reader: Reader, in_flight: Sequence[tuple[int, Dispatch, bool]]) -> None:
        now_s = self.clock()
        sent = [
            sent_of(number, dispatch, None, now_s, prefilled=prefilled)
            for number, dispatch, prefilled in in_flight
        ]
        reader.put(list(news_messages(News(sent))))
        reader.has_begun = True


class Reader:
    """Messages for one that follows, as long as it takes them."""

    def __init__(self, unread_bytes_max: int) -> None:
        # Whether it was told what is in flight.
        self.has_begun = False
        self._messages: deque[bytes] = deque()
        self._unread_bytes, self._unread_bytes_max = 0, unread_bytes_max
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
            if self._unread_bytes > self._unread_bytes_max:
                self.end("behind", f"{self._unread_bytes} bytes were not taken")
            self._changed.notify_all()

    def end(self, reason: str, message: str) -> None:
        with self._changed:
            self._messages.clear()
            self._unread_bytes = 0
            self._over = self._over or PeerError(reason, message)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class LedgerDoor:
    """Serves `news.FOLLOW`.

    A call lasts until the other goes. A refusal is FAILED_PRECONDITION ("self: ...", "fingerprint: ...",
    "broken: ..."), or RESOURCE_EXHAUSTED ("busy: ...", "behind: ...") where the other may ask again.
    """

    journal: Journal
    identity: PeerIdentity

    def add_to(self, server: grpc.Server) -> None:
        """Register the service; messages are serialised once for all who follow."""
        follow: Any = grpc.unary_stream_rpc_method_handler(self._follow)
        server.add_registered_method_handlers(LEDGER_SERVICE, {_METHOD: follow})

    def _follow(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            asked = read(FollowRequest, request)
            self.identity.admit_key(asked.instance, asked.fingerprint)
            reader = self.journal.join()
            try:
                # So that it is known at once that there is somebody.
                yield b""
                while context.is_active():
                    yield reader.take(HEARTBEAT_S)
            finally:
                self.journal.leave(reader)
        except PeerError as error:
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))
