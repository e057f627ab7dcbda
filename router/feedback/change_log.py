"""Ledger changes sent to other routers: messages, their record in order, and a gRPC stream per follower.

Messages are msgpack maps of bounded size. Other versions are compatible: unknown fields are ignored, missing
ones have their defaults. So a field must not change its meaning, and a new field needs a default. A value out
of its bounds makes the message invalid, and the receiver drops all requests of that peer. The ledger's lock
covers only the append of a change. A thread encodes the changes once for all followers, at once when idle and
batched under load. Nothing is recorded while there is no follower.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import grpc
import msgspec
import numpy as np
from msgspec import Meta, Struct

from indexer.errors import PeerError
from indexer.keys import Keys
from indexer.peers import PeerIdentity
from router.feedback.outcomes import RequestReport, Seconds, Text
from router.inflight.dispatch import SEQUENCES_MAX, Dispatch
from router.inflight.ledger import Ledger

# gRPC method, server streaming: `FollowRequest` in, `LedgerChanges` out; empty messages are heartbeats.
FOLLOW = "/kvroute.v2.LedgerPeer/Follow"
# Size limit of a message in bytes; only a message with a single item may be larger.
MESSAGE_BYTES_MAX = 256 << 10
KEYS_MAX = 16_384  # maximum block keys sent per request; the first ones are sent
_KEY = np.dtype("<u8")
_TEXT_MAX = 512
_encode = msgspec.msgpack.Encoder().encode
_Message = TypeVar("_Message")

Number = Annotated[int, Meta(ge=0)]

_log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # seconds without changes after which an empty message is sent
FOLLOWERS_MAX = 64  # maximum number of followers at a time
_, LEDGER_SERVICE, _METHOD = FOLLOW.split("/")
_CODES = {
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "behind": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "gone": grpc.StatusCode.UNAVAILABLE,
}

# Batch changes to reduce messages under load.
_BATCH_S = 0.01


class FollowRequest(Struct, frozen=True):
    """Identity of the calling router."""

    instance: Text  # unique per process
    fingerprint: Number  # derived from hash seed and block length; proves that the caller knows the seed


class Sent(Struct, frozen=True, omit_defaults=True):
    """Request that a router has in flight."""

    number: Number  # unique per process of the sender
    pod: Annotated[str, Meta(min_length=1, max_length=_TEXT_MAX)]  # "ip:port"
    request_id: Text = ""  # the client's
    prefill_pod: Text | None = None  # pod that prefills the request; None: `pod`
    uncached_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0  # prompt tokens to compute
    age_s: Seconds = 0.0  # seconds since the dispatch
    adapter: Text | None = None  # LoRA adapter
    # Keys of the blocks that the request adds to its pod, first block first, 8 bytes each, little endian.
    # Empty if unknown, and after the prefill.
    key_bytes: Annotated[bytes, Meta(max_length=KEYS_MAX * _KEY.itemsize)] = b""
    is_prefilled: bool = False  # whether its first token is reported or presumed
    engine: Text | None = None  # engine of a pod with several; None: the pod chooses
    sequences: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)] = 1  # samples or beams that it decodes

    def __post_init__(self) -> None:
        if len(self.key_bytes) % _KEY.itemsize:
            raise ValueError(f"key_bytes: {len(self.key_bytes)} bytes, expected {_KEY.itemsize} per key")

    @property
    def keys(self) -> Keys:
        # A copy, because kernels are compiled anew for read-only arrays, which takes seconds.
        return np.frombuffer(self.key_bytes, _KEY).astype(np.uint64)


class LedgerChanges(Struct, frozen=True, omit_defaults=True, rename={"reports": "heard"}):
    """Changes since the previous message, to be applied in the order of the fields."""

    sent: Sequence[Sent] = ()
    overdue: Sequence[Number] = ()  # requests whose prefill timed out without a report
    prefilled: Sequence[Number] = ()  # requests whose first token was reported
    ended: Sequence[Number] = ()  # requests that ended in any way
    reports: Sequence[RequestReport] = ()  # reports on requests that are not the sender's


_FOLLOW_REQUEST, _CHANGES = msgspec.msgpack.Decoder(FollowRequest), msgspec.msgpack.Decoder(LedgerChanges)


def sent_entry(number: int, dispatch: Dispatch, keys: Keys | None, now_s: float, *, prefilled: bool) -> Sent:
    """Convert a ledger entry to its message."""
    return Sent(
        number,
        dispatch.pod,
        _bounded(dispatch.request_id),
        dispatch.prefill_pod,
        dispatch.uncached_tokens,
        max(0.0, now_s - dispatch.dispatched_s),
        None if dispatch.adapter is None else _bounded(dispatch.adapter),
        b"" if keys is None else keys[:KEYS_MAX].astype(_KEY, copy=False).tobytes(),
        prefilled,
        dispatch.engine,
        dispatch.sequences,
    )


def report_message(report: RequestReport) -> RequestReport:
    """Return the report with its texts valid and bounded."""
    pod = None if report.pod is None else _bounded(report.pod)
    return msgspec.structs.replace(report, request_id=_bounded(report.request_id), pod=pod)


def encode_changes(changes: LedgerChanges) -> Iterator[bytes]:
    """Yield the changes as messages; applied in order, they equal one message with all changes."""
    fields: dict[str, list[msgspec.Raw]] = {}
    size_bytes = 0
    for name, field in zip(changes.__struct_fields__, changes.__struct_encode_fields__, strict=True):
        for item in getattr(changes, name):
            raw = _encode(item)
            if size_bytes and size_bytes + len(raw) > MESSAGE_BYTES_MAX:
                yield _encode(fields)
                fields, size_bytes = {}, 0
            fields.setdefault(field, []).append(msgspec.Raw(raw))
            size_bytes += len(raw)
    if fields:
        yield _encode(fields)


def decode_changes(message: bytes) -> LedgerChanges:
    """Decode and validate changes, raises a PeerError like `_decoded`; a heartbeat has none."""
    return _decoded(_CHANGES, message) if message else LedgerChanges()


def decode_follow_request(message: bytes) -> FollowRequest:
    """Decode and validate a call; raises a PeerError like `_decoded`."""
    return _decoded(_FOLLOW_REQUEST, message)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], message: bytes) -> _Message:
    """Decode and validate a message.

    Raises:
        PeerError: "broken", with the name of the missing or invalid field.
    """
    try:
        return decoder.decode(message)
    # msgspec skips unknown fields by recursion, so a deeply nested value raises RecursionError.
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError("broken", str(error)) from None


def _bounded(text: str) -> str:
    """Return a client's text as valid UTF-8 within the length limit."""
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode()


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
            self.ledger.subscribe(self.record, follower)
        return follower

    def unsubscribe(self, follower: FollowerQueue) -> None:
        with self._lock:
            if follower in self._followers:
                self._followers.remove(follower)
            if not self._followers:
                self.ledger.subscribe(None)

    def record(self, kind: str, change: object) -> None:
        """Record a change, see `Ledger.subscribe`, or ("reports", report); the thread sends it soon."""
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
        reports = [report_message(report) for report in batch["reports"]]
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
        reports = [report_message(report) for report in self.states()]
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
    """gRPC service of `FOLLOW`; a call lasts until the caller disconnects.

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
            caller = decode_follow_request(request)
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
