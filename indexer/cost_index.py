"""An index with a budget of bytes, which keeps what is used often rather than what came last.

See `index` for what comes in and goes out. It is for small budgets beside long tails of prompts that never
come again: these would push the shared prefixes out of a plain LRU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from indexer.errors import ConfigError
from indexer.frequency import FrequencySketch
from indexer.index import Holding, IndexStats, MatchTable
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER, Tiers

# Most that CPython takes for one block and for each of its holders: dictionaries just after they grew, the
# set of the pod's keys, the numbers. The tests hold these figures against tracemalloc.
BLOCK_BYTES = 320
HOLDER_BYTES = 216

# New blocks live in a part of the room of their own, in LRU order, before they must compete.
_WINDOW_SHARE = 0.1

# Of one block: pod -> references in all tiers, a field of so many bits for each.
_Holders = dict[str, int]
_FIELD_BITS = 64
_FIELD = (1 << _FIELD_BITS) - 1
_NO_HOLDERS: _Holders = {}


class CostIndex:
    """An `Index` in a byte budget, under one lock, with admission by frequency.

    A block costs `BLOCK_BYTES` and `HOLDER_BYTES` for each pod. New blocks enter a window; the oldest that
    leaves it is admitted if there is room, or if it was used as often of late as all together that would have
    to make room for it, the least recently used ones. Else it is rejected: it goes as a whole and counts as
    evicted. Equals are admitted so that a chain, which is used as a whole, loses its tail first. What is held
    is as exact as in any other index.

    Args:
        capacity_bytes: The budget; blocks, holders and the frequencies are counted.
        tiers: The tiers and their weights.

    Raises:
        ConfigError: Not even one block fits.
    """

    def __init__(self, capacity_bytes: int, tiers: Tiers) -> None:
        self.tiers = tiers
        self._capacity_bytes = capacity_bytes
        self._sketch = FrequencySketch(max(1, capacity_bytes // BLOCK_BYTES))
        block_bytes = BLOCK_BYTES + HOLDER_BYTES
        room = capacity_bytes - self._sketch.used_bytes
        self._capacity_blocks = room // block_bytes
        if self._capacity_blocks < 1:
            fitting = self._sketch.used_bytes + block_bytes
            raise ConfigError(f"index: no block fits into {capacity_bytes} bytes, must be at least {fitting}")
        self._window = _Segment(max(block_bytes, int(room * _WINDOW_SHARE)))
        self._main = _Segment(room - self._window.room_bytes)
        self._lock = threading.Lock()
        self._keys_by_pod: dict[str, set[int]] = {}
        self._evicted = 0

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        """See `Index.add`."""
        with self._lock:
            self._sketch.use(keys)
            self._add(pod, self.tiers.number(tier), keys.tolist(), [1] * len(keys))

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """See `Index.remove`."""
        one = 1 << self.tiers.number(tier) * _FIELD_BITS
        ended = 0
        with self._lock:
            held = self._keys_by_pod.get(pod, set())
            for key in keys.tolist():
                if key not in held:
                    continue
                holders = self._segment(key).blocks[key]
                if not holders[pod] & one * _FIELD:
                    continue
                holders[pod] -= one
                ended += not holders[pod] & one * _FIELD
                if not holders[pod]:
                    self._drop_holder(key, pod)
        return ended

    def remove_all(self, tier: str, pods: Sequence[str], runs: Sequence[Keys]) -> int:
        """See `Index.remove_all`."""
        return sum(self.remove(pod, tier, keys) for pod, keys in zip(pods, runs, strict=True))

    def clear_pod(self, pod: str) -> int:
        """See `Index.clear_pod`."""
        with self._lock:
            held = tuple(self._keys_by_pod.get(pod, ()))
            for key in held:
                self._drop_holder(key, pod)
        return len(held)

    def match(self, keys: Keys, pods: Collection[str]) -> MatchTable:
        """See `Index.match`. Blocks that nobody holds count as used too: when they come, they are wanted."""
        rows = {pod: row for row, pod in enumerate(dict.fromkeys(pods))}
        counts = np.zeros((len(rows), len(self.tiers.names)), np.int32)
        chain = keys.tolist()
        with self._lock:
            self._sketch.use(keys)
            unbroken: Iterable[str] = rows
            longest = 0
            for position, key in enumerate(chain):
                holders = self._holders(key)
                unbroken = [pod for pod in unbroken if pod in holders]
                if not unbroken:
                    break
                for pod in unbroken:
                    counts[rows[pod], _best(holders[pod])] += 1
                longest = position + 1
            for key in reversed(chain[:longest]):
                self._segment(key).blocks.move_to_end(key)
        return MatchTable(rows, self.tiers, counts.sum(axis=1, dtype=np.int32), counts)

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        """See `Index.held`."""
        with self._lock:
            references = [self._holders(key).get(pod, 0) for key in keys.tolist()]
        tiers = range(len(self.tiers.names))
        bits = [sum(1 << tier for tier in tiers if _field(packed, tier)) for packed in references]
        return np.array(bits, np.uint8)

    def evict(self, blocks: int) -> int:
        """See `Index.evict`. Those that proved themselves go first: what came last had no time to."""
        dropped = 0
        with self._lock:
            for segment in (self._main, self._window):
                while dropped < blocks and segment.blocks:
                    self._evict(segment.oldest())
                    dropped += 1
        return dropped

    def snapshot(self, pods: Collection[str]) -> Sequence[Holding]:
        """See `Index.snapshot`."""
        with self._lock:
            return [
                holding
                for pod in pods
                for number, tier in enumerate(self.tiers.names)
                if tier != SPECULATIVE_TIER and (holding := self._holding(pod, number)) is not None
            ]

    def restore(self, holdings: Sequence[Holding]) -> None:
        """See `Index.restore`."""
        with self._lock:
            for holding in holdings:
                number = self.tiers.number(holding.tier)
                self._sketch.use(holding.keys)
                self._add(holding.pod, number, holding.keys.tolist(), holding.references.tolist())

    def stats(self) -> IndexStats:
        """See `Index.stats`."""
        with self._lock:
            return IndexStats(
                blocks=len(self._window.blocks) + len(self._main.blocks),
                capacity_blocks=self._capacity_blocks,
                holdings=sum(map(len, self._keys_by_pod.values())),
                evicted_blocks=self._evicted,
                used_bytes=self._sketch.used_bytes + self._window.used_bytes + self._main.used_bytes,
                capacity_bytes=self._capacity_bytes,
            )

    def _add(self, pod: str, number: int, keys: list[int], references: list[int]) -> None:
        # A call that is longer than the room loses its end without a contest.
        kept = min(len(keys), self._capacity_blocks)
        self._evicted += len(keys) - kept
        for position in reversed(range(kept)):
            key = keys[position]
            segment = self._segment(key)
            holders = segment.blocks.get(key)
            if holders is None:
                holders = segment.blocks[key] = {}
                segment.used_bytes += BLOCK_BYTES
            segment.blocks.move_to_end(key)
            if pod not in holders:
                holders[pod] = 0
                segment.used_bytes += HOLDER_BYTES
                self._keys_by_pod.setdefault(pod, set()).add(key)
            holders[pod] += references[position] << number * _FIELD_BITS
            self._make_room()

    def _make_room(self) -> None:
        while self._window.over():
            self._admit(self._window.oldest())
        while self._main.over():
            self._evict(self._main.oldest())

    def _admit(self, key: int) -> None:
        """Moves a block out of the window: to the others if it is worth what must go for it, else away."""
        cost = _cost(self._window.blocks[key])
        spare = self._main.room_bytes - self._main.used_bytes
        value = self._sketch.estimate(key)
        victims = []
        for victim, holders in self._main.blocks.items():
            if spare >= cost or value < 0:
                break
            spare += _cost(holders)
            value -= self._sketch.estimate(victim)
            victims.append(victim)
        if spare < cost or value < 0:
            self._evict(key)
            return
        for victim in victims:
            self._evict(victim)
        self._window.used_bytes -= cost
        self._main.used_bytes += cost
        self._main.blocks[key] = self._window.blocks.pop(key)

    def _evict(self, key: int) -> None:
        segment = self._segment(key)
        holders = segment.blocks.pop(key)
        segment.used_bytes -= _cost(holders)
        self._evicted += 1
        for pod in holders:
            self._forget(key, pod)

    def _drop_holder(self, key: int, pod: str) -> None:
        segment = self._segment(key)
        holders = segment.blocks[key]
        del holders[pod]
        segment.used_bytes -= HOLDER_BYTES
        if not holders:
            del segment.blocks[key]
            segment.used_bytes -= BLOCK_BYTES
        self._forget(key, pod)

    def _forget(self, key: int, pod: str) -> None:
        held = self._keys_by_pod[pod]
        held.discard(key)
        if not held:
            del self._keys_by_pod[pod]

    def _holding(self, pod: str, number: int) -> Holding | None:
        copies = {
            key: references
            for key in self._keys_by_pod.get(pod, ())
            if (references := _field(self._holders(key)[pod], number))
        }
        if not copies:
            return None
        keys = np.fromiter(copies.keys(), np.uint64, len(copies))
        return Holding(
            pod, self.tiers.names[number], keys, np.fromiter(copies.values(), np.int32, len(copies))
        )

    def _holders(self, key: int) -> _Holders:
        return self._segment(key).blocks.get(key, _NO_HOLDERS)

    def _segment(self, key: int) -> _Segment:
        """Where a block is, or would begin."""
        return self._main if key in self._main.blocks else self._window


class _Segment:
    """Blocks in LRU order, the oldest first, in a room of their own."""

    __slots__ = ("blocks", "room_bytes", "used_bytes")

    def __init__(self, room_bytes: int) -> None:
        self.blocks: OrderedDict[int, _Holders] = OrderedDict()
        self.room_bytes = room_bytes
        self.used_bytes = 0

    def over(self) -> bool:
        return self.used_bytes > self.room_bytes

    def oldest(self) -> int:
        return next(iter(self.blocks))


def _cost(holders: _Holders) -> int:
    return BLOCK_BYTES + HOLDER_BYTES * len(holders)


def _field(packed: int, tier: int) -> int:
    return packed >> tier * _FIELD_BITS & _FIELD


def _best(packed: int) -> int:
    """Number of the lowest tier with references."""
    return ((packed & -packed).bit_length() - 1) // _FIELD_BITS
