"""Replication of views through a Redis or Valkey server: writes this router's views, reads those of others.

For each engine one router at a time holds a lease and writes two keys: a stream of entries (`Entry` in
`view_parts`) and a snapshot of the view as of one of them. Entries have ids EPOCH-NUMBER; the epoch of a
lease is the server's time in milliseconds. One script checks the lease with each write, so that a router
that was paused beyond its lease cannot write. A router that cannot reach an engine follows the engine's
entries (`relayed`). A router that starts late fetches the view as it would from a peer, and verifies it in
the same way.

One thread waits for the server. While the server is unavailable nothing is written, and neither requests nor
events wait for it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig
from indexer.errors import PeerError, UnavailableError
from indexer.index.contract import StreamState
from indexer.keys import utf8
from indexer.peers.messages import SCHEMA, snapshot_messages
from indexer.streams.redis_link import BEAT_S, RedisLink, RedisMetrics
from indexer.streams.relayed import RelayReader
from indexer.streams.subscriber import Subscriber
from indexer.streams.view_export import FIRST, Feed
from indexer.views.view_parts import ViewSnapshot

if TYPE_CHECKING:
    from indexer.streams.engine_registry import EngineRegistry

_log = logging.getLogger(__name__)

# Interval at which entries of followed engines are read.
_READ_S = 0.05
_BEATS_PER_LEASE = 4
# First exports that run at once.
_LISTED_AT_ONCE = 4
# The snapshot is rewritten after this many entries, or this many bytes or half of its own size.
_ENTRIES_PER_VIEW = 1024
_BYTES_PER_VIEW = 4 << 20
# Length at which the stream of entries is trimmed; an epoch whose export is too slow ends before.
_ENTRIES_MAX = 8 * _ENTRIES_PER_VIEW

# Keys: lease, stream, view. Arguments: token, lease_ms (0: release the lease), ttl_ms, "1" at the start of an
# epoch, maximum length, number of entries, id and bytes of each; with a snapshot also its id, its bytes and
# the first id to keep. Returns 1, or 0 if another router has the lease or the server has lost the data.
_WRITE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
if ARGV[4] ~= '1' and redis.call('EXISTS', KEYS[2], KEYS[3]) < 2 then return 0 end
local behind = 6 + 2 * tonumber(ARGV[6])
for i = 7, behind, 2 do
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[5], ARGV[i], 'entry', ARGV[i + 1])
end
if #ARGV > behind then
  redis.call('HSET', KEYS[3], 'id', ARGV[behind + 1], 'view', ARGV[behind + 2])
  redis.call('XTRIM', KEYS[2], 'MINID', ARGV[behind + 3])
end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return 1
"""


class Relay:
    """Writer of this router's views to the Redis server, and owner of the reader. Thread-safe.

    Raises:
        ConfigError: The URL is wrong. An unreachable server is no error, because it may become reachable.
    """

    def __init__(
        self, config: IndexerConfig, fingerprint: int, tiers: Sequence[str], registry: CollectorRegistry
    ) -> None:
        metrics, url = RedisMetrics(registry), config.redis_url or ""
        self._link = RedisLink(url, "write", metrics)
        self._write = self._link.client.register_script(_WRITE)
        self._lease_ms = max(1, int(config.redis_lease_s * 1000))
        self._ttl_ms = max(1, int(config.redis_view_ttl_s * 1000))
        form = ".".join((f"{fingerprint:016x}", f"v{SCHEMA}", *tiers))
        # Routers with other block keys use other names.
        self._prefix = f"{config.redis_namespace}:{form}:"
        self._owner = secrets.token_hex(8)
        self.reader = RelayReader(RedisLink(url, "read", metrics), self.key, config, len(tiers))
        self.lock = threading.Lock()  # guards unwritten entries, which the subscriber's thread appends
        self.waiting_bytes = 0  # unwritten entries of all engines
        self.wake = threading.Event()  # set when there is something to write
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvroute-relay", daemon=True)
        # Used by the relay's thread only. Engines whose lease this router holds.
        self._feeds: dict[str, Feed] = {}
        self._beaten_s = -BEAT_S

    def key(self, holder: str, what: str) -> bytes:
        """Return the Redis key of an engine's "lease", "stream" or "view"; all have one cluster hash slot."""
        return utf8(f"{{{self._prefix}{holder}}}:{what}")

    def start(self, subscriber: Subscriber, engine_registry: EngineRegistry) -> None:
        self._subscriber, self._engine_registry = subscriber, engine_registry
        self.reader.begin(subscriber.relay, engine_registry)
        self._thread.start()

    def close(self) -> None:
        """Release all leases and close all connections; idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self.wake.set()
            if self._thread.ident is not None:
                self._thread.join()
            for link in (self._link, self.reader.link):
                link.client.close()
                link.client.connection_pool.disconnect()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self.reader.has_more:
                self.wake.wait(_READ_S if self.reader.follows else BEAT_S)
            self.wake.clear()
            self._guarded(self._turn, self._end_all)
            self._guarded(self.reader.turn, self.reader.leave_all)
        self._end_all()

    def _guarded(self, turn: Callable[[], None], give_up: Callable[[], None]) -> None:
        try:
            turn()
        except UnavailableError as error:
            _log.debug("relay: %s", error)
            give_up()
        except Exception:
            _log.exception("relay failed, restarting it")
            give_up()

    def _turn(self) -> None:
        for feed in tuple(self._feeds.values()):
            try:
                self._serve(feed)
            except PeerError as error:
                _log.info("relay ended: engine=%s error=%s", feed.holder, error)
                self._end(feed)
        if (now_s := time.monotonic()) - self._beaten_s >= BEAT_S:
            self._beaten_s = now_s
            self._claim()

    def _serve(self, feed: Feed) -> None:
        """Write new entries or renew the lease, export the view anew when due; PeerError ends the epoch."""
        if feed.has_ended:
            raise PeerError("ended", "the view is not EXACT, or too many entries wait to be written")
        view = feed.listing.result() if feed.listing is not None and feed.listing.done() else None
        is_due = time.monotonic() >= feed.written_s + self._lease_ms / 1000 / _BEATS_PER_LEASE
        # At the start of an epoch entries wait for the snapshot that they extend.
        if view is not None or (feed.last_view and (feed.entries or is_due)):
            self._write_feed(feed, view)
        since = feed.last_number - feed.last_view
        if since > _ENTRIES_MAX // 2:
            raise PeerError("too_slow", f"{since} entries were recorded during the export")
        is_large = feed.bytes_since >= max(_BYTES_PER_VIEW, feed.view_bytes // 2)
        if feed.listing is None and (since >= _ENTRIES_PER_VIEW or is_large):
            self._list(feed)

    def _write_feed(self, feed: Feed, view: ViewSnapshot | None) -> None:
        with self.lock:
            entries, feed.entries = feed.entries, []
            first = feed.last_number - len(entries) + 1
            waited_bytes = sum(map(len, entries))
            self.waiting_bytes -= waited_bytes
        arguments: list[bytes | int | str] = [feed.token, self._lease_ms, self._ttl_ms]
        arguments += [int(not feed.last_view), _ENTRIES_MAX, len(entries)]
        for number, data in enumerate(entries, first):
            arguments += [f"{feed.epoch}-{number}", data]
        data = b""
        if view is not None:
            data = msgspec.msgpack.encode(list(snapshot_messages(view)))
            # A slow reader still finds all entries since the previous snapshot.
            kept = max(feed.last_view, FIRST)
            arguments += [f"{feed.epoch}-{feed.listed_at}", data, f"{feed.epoch}-{kept}"]
        if not self._run_script(feed, arguments):
            raise PeerError("lost", "another router has the lease, or the server has lost the data")
        feed.written_s = time.monotonic()
        feed.bytes_since += waited_bytes
        if view is not None:
            feed.listing, feed.last_view = None, feed.listed_at
            feed.view_bytes, feed.bytes_since = len(data), 0

    def _run_script(self, feed: Feed, arguments: Sequence[bytes | int | str]) -> bool:
        keys = [self.key(feed.holder, what) for what in ("lease", "stream", "view")]
        return bool(self._link.call(self._write, keys=keys, args=arguments))

    def _claim(self) -> None:
        # Called even without engines to claim, so that the metrics report whether the server answers.
        seconds, microseconds = self._link.call(self._link.client.time)
        epoch = f"{seconds * 1000 + microseconds // 1000}"
        token = utf8(f"{self._owner}:{epoch}")
        listing = sum(not feed.last_view for feed in self._feeds.values())
        for holder, engine in self._engine_registry.engines.items():
            if listing >= _LISTED_AT_ONCE:
                return
            if engine.state is not StreamState.EXACT or not engine.linked or holder in self._feeds:
                continue
            lease = self.key(holder, "lease")
            if self._link.call(self._link.client.set, lease, token, nx=True, px=self._lease_ms):
                feed = self._feeds[holder] = Feed(holder, epoch, token, self, written_s=time.monotonic())
                self._list(feed)
                listing += 1

    def _list(self, feed: Feed) -> None:
        feed.listing = self._subscriber.export(feed.holder, feed=feed)
        feed.listing.add_done_callback(lambda _: self.wake.set())

    def _end(self, feed: Feed) -> None:
        del self._feeds[feed.holder]
        with self.lock:
            feed.has_ended = True
            self.waiting_bytes -= sum(map(len, feed.entries))
            feed.entries.clear()
        try:
            self._run_script(feed, [feed.token, 0, self._ttl_ms, 1, _ENTRIES_MAX, 0])
        except UnavailableError:
            _log.debug("lease not released, it will expire: engine=%s", feed.holder)

    def _end_all(self) -> None:
        for feed in tuple(self._feeds.values()):
            self._end(feed)
