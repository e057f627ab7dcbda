"""Views on a Redis or Valkey server: this router's, for others to follow, and others', for this router.

For each engine one router at a time holds a lease, and writes two keys: a stream of entries (see `journal`),
and the view as it was at one of them. Entries have ids EPOCH-NUMBER; a lease's epoch is the server's time in
milliseconds. One script checks the lease with each write, so that a router that was stopped and goes on later
writes nothing more. Whoever cannot reach an engine follows its stream (see `relay_reader`); whoever has come
late to an engine that it reaches asks for the view as it would ask a peer, and proves it likewise.

Everything here waits for the server on threads of its own. While the server does not answer, nothing is
written, and no request and no event waits for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig
from indexer.errors import PeerError, UnavailableError
from indexer.journal import FIRST, Position
from indexer.keys import utf8
from indexer.peer_wire import SCHEMA, snapshot_messages
from indexer.redis_link import RedisLink, RedisMetrics
from indexer.relay_reader import RelayReader
from indexer.stream import StreamState
from indexer.view_parts import ViewSnapshot

if TYPE_CHECKING:
    from indexer.roster import Roster
    from indexer.subscribe import Subscriber

_log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_BEAT_S = 0.5
_BEATS_PER_LEASE = 4
# Views that are listed at once for the first time.
_LISTED_AT_ONCE = 4
# The view is written anew when so many entries, or so much of its own size, came since.
_ENTRIES_PER_VIEW = 1024
_BYTES_PER_VIEW = 4 << 20
# More entries than these are trimmed; an epoch whose view is not listed in time ends before.
_ENTRIES_MAX = 8 * _ENTRIES_PER_VIEW
# What may wait for the server, of all engines; beyond it all epochs end.
_WAITING_BYTES_MAX = 64 << 20
_NOWHERE = Position(0, b"")

# Lease, stream, view; token, lease_ms (0: give the lease back), ttl_ms, "1" where the epoch begins, most
# entries, number of entries, id and bytes of each, then, if the view is written: its id, its entry's digest,
# its bytes, first id to keep -> 1; 0: the lease is another's, or the server has lost what was written.
_WRITE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[4] ~= '1' and redis.call('EXISTS', KEYS[2], KEYS[3]) < 2 then return 0 end
local behind = 6 + 2 * tonumber(ARGV[6])
for i = 7, behind, 2 do
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[5], ARGV[i], 'entry', ARGV[i + 1])
end
if #ARGV > behind then
  redis.call('HSET', KEYS[3], 'id', ARGV[behind + 1], 'digest', ARGV[behind + 2], 'view', ARGV[behind + 3])
  redis.call('XTRIM', KEYS[2], 'MINID', ARGV[behind + 4])
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return 1
"""


# Number and bytes of an entry; the place in the epoch where the view is being listed; that view; or nothing:
# the epoch has ended.
Left = tuple[int, bytes] | Position | ViewSnapshot | None


@dataclass(slots=True)
class _Lease:
    """An engine whose lease this router holds.

    Attributes:
        entries: Number and bytes of those that are not written yet.
        listed_at: Where in the epoch the view was listed last.
        last_view: Number of the entry of the view that was written last; 0: none was.
        last_number: Number of the last entry.
        bytes_since: Bytes of entries since that view.
    """

    epoch: str
    token: bytes
    written_s: float
    entries: deque[tuple[int, bytes]] = field(default_factory=deque)
    listed_at: Position = _NOWHERE
    view: ViewSnapshot | None = None
    is_listing: bool = True
    last_view: int = 0
    view_bytes: int = 0
    last_number: int = 0
    bytes_since: int = 0


class Relay:
    """All that one router has to do with the server. Thread-safe.

    Args:
        fingerprint: `BlockHasher.fingerprint`: routers with other keys never meet.

    Raises:
        ConfigError: The URL is wrong. That the server cannot be reached is no error: it may come back.
    """

    def __init__(
        self, config: IndexerConfig, fingerprint: int, tiers: Sequence[str], registry: CollectorRegistry
    ) -> None:
        metrics = RedisMetrics(registry)
        url = config.redis_url or ""
        self._link = RedisLink(url, name="write", timeout_s=_TIMEOUT_S, retries=0, metrics=metrics)
        self._write = self._link.client.register_script(_WRITE)
        self._lease_ms = max(1, int(config.redis_lease_s * 1000))
        self._ttl_ms = max(1, int(config.redis_view_ttl_s * 1000))
        form = ".".join((f"{fingerprint:016x}", f"v{SCHEMA}", *tiers))
        self._prefix = f"{config.redis_namespace}:{form}:"
        self._owner = secrets.token_hex(8)
        self.reader = RelayReader(
            RedisLink(url, name="read", timeout_s=_TIMEOUT_S, retries=1, metrics=metrics),
            self.key,
            config,
            len(tiers),
        )
        # What other threads leave for ours, and how large its entries are.
        self._lock = threading.Lock()
        self._left: list[tuple[str, str, Left]] = []
        self._waiting_bytes = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvroute-relay", daemon=True)
        # Below: the thread's own.
        self._leases: dict[str, _Lease] = {}
        self._beaten_s = -_BEAT_S

    def key(self, holder: str, what: str) -> bytes:
        """Return the name of an engine's "lease", "stream" or "view"; all lie in one slot of a cluster."""
        return utf8(f"{{{self._prefix}{holder}}}:{what}")

    def start(self, subscriber: Subscriber, roster: Roster) -> None:
        self._subscriber, self._roster = subscriber, roster
        self.reader.start(subscriber.relayed, roster)
        self._thread.start()

    def close(self) -> None:
        """Give all leases back and close all connections; idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._wake.set()
            if self._thread.ident is not None:
                self._thread.join()
            self.reader.close()
            self._link.close()

    def leave(self, holder: str, epoch: str, item: Left) -> None:
        """Take what the subscriber's thread has of an epoch; nothing: give the lease back."""
        with self._lock:
            entry_bytes = 0
            if isinstance(item, tuple) and not isinstance(item, Position):
                entry_bytes = len(item[1])
            self._waiting_bytes += entry_bytes
            # An entry that is missing ends all epochs.
            if self._waiting_bytes <= _WAITING_BYTES_MAX or not entry_bytes:
                self._left.append((holder, epoch, item))
        self._wake.set()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(_BEAT_S)
            self._wake.clear()
            is_last = self._closing.is_set()
            try:
                self._turn()
            except (UnavailableError, PeerError) as error:
                _log.info("relay ends all epochs: error=%s", error)
                self._end_all()
            except Exception:
                _log.exception("relay failed, its epochs end")
                self._end_all()
        for holder in tuple(self._leases):
            self._end(holder)

    def _turn(self) -> None:
        if not self._link.up:
            self._link.probe()
        if not self._link.up:
            self._end_all()
            return
        self._sort()
        for holder, lease in tuple(self._leases.items()):
            self._serve(holder, lease)
        if (now_s := time.monotonic()) - self._beaten_s >= _BEAT_S:
            self._beaten_s = now_s
            self._claim()

    def _sort(self) -> None:
        with self._lock:
            left, self._left = self._left, []
            waiting_bytes, self._waiting_bytes = self._waiting_bytes, 0
        if waiting_bytes > _WAITING_BYTES_MAX:
            raise UnavailableError("too_slow")
        for holder, epoch, item in left:
            lease = self._leases.get(holder)
            if lease is None or lease.epoch != epoch:
                continue
            if item is None:
                self._end(holder)
            elif isinstance(item, ViewSnapshot):
                lease.view, lease.is_listing = item, False
            elif isinstance(item, Position):
                lease.listed_at = item
            else:
                lease.entries.append(item)
                lease.last_number = item[0]
                lease.bytes_since += len(item[1])

    def _serve(self, holder: str, lease: _Lease) -> None:
        """Write what has come of one engine, or only renew its lease; ask for its view when that is due."""
        begins = not lease.last_view
        due_s = lease.written_s + self._lease_ms / 1000 / _BEATS_PER_LEASE
        # In the beginning entries wait for the view that they change.
        writes = lease.view if begins else lease.entries or lease.view or time.monotonic() >= due_s
        if writes and not self._written(holder, lease, begins=begins):
            _log.warning("relay lost a lease, or the server what was written: engine=%s", holder)
            self._end(holder)
            return
        since = lease.last_number - lease.last_view
        if since > _ENTRIES_MAX // 2:
            self._end(holder)
        elif not lease.is_listing and (
            since >= _ENTRIES_PER_VIEW or lease.bytes_since >= max(_BYTES_PER_VIEW, lease.view_bytes // 2)
        ):
            self._list(holder, lease)

    def _written(self, holder: str, lease: _Lease, *, begins: bool) -> bool:
        arguments: list[bytes | int | str] = [lease.token, self._lease_ms, self._ttl_ms, int(begins)]
        arguments += [_ENTRIES_MAX, len(lease.entries)]
        view, data = lease.view, b""
        for number, data in lease.entries:
            arguments += [f"{lease.epoch}-{number}", data]
        if view is not None:
            data = msgspec.msgpack.encode(list(snapshot_messages(view)))
            # Who reads a little late still finds all entries since the view before.
            kept = max(lease.last_view, FIRST)
            place = f"{lease.epoch}-{lease.listed_at.number}"
            arguments += [place, lease.listed_at.digest, data, f"{lease.epoch}-{kept}"]
        if not self._run_script(holder, arguments):
            return False
        lease.entries.clear()
        lease.written_s = time.monotonic()
        if view is not None:
            lease.view, lease.last_view, lease.view_bytes = None, lease.listed_at.number, len(data)
            lease.bytes_since = 0
        return True

    def _run_script(self, holder: str, arguments: Sequence[bytes | int | str]) -> bool:
        keys = [self.key(holder, what) for what in ("lease", "stream", "view")]
        return bool(self._link.call(self._write, keys=keys, args=arguments))

    def _claim(self) -> None:
        """Ask for the leases of engines whose view is exact here, and that nobody writes."""
        listing = sum(not lease.last_view for lease in self._leases.values())
        wanted = [
            holder
            for holder, engine in self._roster.engines.items()
            if engine.state is StreamState.EXACT and engine.linked and holder not in self._leases
        ]
        if not wanted or listing >= _LISTED_AT_ONCE:
            return
        seconds, microseconds = self._link.call(self._link.client.time)
        epoch = f"{seconds * 1000 + microseconds // 1000}"
        token = utf8(f"{self._owner}:{epoch}")
        for holder in wanted:
            lease = self.key(holder, "lease")
            if self._link.call(self._link.client.set, lease, token, nx=True, px=self._lease_ms):
                self._leases[holder] = _Lease(epoch, token, time.monotonic())
                self._list(holder, self._leases[holder])
                if (listing := listing + 1) >= _LISTED_AT_ONCE:
                    return

    def _list(self, holder: str, lease: _Lease) -> None:
        lease.is_listing = True
        listed = self._subscriber.export(holder, epoch=lease.epoch)
        listed.add_done_callback(partial(self._listed, holder, lease.epoch))

    def _listed(self, holder: str, epoch: str, listed: Future[ViewSnapshot]) -> None:
        """Take a view that was listed; the subscriber's thread calls."""
        try:
            self.leave(holder, epoch, listed.result())
        except PeerError as error:
            _log.debug("view is not relayed: engine=%s error=%s", holder, error)
            self._subscriber.relayed.end_feed(holder, epoch)
            self.leave(holder, epoch, None)

    def _end(self, holder: str) -> None:
        """End an epoch of ours, and give its lease back if the server answers."""
        lease = self._leases.pop(holder)
        self._subscriber.relayed.end_feed(holder, lease.epoch)
        try:
            self._run_script(holder, [lease.token, 0, self._ttl_ms, 1, _ENTRIES_MAX, 0])
        except UnavailableError:
            _log.debug("lease runs out: engine=%s", holder)

    def _end_all(self) -> None:
        for holder, lease in self._leases.items():
            self._subscriber.relayed.end_feed(holder, lease.epoch)
        self._leases.clear()
        with self._lock:
            self._left.clear()
            self._waiting_bytes = 0
