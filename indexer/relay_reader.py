"""Reads what other routers wrote of engines that this one cannot reach; see `relay`.

One thread looks twice a second which of them somebody writes, and waits for entries of these; others fetch
views and ranges of entries. What is found goes to the subscriber's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError, PeerError, UnavailableError
from indexer.journal import Entry, Position, decode_entry
from indexer.peer_wire import SnapshotReader
from indexer.redis_link import RedisLink
from indexer.replay import Batch
from indexer.view_parts import ViewSnapshot

if TYPE_CHECKING:
    from indexer.relayed import RelayedStreams
    from indexer.roster import Roster

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
_BLOCK_MS = 200
# An engine that was not connected for so long is followed here.
_UNLINKED_S = 2.0
_ENTRIES_AT_ONCE = 64
_WORKERS = 2

_MESSAGES = msgspec.msgpack.Decoder(list[bytes])


@dataclass(frozen=True, slots=True)
class StoredView:
    """A view as it lies on the server.

    Attributes:
        position: Number and digest of the last entry that is in it.
        snapshot: The view, at the engine's own sequence number.
        size_bytes: Of its messages.
    """

    epoch: str
    position: Position
    snapshot: ViewSnapshot
    size_bytes: int


class RelayReader:
    """Follows engines that others write, and fetches views. Thread-safe.

    Args:
        key: Names an engine's "lease", "stream" or "view".
    """

    def __init__(
        self, link: RedisLink, key: Callable[[str, str], bytes], config: IndexerConfig, tiers: int
    ) -> None:
        self._link = link
        self._key = key
        self._config = config
        self._tiers = tiers
        self._closing = threading.Event()
        self._workers = ThreadPoolExecutor(_WORKERS, "kvroute-relay-views")
        self._thread = threading.Thread(target=self._run, name="kvroute-relay-reader", daemon=True)
        # By engine: since when it is not connected; epoch and number of the last entry that was read.
        self._unlinked_s: dict[str, float] = {}
        self._at: dict[str, tuple[str, int]] = {}
        # Engines that were connected meanwhile.
        self._forgotten: deque[str] = deque()

    def start(self, relayed: RelayedStreams, roster: Roster) -> None:
        self._relayed, self._roster = relayed, roster
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._workers.shutdown(cancel_futures=True)
        self._link.close()

    def forget(self, holder: str) -> None:
        """Follow an engine no more, until it was not connected for a while again."""
        self._forgotten.append(holder)

    def fetch(self, holder: str, deliver: Callable[[StoredView | None], None]) -> None:
        """Fetch an engine's view; it is delivered on a thread of ours, None where there is none of use."""
        self._workers.submit(self._deliver, partial(self._view, holder), deliver)

    def replay(
        self, holder: str, epoch: str, start: int, deliver: Callable[[Sequence[Batch] | None], None]
    ) -> None:
        """Fetch an epoch's entries from one number on; None where there are none of use."""
        self._workers.submit(self._deliver, lambda: list(self._range(holder, epoch, start)) or None, deliver)

    def ask(self, stream: PodStream) -> tuple[ViewSnapshot | None, int]:
        """Fetch an engine's view and what came since, as of the last batch in it; tell its size in bytes."""
        try:
            view = self._view(stream.holder)
            entries = [] if view is None else self._entries_behind(stream.holder, view)
        except (UnavailableError, PeerError, PayloadError) as error:
            _log.info("no view from redis: engine=%s error=%s", stream.holder, error)
            return None, 0
        if view is None:
            return None, 0
        last: Entry | ViewSnapshot = entries[-1] if entries else view.snapshot
        parts = [*view.snapshot.parts, *entries]
        found = replace(view.snapshot, sequence=last.sequence, digest=last.digest, parts=parts)
        return found, view.size_bytes

    def _entries_behind(self, holder: str, view: StoredView) -> list[Entry]:
        """The entries of the view's epoch behind it, as far as none is missing."""
        found = []
        for place, entry in enumerate(self._range(holder, view.epoch, view.position.number + 1), 1):
            if entry.sequence != view.position.number + place:
                break
            found.append(decode_entry(entry.payload, self._tiers))
        return found

    def _deliver(self, work: Callable[[], Any], deliver: Callable[[Any], None]) -> None:
        try:
            answer = work()
        except (UnavailableError, PeerError) as error:
            _log.info("redis gives no view or entries: %s", error)
            answer = None
        except Exception:
            _log.exception("reading from redis failed")
            answer = None
        deliver(answer)

    def _view(self, holder: str) -> StoredView | None:
        place, digest, data = self._link.call(
            self._link.client.hmget, self._key(holder, "view"), ["id", "digest", "view"]
        )
        if place is None or digest is None or data is None or (at := _place(place)) is None:
            return None
        reader = SnapshotReader(
            tiers=self._tiers,
            block_tokens=self._config.block_tokens,
            max_bytes=self._config.snapshot_max_bytes,
        )
        try:
            snapshot = reader.read(_MESSAGES.decode(data))
        except msgspec.MsgspecError as error:
            raise PeerError("broken", str(error)) from None
        return StoredView(at[0], Position(at[1], digest), snapshot, len(data))

    def _range(self, holder: str, epoch: str, start: int) -> Iterator[Batch]:
        """An epoch's entries from one number on, numbers as in the stream.

        Raises:
            PeerError: There are more than a view's stream may have wait.
        """
        key, left_bytes = self._key(holder, "stream"), self._config.recovery_bytes_per_pod
        following, last = f"{epoch}-{start}", f"{epoch}-18446744073709551615"
        while True:
            page = self._link.call(self._link.client.xrange, key, following, last, count=_ENTRIES_AT_ONCE)
            for batch in _batches(page, epoch):
                left_bytes -= len(batch.payload)
                if left_bytes < 0:
                    raise PeerError("too_large", "entries of an engine")
                following = f"{epoch}-{batch.sequence + 1}"
                yield batch
            if len(page) < _ENTRIES_AT_ONCE:
                return

    def _run(self) -> None:
        looked_s = -_LOOK_S
        while not self._closing.is_set():
            try:
                if (now_s := time.monotonic()) - looked_s >= _LOOK_S:
                    looked_s = now_s
                    self._look(now_s)
                if self._at and self._link.up:
                    self._read()
                else:
                    self._closing.wait(_LOOK_S)
            except UnavailableError:
                self._leave(tuple(self._at))
            except Exception:
                _log.exception("following engines through redis failed")
                self._leave(tuple(self._at))
                self._closing.wait(_LOOK_S)

    def _look(self, now_s: float) -> None:
        """Find out which engines must be followed here, and which of them somebody writes."""
        while self._forgotten:
            holder = self._forgotten.popleft()
            self._unlinked_s.pop(holder, None)
            self._at.pop(holder, None)
        engines = self._roster.engines
        unlinked = [holder for holder, engine in engines.items() if not engine.linked]
        self._unlinked_s = {holder: self._unlinked_s.get(holder, now_s) for holder in unlinked}
        wanted = [holder for holder in unlinked if now_s - self._unlinked_s[holder] >= _UNLINKED_S]
        self._leave([holder for holder in self._at if holder not in wanted])
        if not self._link.up:
            self._link.probe()
        for holder in wanted if self._link.up else ():
            epoch, last = self._written(holder)
            followed = self._at.get(holder)
            if followed is not None and followed[0] != epoch:
                self._leave([holder])
            elif followed is None and epoch is not None and last is not None:
                self._at[holder] = epoch, last
                self._relayed.up(holder, epoch, self)

    def _written(self, holder: str) -> tuple[str | None, int | None]:
        """The epoch in which somebody writes an engine now, and the number of the last entry in it."""
        pipeline: Any = self._link.client.pipeline(transaction=False)
        pipeline.get(self._key(holder, "lease")).xrevrange(self._key(holder, "stream"), count=1)
        token, last = self._link.call(pipeline.execute)
        epoch = None if token is None else token.rpartition(b":")[2].decode("ascii", "replace")
        at = _place(last[0][0]) if last else None
        return epoch, at[1] if at is not None and at[0] == epoch else None

    def _read(self) -> None:
        """Wait for entries of the engines that are followed, a moment long."""
        streams = {self._key(holder, "stream"): holder for holder in self._at}
        places = {key: "{}-{}".format(*self._at[holder]) for key, holder in streams.items()}
        answer = self._link.call(self._link.client.xread, places, count=_ENTRIES_AT_ONCE, block=_BLOCK_MS)
        for key, page in answer or ():
            holder = streams[key]
            epoch = self._at[holder][0]
            batches = list(_batches(page, epoch))
            if len(batches) < len(page):
                self._leave([holder])
            else:
                self._at[holder] = epoch, batches[-1].sequence
                self._relayed.live(holder, batches)

    def _leave(self, holders: Sequence[str]) -> None:
        """Follow these no more, for now."""
        for holder in holders:
            del self._at[holder]
            self._relayed.down(holder)


def _batches(page: Sequence[tuple[bytes, dict[bytes, bytes]]], epoch: str) -> Iterator[Batch]:
    """The entries of a page that are of this epoch and have what an entry has."""
    for place, fields in page:
        at = _place(place)
        if at is not None and at[0] == epoch and (data := fields.get(b"entry")) is not None:
            yield Batch(at[1], data)


def _place(place: bytes) -> tuple[str, int] | None:
    """Epoch and number of an id."""
    epoch, dash, number = place.partition(b"-")
    if not dash or not epoch.isdigit() or not number.isdigit() or len(number) > 18:
        return None
    return epoch.decode(), int(number)
