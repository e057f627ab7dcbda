"""Streams of engines that this router cannot reach, read from the relay's Redis server (see `relay`).

The third kind of stream, beside `dialled` and `bound`: change-log entries replace batches, and entry numbers
replace sequence numbers; the same state machine detects gaps and decides whether a view belongs to a stream.
A gap is not replayed: the stream restarts from the snapshot on the server.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from xxhash import xxh3_128_digest

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError, PeerError, UnavailableError
from indexer.peers.messages import read_messages
from indexer.streams.actions import Batch
from indexer.streams.recovery import EngineStream, StreamThread
from indexer.streams.redis_link import RedisLink
from indexer.streams.snapshot import Fetched
from indexer.views.view_parts import Entry, Outcome, ViewSnapshot, decode_entry

if TYPE_CHECKING:
    from indexer.streams.engine_registry import EngineRegistry

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
# An engine that was disconnected for this long is followed through the relay.
UNLINKED_S = 2.0
_ENTRIES_AT_ONCE = 64

_PLACE = re.compile(rb"(\d+)-(\d{1,18})")
_MESSAGES = msgspec.msgpack.Decoder(list[bytes])

# Runs a step of an engine's relayed stream, see `Subscriber.relay`.
_Relay: TypeAlias = "Callable[[str, Callable[[RelayedStream, float], object], RelayReader | None], None]"


class RelayedStream(EngineStream):
    """Stream of one engine that is followed through the relay. Runs on the subscriber's thread only."""

    def __init__(self, stream: PodStream, subscriber: StreamThread, reader: RelayReader) -> None:
        # Snapshots come from the server, not from the engine; entry numbers have a start of their own.
        there = replace(stream, replay_endpoint=None, snapshot_url=None, first_sequence=0)
        super().__init__(there, subscriber)
        self._reader = reader
        self._stored: Fetched | None = None

    def up(self, stored: Fetched, entry: Batch, now_s: float) -> None:
        """Start from a snapshot, given the entry as of which it was written."""
        self._stored = stored
        self.link_up(now_s)
        self.live([entry], now_s)

    def close(self) -> None:
        super().close()
        self._reader.forget(self.name)

    def _outcome(self, payloads: Sequence[bytes]) -> Outcome:
        return self._ingest.apply_entries(self.name, payloads)

    def _request(self, deliver: Callable[[Fetched, float], None]) -> None:
        stored, self._stored = self._stored, None
        # An invalid view is not rebuilt from the same entries.
        if not self._peers:
            stored = Fetched(None)
        if stored is None:
            self._reader.forget(self.name)
        else:
            deliver(stored, self._subscriber.clock())


@dataclass(frozen=True, slots=True)
class _Stored:
    """Snapshot of a view on the server."""

    epoch: str
    number: int  # number of the last entry in the snapshot
    snapshot: ViewSnapshot | None  # as of the engine's own sequence number; None: it cannot be read
    size_bytes: int


class RelayReader:
    """Reader of the views that other routers write. Runs on the relay's thread, except `ask` and `forget`."""

    def __init__(
        self, link: RedisLink, key: Callable[[str, str], bytes], config: IndexerConfig, tiers: int
    ) -> None:
        self.link = link
        self.has_more = False  # whether `turn` must be called again immediately
        self._key = key  # returns the Redis key of an engine's "lease", "stream" or "view"
        self._config = config
        self._tiers = tiers
        self._looked_s = -_LOOK_S
        # By engine: time of its disconnection; epoch and number of the last entry read; epoch of engines that
        # are to be followed next.
        self._unlinked_s: dict[str, float] = {}
        self._at: dict[str, tuple[str, int]] = {}
        self._next: dict[str, str] = {}
        self._forgotten: deque[str] = deque()

    @property
    def follows(self) -> bool:
        return bool(self._at)

    def begin(self, relay: _Relay, engine_registry: EngineRegistry) -> None:
        self._relay, self._engine_registry = relay, engine_registry

    def forget(self, holder: str) -> None:
        """Stop following an engine, until it has been disconnected for `UNLINKED_S` again."""
        self._forgotten.append(holder)

    def ask(self, stream: PodStream) -> tuple[ViewSnapshot | None, int]:
        """Return an engine's view with all later entries, and the size of its snapshot in bytes."""
        holder = stream.holder
        try:
            stored = self._view(holder)
            if stored is None or stored.snapshot is None:
                return None, 0
            entries = self._entries_behind(holder, stored)
        except (UnavailableError, PeerError, PayloadError) as error:
            _log.info("redis view unavailable: engine=%s error=%s", holder, error)
            return None, 0
        last: Entry | ViewSnapshot = entries[-1] if entries else stored.snapshot
        parts = [*stored.snapshot.parts, *entries]
        found = replace(stored.snapshot, sequence=last.sequence, digest=last.digest, parts=parts)
        return found, stored.size_bytes

    def turn(self) -> None:
        """Find engines to follow, start following one, and read new entries of the followed ones.

        Raises:
            UnavailableError: The server does not answer.
        """
        while self._forgotten:
            holder = self._forgotten.popleft()
            self._unlinked_s.pop(holder, None)
            self._next.pop(holder, None)
            self._leave([holder])
        if (now_s := time.monotonic()) - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look(now_s)
        if self._next:
            self._follow(*self._next.popitem())
        self.has_more = bool(self._next)
        if self._at:
            self._read()

    def leave_all(self) -> None:
        self._leave(list(self._at))
        self._next.clear()
        self.has_more = False

    def _look(self, now_s: float) -> None:
        engines = self._engine_registry.engines
        unlinked = [holder for holder, engine in engines.items() if not engine.linked]
        self._unlinked_s = {holder: self._unlinked_s.get(holder, now_s) for holder in unlinked}
        wanted = [holder for holder in unlinked if now_s - self._unlinked_s[holder] >= UNLINKED_S]
        if not wanted:
            # Ping the server, so that the metrics report whether it answers.
            self.link.call(self.link.client.ping)
        leases = [self._key(holder, "lease") for holder in wanted]
        tokens = self.link.call(self.link.client.mget, leases) if wanted else []
        epochs = {
            holder: token.rpartition(b":")[2].decode("ascii", "replace")
            for holder, token in zip(wanted, tokens, strict=True)
            if token is not None
        }
        self._leave([holder for holder, (epoch, _) in self._at.items() if epochs.get(holder) != epoch])
        self._next = {holder: epoch for holder, epoch in epochs.items() if holder not in self._at}

    def _follow(self, holder: str, epoch: str) -> None:
        stored = self._view(holder)
        if stored is None or stored.epoch != epoch:
            return
        place = f"{epoch}-{stored.number}"
        page = self.link.call(self.link.client.xrange, self._key(holder, "stream"), place, place)
        entry = next(_batches(page, epoch), None)
        if entry is None:
            return
        snapshot = stored.snapshot
        if snapshot is not None:
            snapshot = replace(snapshot, sequence=entry.sequence, digest=xxh3_128_digest(entry.payload))
        self._at[holder] = epoch, entry.sequence
        fetched = Fetched(snapshot, stored.size_bytes, source="redis")
        self._relay(holder, lambda stream, now_s: stream.up(fetched, entry, now_s), self)

    def _read(self) -> None:
        streams = {self._key(holder, "stream"): holder for holder in self._at}
        places = {key: "{}-{}".format(*self._at[holder]) for key, holder in streams.items()}
        answer = self.link.call(self.link.client.xread, places, count=_ENTRIES_AT_ONCE)
        for key, page in answer or ():
            holder = streams[key]
            epoch = self._at[holder][0]
            batches = list(_batches(page, epoch))
            if len(batches) < len(page):
                self._leave([holder])
            else:
                self._at[holder] = epoch, batches[-1].sequence
                self._live(holder, batches)
                self.has_more |= len(page) == _ENTRIES_AT_ONCE

    def _live(self, holder: str, entries: Sequence[Batch]) -> None:
        self._relay(holder, lambda stream, now_s: stream.live(entries, now_s), None)

    def _leave(self, holders: Sequence[str]) -> None:
        for holder in holders:
            if self._at.pop(holder, None) is not None:
                self._relay(holder, RelayedStream.link_down, None)

    def _view(self, holder: str) -> _Stored | None:
        name = self._key(holder, "view")
        place, data = self.link.call(self.link.client.hmget, name, ["id", "view"])
        if place is None or data is None or (at := _place(place)) is None:
            return None
        snapshot = None
        try:
            snapshot, _ = read_messages(_MESSAGES.decode(data), self._config, self._tiers)
        except (msgspec.MsgspecError, PeerError) as error:
            _log.info("redis view unreadable: engine=%s error=%s", holder, error)
        return _Stored(*at, snapshot, len(data))

    def _entries_behind(self, holder: str, stored: _Stored) -> list[Entry]:
        """Return the entries behind a snapshot in its epoch, up to the first missing one."""
        found: list[Entry] = []
        name, left_bytes = self._key(holder, "stream"), self._config.recovery_bytes_per_pod
        last = f"{stored.epoch}-18446744073709551615"
        while True:
            number = stored.number + len(found) + 1
            page = self.link.call(
                self.link.client.xrange, name, f"{stored.epoch}-{number}", last, count=_ENTRIES_AT_ONCE
            )
            batches = list(_batches(page, stored.epoch))
            for place, batch in enumerate(batches):
                if batch.sequence != number + place:
                    return found
                left_bytes -= len(batch.payload)
                if left_bytes < 0:
                    raise PeerError("too_large", "the entries of the engine exceed recovery_bytes_per_pod")
                found.append(decode_entry(batch.payload, self._tiers))
            if len(batches) < _ENTRIES_AT_ONCE:
                return found


def _batches(page: Sequence[tuple[bytes, dict[bytes, bytes]]], epoch: str) -> Iterator[Batch]:
    """Yield the well-formed entries of a page that are of this epoch."""
    for place, fields in page:
        at = _place(place)
        if at is not None and at[0] == epoch and (data := fields.get(b"entry")) is not None:
            yield Batch(at[1], data)


def _place(place: bytes) -> tuple[str, int] | None:
    """Return epoch and number of an entry's id; None if the id is malformed."""
    found = _PLACE.fullmatch(place)
    return None if found is None else (found[1].decode(), int(found[2]))
