"""An index that several routers share, in Redis or Valkey.

See `index` for what comes in and goes out, `redis_scripts` for what lies where, `redis_writer` for who writes
it. Speculative blocks stay in the process. While the server does not answer in time nothing is cached, and
the metrics say why; no request fails for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from redis import Redis

from indexer import redis_scripts
from indexer.assumed import AssumedBlocks
from indexer.errors import UnavailableError
from indexer.index import Holding, IndexStats, MatchTable
from indexer.keys import Keys, utf8
from indexer.redis_blocks import BEST_TIER, PackedBlocks, read_lives, read_references, read_tiers
from indexer.redis_link import RedisLink, RedisMetrics
from indexer.redis_writer import RedisWriter
from indexer.tiers import SPECULATIVE_TIER, Tiers

_log = logging.getLogger(__name__)

# Of one answer; a longer prompt is asked for in parts, as long as anybody holds it.
_READ_BLOCKS = 1024
_READ_RETRIES = 1
_KEY_BYTES = 8
# Uses that wait to be told; the oldest are forgotten.
_TOUCHED_MAX = 65_536
_BEAT_S = 0.5
_BEATS_PER_LEASE = 4
# A write may wait longer than a request can: it is on no request's way, and its failure costs the view.
_WRITE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Settings of a `RedisIndex`.

    Attributes:
        url: See `RedisLink`.
        namespace: Begins all names; keys of other namespaces are never looked at.
        fingerprint: `BlockHasher.fingerprint`: indexes of other keys never meet.
        capacity_blocks: Most blocks of all routers together; each keeps to its own figure.
        deadline_s: Longest wait for the server in `match`, `held` and `stats`.
        lease_s: So long a pod's view counts without a sign of life of the router that writes it.
        ttl_s: Life of a block that is neither stored nor matched again.
        max_assumed: Most speculative entries.
    """

    url: str = field(repr=False)
    fingerprint: int
    capacity_blocks: int
    max_assumed: int
    namespace: str = "kvroute"
    deadline_s: float = 0.05
    lease_s: float = 10.0
    ttl_s: float = 86_400.0


class RedisIndex:
    """An `Index` on a server. Close it after use.

    Matches are told twice a second, so a use may count as up to half a second later than it was, and than
    blocks stored meanwhile.

    Sizes are told as far as they are known: blocks that the server drops by itself count until their pod
    removes them, those of a large cleared pod until they are swept out, and speculative ones not at all.

    Args:
        settings: Where, and how patient.
        tiers: The tiers and their weights.
        registry: Where its metrics are registered.

    Raises:
        ConfigError: The URL is wrong. That the server cannot be reached is no error: it may come back.
    """

    def __init__(self, settings: RedisSettings, tiers: Tiers, *, registry: CollectorRegistry) -> None:
        self.tiers = tiers
        self._settings = settings
        self._prefix = f"{{{settings.namespace}:{settings.fingerprint:016x}}}:"
        metrics = RedisMetrics(registry)
        self._reader = RedisLink(
            settings.url,
            name="read",
            timeout_s=settings.deadline_s,
            retries=_READ_RETRIES,
            metrics=metrics,
        )
        self._write_link = RedisLink(
            settings.url,
            name="write",
            timeout_s=max(settings.deadline_s, _WRITE_TIMEOUT_S),
            retries=0,
            metrics=metrics,
        )
        self._writer = RedisWriter(
            self._write_link,
            prefix=self._prefix,
            capacity_blocks=settings.capacity_blocks,
            lease_s=settings.lease_s,
            ttl_s=settings.ttl_s,
            metrics=metrics,
        )
        self._read = self._reader.client.register_script(redis_scripts.READ)
        self._stats = self._reader.client.register_script(redis_scripts.STATS)
        self._speculative = tiers.number(SPECULATIVE_TIER)
        self._assumed = AssumedBlocks(settings.max_assumed)
        self._touched: dict[int, None] = {}
        self._touching = threading.Lock()
        self._blocks = 0
        self._evicted = 0
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="redis-index", daemon=True)
        self._keeper.start()

    @property
    def up(self) -> bool:
        """Whether the server answers; while it does not, nothing is cached."""
        return self._reader.up and self._write_link.up

    def take_lost(self) -> tuple[str, ...]:
        """Pods whose view in the index was lost, or taken over from another router, since the last call.

        Theirs is empty but for what came since. Clear them, and apply a snapshot or a replay of the engine's.
        """
        return self._writer.take_lost()

    def close(self) -> None:
        """Gives this process's views back and closes all connections; idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._keeper.join()
            self._writer.release()
            self._reader.close()
            self._write_link.close()

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        """See `Index.add`. Does nothing where another router keeps the pod's view up."""
        self._add(pod, tier, keys, None)

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """See `Index.remove`."""
        if tier == SPECULATIVE_TIER:
            return self._assumed.remove(pod, keys)
        return self._writer.remove(pod, self.tiers.number(tier), keys)

    def remove_all(self, tier: str, pods: Sequence[str], runs: Sequence[Keys]) -> int:
        """See `Index.remove_all`."""
        return sum(self.remove(pod, tier, keys) for pod, keys in zip(pods, runs, strict=True))

    def clear_pod(self, pod: str) -> int:
        """See `Index.clear_pod`."""
        assumed = np.array(self._assumed.clear_pod(pod), np.uint64)
        only_assumed = np.count_nonzero(self.held(assumed, pod) == 0)
        return int(only_assumed) + self._writer.clear(pod)

    def match(self, keys: Keys, pods: Collection[str]) -> MatchTable:
        """See `Index.match`. One round trip for each 1,024 blocks that somebody holds."""
        rows = {pod: row for row, pod in enumerate(dict.fromkeys(pods))}
        counts = np.zeros((len(rows), len(self.tiers.names)), np.int32)
        names = list(rows)
        unbroken = np.arange(len(names))
        longest = 0
        for start in range(0, len(keys), _READ_BLOCKS):
            chunk = keys[start : start + _READ_BLOCKS]
            bits = self._held(chunk, [names[row] for row in unbroken])
            # A block that nobody holds, behind the last one, ends every prefix.
            ends = np.argmin(np.pad(bits, ((0, 0), (0, 1))) != 0, axis=1)
            best = BEST_TIER[bits]
            best[np.arange(len(chunk)) >= ends[:, None]] = BEST_TIER[0]
            for tier in range(len(self.tiers.names)):
                counts[unbroken, tier] += np.count_nonzero(best == tier, axis=1).astype(np.int32)
            longest = start + int(ends.max(initial=0))
            unbroken = unbroken[ends == len(chunk)]
            if not len(unbroken):
                break
        self._use(keys[:longest].tolist())
        return MatchTable(rows, self.tiers, counts.sum(axis=1, dtype=np.int32), counts)

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        """See `Index.held`."""
        chunks = [
            self._held(keys[start : start + _READ_BLOCKS], [pod])[0]
            for start in range(0, len(keys), _READ_BLOCKS)
        ]
        return np.concatenate(chunks) if chunks else np.empty(0, np.uint8)

    def evict(self, blocks: int) -> int:
        """See `Index.evict`. Speculative blocks stay."""
        self._tell_uses()
        return self._writer.evict(blocks)

    def snapshot(self, pods: Collection[str]) -> Sequence[Holding]:
        """See `Index.snapshot`. Only of pods whose view this process keeps up; it writes nothing meanwhile.

        Raises:
            UnavailableError: The server does not answer, or did not of late.
        """
        found = []
        for pod in pods:
            with self._writer.lock:
                if life := self._writer.life(pod):
                    found += self._holdings(pod, life)
        return found

    def restore(self, holdings: Sequence[Holding]) -> None:
        """See `Index.restore`."""
        for holding in holdings:
            self._add(holding.pod, holding.tier, holding.keys, holding.references)

    def stats(self) -> IndexStats:
        """See `Index.stats`."""
        blocks = holdings = 0
        try:
            reply = self._reader.call(lambda client: self._stats(keys=[self._prefix], client=client))
            blocks, holdings, self._evicted = map(int, reply)
        except UnavailableError:
            # Nothing is held as far as this process can tell; a counter must not fall.
            pass
        return IndexStats(blocks, self._settings.capacity_blocks, holdings, self._evicted)

    def beat(self) -> None:
        """What is due from time to time; called by a thread of its own."""
        for link in (self._reader, self._write_link):
            if not link.up:
                link.probe()
        if self._write_link.up:
            self._tell_uses()
            self._writer.renew()
            self._writer.sweep()

    def _add(self, pod: str, tier: str, keys: Keys, references: NDArray[np.int32] | None) -> None:
        if tier == SPECULATIVE_TIER:
            self._assumed.add(pod, keys)
        elif len(keys):
            if self._blocks + len(keys) > self._settings.capacity_blocks:
                self._tell_uses()
            self._blocks = self._writer.add(pod, self.tiers.number(tier), keys, references)

    def _held(self, keys: Keys, pods: Sequence[str]) -> NDArray[np.uint8]:
        """Tiers that hold blocks, at most `_READ_BLOCKS`: uint8 [pods, blocks], a bit for each tier."""
        lives = np.zeros(len(pods), np.int64)
        blocks = PackedBlocks.none(len(keys))
        if len(keys) and pods:
            try:
                now_ms, records, *packed = self._reader.call(self._reading(keys, pods))
                lives = read_lives(records, now_ms)
                blocks = PackedBlocks.of(*packed)
            except UnavailableError:
                # Counted by the link: nothing is cached, as far as this process can tell.
                pass
        bits = read_tiers(blocks, lives, len(self.tiers.names))
        chain = keys.tolist()
        for row, pod in enumerate(pods):
            bits[row, self._assumed.positions(chain, pod)] |= 1 << self._speculative
        return bits

    def _reading(self, keys: Keys, pods: Sequence[str]) -> Callable[[Redis], Any]:
        arguments = [keys.astype("<u8").tobytes(), *map(utf8, pods)]
        return lambda client: self._read(keys=[self._prefix], args=arguments, client=client)

    def _holdings(self, pod: str, life: int) -> list[Holding]:
        """All that a life of a pod holds; the writer must be locked."""
        members = self._write_link.call(lambda client: set(self._members(client, life)))
        keys = np.sort(np.frombuffer(b"".join(members), "<u8").astype(np.uint64))
        references = np.zeros((len(self.tiers.names), len(keys)), np.int32)
        for start in range(0, len(keys), _READ_BLOCKS):
            chunk = keys[start : start + _READ_BLOCKS]
            _, _, *packed = self._write_link.call(self._reading(chunk, [pod]))
            blocks = PackedBlocks.of(*packed)
            references[:, start : start + len(chunk)] = read_references(blocks, life, len(references))
        return [
            Holding(pod, name, keys[copies > 0], copies[copies > 0])
            for name, copies in zip(self.tiers.names, references, strict=True)
            if copies.any()
        ]

    def _members(self, client: Redis, life: int) -> Iterator[bytes]:
        members: Iterator[bytes] = client.sscan_iter(f"{self._prefix}l:{life}", count=_READ_BLOCKS)
        return (member for member in members if len(member) == _KEY_BYTES)

    def _use(self, chain: list[int]) -> None:
        with self._touching:
            for key in reversed(chain):
                self._touched.pop(key, None)
                self._touched[key] = None
            while len(self._touched) > _TOUCHED_MAX:
                del self._touched[next(iter(self._touched))]

    def _tell_uses(self) -> None:
        # No write may come in between: it would seem older than these uses.
        with self._writer.lock:
            with self._touching:
                touched, self._touched = list(self._touched), {}
            if touched:
                self._writer.touch(touched)

    def _keep(self) -> None:
        pause_s = min(_BEAT_S, self._settings.lease_s / _BEATS_PER_LEASE)
        while not self._closing.wait(pause_s):
            try:
                self.beat()
            except Exception:
                # Without its beat the index would lose all leases.
                _log.exception("redis index: a beat failed")
