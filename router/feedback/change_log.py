"""Ledger changes sent to other routers: records them in order, and serves a gRPC stream to each follower.

The ledger's lock covers only the append of a change. A thread encodes the changes once for all followers, at
once when idle and batched under load. Nothing is recorded while there is no follower.
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
from router.feedback import messages
from router.feedback.messages import FOLLOW, LedgerChanges, encode_changes, sent_entry
from router.feedback.outcomes import RequestReport
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Seconds without changes after which an empty message is sent."""

FOLLOWERS_MAX = 64
"""Maximum number of followers at a time."""

_, LEDGER_SERVICE, _METHOD = FOLLOW.split("/")
_CODES = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "behind": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "gone": grpc.StatusCode.UNAVAILABLE,
}

# Batch changes to reduce messages under load.
_BATCH_S = 0.01


@dataclass(eq=False)
class ChangeLog:
    """Log of ledger changes, with a message queue per follower. Thread-safe."""

    ledger: Ledger
    clock: Callable[[], float] = time.monotonic  # clock of the ledger's times
    queue_bytes_max: int = 16 << 20  # queued messages of a follower; beyond it the follower is dropped
    states: Callable[[], Sequence[RequestReport]] = tuple  # reports that a new follower receives
    changes_max: int = 1_000_000  # recorded changes; reached only if the thread is stuck for seconds

    def __post_init__(self) -> None:
        # Pairs of kind and change; the kind is a field of `LedgerChanges`, or "joined".
        self._changes: deque[tuple[str, Any]] = deque()
        self._wake = threading.Event()
        # Guards the followers. Lock order: this lock, then the ledger's.
        self._lock = threading.Lock()
        self._joining: FollowerQueue | None = None
        self._followers: list[FollowerQueue] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="ledger-changes", daemon=True)

    @property
    def follower_count(self) -> int:
        return len(self._followers)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Disconnect all followers and stop the thread; idempotent."""
        with self._lock:
            self._is_closed = True
        self._drop_followers("gone", "this router shuts down")
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def subscribe(self) -> FollowerQueue:
        """Add a follower; its messages start with all requests in flight.

        Raises:
            PeerError: "busy": there are too many followers.
        """
        follower = FollowerQueue(self.queue_bytes_max)
        with self._lock:
            if len(self._followers) >= FOLLOWERS_MAX or self._is_closed:
                raise PeerError("busy", f"too many followers: {len(self._followers)}")
            self._followers.append(follower)
            self._joining = follower
            self.ledger.subscribe(self)
        return follower

    def unsubscribe(self, follower: FollowerQueue) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)
            if not self._followers:
                self.ledger.subscribe(None)

    def record_snapshot(self, in_flight: Sequence[tuple[int, Dispatch, bool]]) -> None:
        """Record the requests in flight for the new follower, see `ChangeListener`."""
        self.record("joined", (self._joining, in_flight))

    def record(self, kind: str, change: object) -> None:
        """Record a change; the thread sends it soon.

        Args:
            kind: A field of `LedgerChanges`.
            change: For "sent": number, dispatch and keys of the blocks it adds, if known. For "reports": a
                `RequestReport`. Otherwise the request's number.
        """
        if len(self._changes) < self.changes_max:
            self._changes.append((kind, change))
        self._wake.set()

    def forward(self, report: RequestReport) -> None:
        """Send followers a report on a request that is not this router's."""
        if self._followers:
            self.record("reports", report)

    def flush(self) -> None:
        """Send the recorded changes; on failure, disconnect all followers, which then start over."""
        try:
            if len(self._changes) >= self.changes_max:
                raise OverflowError(f"{self.changes_max} ledger changes are not sent yet")
            batch: dict[str, list[Any]] = defaultdict(list)
            while self._changes:
                kind, change = self._changes.popleft()
                if kind == "joined":
                    self._publish(batch)
                    batch.clear()
                    self._send_snapshot(*change)
                else:
                    batch[kind].append(change)
            self._publish(batch)
        except Exception as error:
            if not self._is_closed:
                _log.exception("ledger changes not sent, disconnecting all followers")
            # Their state is incomplete now.
            self._drop_followers("behind", str(error))

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(HEARTBEAT_S)
            self._wake.clear()
            self.flush()
            time.sleep(_BATCH_S)

    def _drop_followers(self, reason: str, why: str) -> None:
        with self._lock:
            followers, self._followers = self._followers, []
            self.ledger.subscribe(None)
            self._changes.clear()
        for follower in followers:
            follower.close(reason, why)

    def _publish(self, batch: dict[str, list[Any]]) -> None:
        now_s = self.clock()
        # Omit requests that were both sent and ended within the batch.
        omitted = {number for number, _, _ in batch["sent"]}.intersection(batch["ended"])
        sent = [
            sent_entry(number, dispatch, keys, now_s, prefilled=False)
            for number, dispatch, keys in batch["sent"]
            if number not in omitted
        ]
        overdue, prefilled, ended = (
            [number for number in batch[kind] if number not in omitted]
            for kind in ("overdue", "prefilled", "ended")
        )
        reports = [messages.report_message(report) for report in batch["reports"]]
        encoded = list(encode_changes(LedgerChanges(sent, overdue, prefilled, ended, reports)))
        with self._lock:
            followers = [follower for follower in self._followers if follower.has_snapshot]
        for follower in followers:
            follower.put(encoded)

    def _send_snapshot(self, queue: FollowerQueue, in_flight: Sequence[tuple[int, Dispatch, bool]]) -> None:
        now_s = self.clock()
        sent = [
            sent_entry(number, dispatch, None, now_s, prefilled=prefilled)
            for number, dispatch, prefilled in in_flight
        ]
        reports = [messages.report_message(report) for report in self.states()]
        queue.put(list(encode_changes(LedgerChanges(sent, reports=reports))))
        queue.has_snapshot = True


class FollowerQueue:
    """Bounded queue of messages for one follower. Thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        # Whether the requests in flight at the start are queued; changes follow only then.
        self.has_snapshot = False
        self._messages: deque[bytes] = deque()
        self._bytes, self._bytes_max = 0, bytes_max
        self._closed: PeerError | None = None
        self._changed = threading.Condition()

    def get(self, timeout_s: float) -> bytes:
        """Remove and return the next message; an empty one (a heartbeat) after `timeout_s` seconds.

        Raises:
            PeerError: The queue is closed; carries the reason.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed, timeout_s)
            if self._closed is not None:
                raise self._closed
            if not self._messages:
                return b""
            message = self._messages.popleft()
            self._bytes -= len(message)
            return message

    def put(self, messages: Sequence[bytes]) -> None:
        """Add messages; close the queue if it becomes too large."""
        with self._changed:
            self._messages.extend(messages)
            self._bytes += sum(map(len, messages))
            if self._bytes > self._bytes_max:
                self.close("behind", f"follower too slow: {self._bytes} bytes queued")
            self._changed.notify_all()

    def close(self, reason: str, message: str) -> None:
        with self._changed:
            self._messages.clear()
            self._bytes = 0
            self._closed = self._closed or PeerError(reason, message)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class LedgerService:
    """gRPC service of `messages.FOLLOW`; a call lasts until the caller disconnects.

    Rejections have status FAILED_PRECONDITION ("self: ...", "fingerprint: ...", "broken: ..."), or
    RESOURCE_EXHAUSTED ("busy: ...", "behind: ...") if the caller may retry.
    """

    change_log: ChangeLog
    identity: PeerIdentity

    def add_to(self, server: grpc.Server) -> None:
        """Register the service without serialisers: messages are encoded once for all followers."""
        follow: Any = grpc.unary_stream_rpc_method_handler(self._follow)
        server.add_registered_method_handlers(LEDGER_SERVICE, {_METHOD: follow})

    def _follow(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            caller = messages.decode(messages.FollowRequest, request)
            self.identity.admit_key(caller.instance, caller.fingerprint)
            follower = self.change_log.subscribe()
            try:
                # Confirm the call at once, even if there are no requests.
                yield b""
                while context.is_active():
                    yield follower.get(HEARTBEAT_S)
            finally:
                self.change_log.unsubscribe(follower)
        except PeerError as error:
            context.abort(_CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), str(error))
