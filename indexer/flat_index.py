"""The default index: flat arrays and compiled kernels, exact pod sets, a hard ceiling of bytes.

See `index` for what comes in and goes out, `flat_layout` for what lies where. One lock guards it all. Readers
and writers pass each other: events hold it for a few thousand blocks at a time, a match for its own prompt.
Only `snapshot`, which must be consistent, and a pod for which rows have no bit left take longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from indexer import flat_growth as growth
from indexer.errors import ConfigError
from indexer.flat_layout import (
    BLOCK_BYTES,
    BLOCKS,
    CAPACITY,
    EVICTED,
    PODS_MAX,
    RUN_MAX,
    SLOTS_USED,
    FlatArrays,
    allocate,
)
from indexer.flat_match import held_blocks, match_blocks, scratch
from indexer.flat_update import (
    count_blocks,
    evict_oldest,
    list_blocks,
    remove_blocks,
    remove_runs,
    sweep,
    used_bytes,
)
from indexer.index import Holding, IndexStats, MatchTable
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER, Tiers

# What one turn under the lock may take: about 0.2 ms.
TURN_BLOCKS = 1024
# Slots that are looked at in one turn.
SWEEP_SLOTS = 16_384
# So many turns of sweeping for one run of blocks that wants room: a few milliseconds.
_SWEEPS_FOR_ROOM = 8
# Between turns: a lock that is taken again at once is never had by those who wait for it.
_PAUSE_S = 0.0001
_POD_SETS_MAX = 64

_ONE_EACH = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _PodSet:
    """A set of pods that was asked for, by their numbers of that time."""

    version: int
    rows: dict[str, int]
    numbers: NDArray[np.int64]


class FlatIndex:
    """An `Index` in flat arrays.

    Args:
        capacity_bytes: Most memory for blocks; the least recently used make room.
        tiers: The tiers and their weights.
        capacity_blocks: Most unique blocks; None: as many as fit.
        released_names: Engine hashes that are remembered after their block went, all pods together.

    Raises:
        ConfigError: Not even one block fits.
    """

    def __init__(
        self,
        capacity_bytes: int,
        tiers: Tiers,
        *,
        capacity_blocks: int | None = None,
        released_names: int = 262_144,
    ) -> None:
        fitting = capacity_bytes // BLOCK_BYTES
        blocks = fitting if capacity_blocks is None else min(fitting, capacity_blocks)
        if not 0 < blocks < 1 << 31:
            raise ConfigError(f"index: room for {blocks} blocks, must be for 1..{(1 << 31) - 1}")
        self.tiers = tiers
        self.lock = threading.Lock()
        self._take(allocate(blocks, capacity_bytes, len(tiers.names), released_names))
        self._capacity_bytes = capacity_bytes
        self._turn_blocks = min(TURN_BLOCKS, blocks)
        self._numbers: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._numbers_used = 0
        self._lives = 0
        self._version = 0
        self._pod_sets: dict[frozenset[str], _PodSet] = {}
        # Slots of the blocks at hand, under the lock.
        self._chain = np.empty(TURN_BLOCKS, np.int64)
        # Numbers of pods that are gone, and how far their holdings have been swept out.
        self._gone: list[int] = []
        self._sweeping: list[int] = []
        self._swept = 0

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        """See `Index.add`. Never sleeps: callers may hold locks of their own."""
        if len(keys) > self._turn_blocks:
            self._add_in_turns(pod, tier, keys, _ONE_EACH, pause_s=0.0)
        elif len(keys):
            with self.lock:
                self._add(pod, self.tiers.number(tier), keys, _ONE_EACH)

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """See `Index.remove`."""
        number = self.tiers.number(tier)
        ended = 0
        for start in range(0, len(keys), TURN_BLOCKS):
            turn = keys[start : start + TURN_BLOCKS] if len(keys) > TURN_BLOCKS else keys
            with self.lock:
                if (holder := self._numbers.get(pod)) is None:
                    return ended
                ended += remove_blocks.call(self.arrays, holder, number, turn)
        return ended

    def remove_all(self, tier: str, pods: Sequence[str], runs: Sequence[Keys]) -> int:
        """See `Index.remove_all`."""
        if len(runs) <= 1:
            return sum(self.remove(pod, tier, keys) for pod, keys in zip(pods, runs, strict=True))
        ends = np.fromiter(accumulate(map(len, runs)), np.int64, len(runs))
        if ends[-1] > TURN_BLOCKS:
            half = len(runs) // 2
            ended = self.remove_all(tier, pods[:half], runs[:half])
            return ended + self.remove_all(tier, pods[half:], runs[half:])
        keys, number = np.concatenate(runs), self.tiers.number(tier)
        with self.lock:
            holders = np.array([self._numbers.get(pod, -1) for pod in pods], np.int64)
            return remove_runs.call(self.arrays, holders, ends, number, keys)

    def clear_pod(self, pod: str) -> int:
        """See `Index.clear_pod`. Takes the pod's number away; its holdings are swept out turn by turn."""
        with self.lock:
            number = self._numbers.pop(pod, None)
            if number is None:
                return 0
            self._version += 1
            self.arrays.gone[number] = 1
            self._gone.append(number)
            return int(self.arrays.pod_blocks[number])

    def match(self, keys: Keys, pods: Collection[str]) -> MatchTable:
        """See `Index.match`."""
        wanted = pods if isinstance(pods, frozenset) else frozenset(pods)
        with self.lock:
            pod_set = self._pod_set(wanted)
            numbers = pod_set.numbers
            blocks = np.empty(len(numbers), np.int32)
            counts = np.zeros((len(numbers), len(self.tiers.names)), np.int32)
            if len(keys) > len(self._chain):
                self._chain = np.empty(2 * len(keys), np.int64)
            longest = match_blocks.call(
                self.arrays, self._scratch, keys, numbers, self._chain, counts, blocks
            )
        return MatchTable(pod_set.rows, self.tiers, blocks, counts, longest)

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        """See `Index.held`."""
        tiers = np.zeros(len(keys), np.uint8)
        with self.lock:
            if (number := self._numbers.get(pod)) is not None:
                held_blocks(self.arrays, keys, number, tiers)
        return tiers

    def evict(self, blocks: int) -> int:
        """See `Index.evict`."""
        self.sweep()
        dropped = turn = 0
        while dropped < blocks:
            with self.lock:
                turn = evict_oldest(self.arrays, min(blocks - dropped, TURN_BLOCKS))
            dropped += turn
            if not turn:
                break
            time.sleep(_PAUSE_S)
        return dropped

    def snapshot(self, pods: Collection[str]) -> Sequence[Holding]:
        """See `Index.snapshot`. To be consistent each pod's holdings are listed in one turn under the lock.

        That looks at all blocks of all pods: about 20 ms for a million.
        """
        found = []
        for pod in pods:
            with self.lock:
                if (number := self._numbers.get(pod)) is not None:
                    found += self._holdings(pod, number)
        return found

    def restore(self, holdings: Sequence[Holding]) -> None:
        """See `Index.restore`."""
        for holding in holdings:
            self._add_in_turns(holding.pod, holding.tier, holding.keys, holding.references, pause_s=_PAUSE_S)

    def stats(self) -> IndexStats:
        """See `Index.stats`. Sweeps first, so that nothing of cleared pods is counted."""
        self.sweep()
        with self.lock:
            counters = self.arrays.counters
            numbers = np.fromiter(self._numbers.values(), np.int64, len(self._numbers))
            return IndexStats(
                blocks=int(counters[BLOCKS]),
                capacity_blocks=int(counters[CAPACITY]),
                holdings=int(self.arrays.pod_blocks[numbers].sum()),
                evicted_blocks=int(counters[EVICTED]),
                used_bytes=int(used_bytes(self.arrays)),
                capacity_bytes=self._capacity_bytes,
            )

    @property
    def evicted_blocks(self) -> int:
        """See `IndexStats.evicted_blocks`."""
        with self.lock:
            return int(self.arrays.counters[EVICTED])

    def pod_blocks(self, pod: str) -> int:
        """How many blocks a pod holds, in any tier."""
        with self.lock:
            number = self._numbers.get(pod)
            return 0 if number is None else int(self.arrays.pod_blocks[number])

    def tier_blocks(self, pod: str, tier: str) -> int:
        """How many blocks a pod holds in one tier; what comes and goes meanwhile counts or not.

        Looks at all blocks of all pods, turn by turn.
        """
        found = start = 0
        while True:
            with self.lock:
                number = self._numbers.get(pod)
                if number is None or start >= self.arrays.counters[SLOTS_USED]:
                    return found
                found += count_blocks(
                    self.arrays, number, self.tiers.number(tier), start, start + SWEEP_SLOTS
                )
            start += SWEEP_SLOTS
            time.sleep(_PAUSE_S)

    def sweep(self) -> None:
        """Takes all holdings of cleared pods out, turn by turn."""
        while self._is_unswept:
            with self.lock:
                self._sweep_turn()
            time.sleep(_PAUSE_S)

    def number(self, pod: str) -> int:
        """The number of a pod's present life, a new one if it has none. Call it under the lock.

        Raises:
            ConfigError: There are more pods than numbers.
        """
        number = self._numbers.get(pod)
        if number is None:
            while self._numbers_used >= PODS_MAX and not self._free_numbers and self._is_unswept:
                self._sweep_turn()
            if self._free_numbers:
                number = self._free_numbers.pop()
            elif self._numbers_used < PODS_MAX:
                number = self._numbers_used
                self._numbers_used += 1
            else:
                raise ConfigError(f"index: more than {PODS_MAX} pods")
            self._lives += 1
            self.arrays.lives[number] = self._lives
            self._numbers[pod] = number
            self._version += 1
            self._take(growth.for_pods(self.arrays, self._numbers_used))
        return number

    def sweep_for(self, blocks: int) -> None:
        """Makes room for a run of so many blocks, as far as nobody holds others any more: those go first.

        Call it under the lock, before each run that is not `prepare`d.
        """
        if not self._is_unswept:
            return
        counters = self.arrays.counters
        for _ in range(_SWEEPS_FOR_ROOM):
            if counters[BLOCKS] + blocks <= counters[CAPACITY] or not self._is_unswept:
                return
            self._sweep_turn()

    def prepare(self, blocks: int) -> FlatArrays:
        """The arrays, with room for a run of so many blocks. Call it under the lock, before each run.

        Args:
            blocks: No more than RUN_MAX.
        """
        assert blocks <= RUN_MAX
        self.sweep_for(blocks)
        growth.for_blocks(self.arrays, blocks)
        return self.arrays

    @property
    def _is_unswept(self) -> bool:
        return bool(self._gone or self._sweeping)

    def _take(self, arrays: FlatArrays) -> None:
        self.arrays = arrays
        self._scratch = scratch(arrays.rows)

    def _add(self, pod: str, tier: int, keys: Keys, copies: NDArray[np.int32]) -> None:
        """Adds no more blocks than one turn's. Call it under the lock."""
        holder = self._numbers.get(pod)
        if holder is None:
            holder = self.number(pod)
        self.sweep_for(len(keys))
        growth.add_with_room.call(self.arrays, holder, tier, keys, copies, self._chain)

    def _add_in_turns(
        self, pod: str, tier: str, keys: Keys, copies: NDArray[np.int32], *, pause_s: float
    ) -> None:
        number = self.tiers.number(tier)
        kept = min(len(keys), int(self.arrays.counters[CAPACITY]))
        # From the end: within one call the earlier keys shall be the more recent ones.
        for end in range(kept, 0, -TURN_BLOCKS):
            start = max(0, end - TURN_BLOCKS)
            with self.lock:
                self._add(pod, number, keys[start:end], copies[start:end])
            if start and pause_s:
                time.sleep(pause_s)
        if kept < len(keys):
            with self.lock:
                self.arrays.counters[EVICTED] += len(keys) - kept

    def _pod_set(self, pods: frozenset[str]) -> _PodSet:
        known = self._pod_sets.get(pods)
        if known is None or known.version != self._version:
            rows = {pod: row for row, pod in enumerate(pods)}
            numbers = np.fromiter((self._numbers.get(pod, -1) for pod in rows), np.int64, len(rows))
            known = _PodSet(self._version, rows, numbers)
            if len(self._pod_sets) >= _POD_SETS_MAX:
                self._pod_sets.clear()
            self._pod_sets[pods] = known
        return known

    def _holdings(self, pod: str, number: int) -> list[Holding]:
        room = int(self.arrays.pod_blocks[number])
        found = []
        for tier, name in enumerate(self.tiers.names):
            if name == SPECULATIVE_TIER or not room:
                continue
            keys, copies = np.empty(room, np.uint64), np.empty(room, np.int32)
            used = int(self.arrays.counters[SLOTS_USED])
            blocks = list_blocks(self.arrays, number, tier, 0, used, keys, copies)
            if blocks:
                found.append(Holding(pod, name, keys[:blocks].copy(), copies[:blocks].copy()))
        return found

    def _sweep_turn(self) -> None:
        """Sweeps a part of the slots; after the last, the numbers of pods that were gone before are free."""
        if not self._sweeping:
            self._sweeping, self._gone, self._swept = self._gone, [], 0
        sweep(self.arrays, self._swept, self._swept + SWEEP_SLOTS)
        self._swept += SWEEP_SLOTS
        if self._swept >= self.arrays.counters[SLOTS_USED]:
            self.arrays.gone[self._sweeping] = 0
            self.arrays.pod_blocks[self._sweeping] = 0
            self._free_numbers += self._sweeping
            self._sweeping = []
