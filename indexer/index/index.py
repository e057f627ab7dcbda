"""The default index: flat arrays and compiled kernels, exact pod sets, a hard ceiling of bytes.

Block keys come in (see `keys`), longest unbroken prefixes per pod go out; it knows no tokens and no engine
hashes. See `flat_layout` for what lies where. One lock guards it all. Readers and writers pass each other:
events hold it for a few thousand blocks at a time, a match for its own prompt. Only a pod for which rows have
no bit left takes longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.errors import ConfigError
from indexer.index import layout
from indexer.index.contract import IndexStats, PodMatches
from indexer.index.hash_table import empty_table, reserved
from indexer.index.layout import FlatArrays
from indexer.index.match import cut_to_strides, held_blocks, match_blocks, scratch
from indexer.index.update import (
    count_blocks,
    for_blocks,
    remove_blocks,
    store_with_room,
    sweep,
    used_bytes,
)
from indexer.keys import Keys
from indexer.tiers import Tiers

# What one turn under the lock may take: about 0.2 ms.
TURN_BLOCKS = 1024
# Slots that are looked at in one turn.
SWEEP_SLOTS = 16_384
# So many turns of sweeping for one run of blocks that wants room: a few milliseconds.
_SWEEPS_FOR_ROOM = 8
# Between turns: a lock that is taken again at once is never had by those who wait for it.
_PAUSE_S = 0.0001
_POD_SETS_MAX = 64
_NO_NAMES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class _PodSet:
    """A set of pods that was asked for, by their numbers of that time."""

    version: int
    rows: dict[str, int]
    numbers: NDArray[np.int64]
    strides: NDArray[np.int32]  # empty if all are 1


class FlatIndex:
    """Who holds which block, in flat arrays. Thread-safe; what a method did is visible when it returns.

    References are counted per (key, pod, tier): an engine may keep several physical copies of one block,
    announces each, and removes each. A holding ends when as many were removed as were added.

    When the capacity is reached, the least recently used block leaves with all its holders; removing it
    afterwards is a no-op. Blocks are used by `add` and by `match`, and within one call the earlier keys count
    as the more recent ones: a chain is of use only from its start, so it must lose its tail first. Blocks of
    one call never evict one another: of a call longer than the capacity only the first blocks are kept.

    A pod is any text that names one holder; a KV cache group that is indexed apart is a holder of its own.
    Keys are given as `keys.Keys` arrays; a tier that `tiers` does not name is taken for "other".

    Args:
        capacity_bytes: Most memory for blocks; the least recently used make room.
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
        fitting = capacity_bytes // layout.BLOCK_BYTES
        blocks = fitting if capacity_blocks is None else min(fitting, capacity_blocks)
        if not 0 < blocks < 1 << 31:
            raise ConfigError(f"index: room for {blocks} blocks, must be for 1..{(1 << 31) - 1}")
        self.tiers = tiers
        self.lock = threading.Lock()
        self._take(_allocate(blocks, capacity_bytes, len(tiers.names), released_names))
        self._capacity_bytes = capacity_bytes
        self._numbers: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._numbers_used = 0
        self._lives = 0
        self._version = 0
        self._pod_sets: dict[frozenset[str], _PodSet] = {}
        self._strides: dict[str, int] = {}  # index blocks per block of the pod's engine, where not 1
        # Slots of the blocks at hand, under the lock.
        self.chain = np.empty(TURN_BLOCKS, np.int64)
        # Numbers of pods that are gone, and how far their holdings have been swept out.
        self._gone: list[int] = []
        self._sweeping: list[int] = []
        self._swept = 0

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        """Adds one reference for each key; a key named twice counts twice.

        Never sleeps: callers may hold locks of their own.
        """
        self.store(pod, self.tiers.number(tier), keys)

    def store(self, pod: str, tier: int, keys: Keys, names: NDArray[np.uint64] = _NO_NAMES) -> int:
        """As `add`, for blocks that the pod names; returns how many names meant other blocks before."""
        kept = min(len(keys), int(self.arrays.counters[layout.CAPACITY]))
        reused = 0
        # From the end: within one call the earlier keys shall be the more recent ones.
        for end in range(kept, 0, -TURN_BLOCKS):
            turn = slice(max(0, end - TURN_BLOCKS), end)
            with self.lock:
                number = self.number(pod)
                self.sweep_for(len(keys[turn]))
                reused += store_with_room(self.arrays, number, tier, keys[turn], names[turn], self.chain)
        if kept < len(keys):
            with self.lock:
                self.arrays.counters[layout.EVICTED] += len(keys) - kept
        return reused

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """Takes one reference away for each key that is held; tells how many holdings ended with it."""
        number = self.tiers.number(tier)
        ended = 0
        for start in range(0, len(keys), TURN_BLOCKS):
            turn = keys[start : start + TURN_BLOCKS] if len(keys) > TURN_BLOCKS else keys
            with self.lock:
                if (holder := self._numbers.get(pod)) is None:
                    return ended
                ended += remove_blocks(self.arrays, holder, number, turn)
        return ended

    def clear_pod(self, pod: str) -> int:
        """Drops all blocks of the pod, and tells how many; its holdings are swept out turn by turn."""
        with self.lock:
            number = self._numbers.pop(pod, None)
            if number is None:
                return 0
            self._version += 1
            self.arrays.gone[number] = 1
            self._gone.append(number)
            return int(self.arrays.pod_blocks[number])

    def learn_stride(self, pod: str, stride: int) -> None:
        """Record how many index blocks a block of the pod's engine has; matches are cut to whole ones.

        An engine serves whole blocks of its own only: an index block may match although the rest of the
        engine's differs.
        """
        if self._strides.get(pod, 1) != stride:
            with self.lock:
                self._version += 1
                self._strides[pod] = stride
                if stride == 1:
                    del self._strides[pod]

    def match(self, keys: Keys, pods: Collection[str]) -> PodMatches:
        """Finds how far each pod holds the chain `keys`, from its start, without a hole.

        Args:
            keys: Chained keys of a prompt, first block first.
            pods: The pods asked for; each is in the answer. A frozenset that is asked again is fastest.

        Returns:
            One match for each pod. The blocks of the longest match become the most recently used ones.
        """
        wanted = pods if isinstance(pods, frozenset) else frozenset(pods)
        with self.lock:
            pod_set = self._pod_set(wanted)
            numbers = pod_set.numbers
            blocks = np.empty(len(numbers), np.int32)
            counts = np.zeros((len(numbers), len(self.tiers.names)), np.int32)
            if len(keys) > len(self.chain):
                self.chain = np.empty(2 * len(keys), np.int64)
            longest = match_blocks(self.arrays, self._scratch, keys, numbers, self.chain, counts, blocks)
        strides = pod_set.strides
        if len(strides):
            cut_to_strides(blocks, counts, strides)
            longest = int(blocks.max(initial=0))
        return PodMatches(pod_set.rows, self.tiers, blocks, counts, longest, strides=strides)

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        """Tells which of `keys` the pod holds, holes or not, without using them.

        Returns:
            uint8 [keys], a bit for each tier that holds it: 1 << its place in `tiers.names`; 0: not held.
        """
        tiers = np.zeros(len(keys), np.uint8)
        with self.lock:
            if (number := self._numbers.get(pod)) is not None:
                held_blocks(self.arrays, keys, number, tiers)
        return tiers

    def stats(self) -> IndexStats:
        """Tells the index's size. Sweeps first, so that nothing of cleared pods is counted."""
        self.sweep()
        with self.lock:
            counters = self.arrays.counters
            numbers = np.fromiter(self._numbers.values(), np.int64, len(self._numbers))
            return IndexStats(
                blocks=int(counters[layout.BLOCKS]),
                capacity_blocks=int(counters[layout.CAPACITY]),
                holdings=int(self.arrays.pod_blocks[numbers].sum()),
                evicted_blocks=int(counters[layout.EVICTED]),
                used_bytes=int(used_bytes(self.arrays)),
                capacity_bytes=self._capacity_bytes,
            )

    @property
    def evicted_blocks(self) -> int:
        with self.lock:
            return int(self.arrays.counters[layout.EVICTED])

    def pod_blocks(self, pod: str) -> int:
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
                if number is None or start >= self.arrays.counters[layout.SLOTS_USED]:
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
            while self._numbers_used >= layout.PODS_MAX and not self._free_numbers and self._is_unswept:
                self._sweep_turn()
            if self._free_numbers:
                number = self._free_numbers.pop()
            elif self._numbers_used < layout.PODS_MAX:
                number = self._numbers_used
                self._numbers_used += 1
            else:
                raise ConfigError(f"index: more than {layout.PODS_MAX} pods")
            self._lives += 1
            self.arrays.lives[number] = self._lives
            self._numbers[pod] = number
            self._version += 1
            self._take(_for_pods(self.arrays, self._numbers_used))
        return number

    def sweep_for(self, blocks: int) -> None:
        """Makes room for a run of so many blocks, as far as nobody holds others any more: those go first.

        Call it under the lock, before each run that is not `prepare`d.
        """
        if not self._is_unswept:
            return
        counters = self.arrays.counters
        for _ in range(_SWEEPS_FOR_ROOM):
            if counters[layout.BLOCKS] + blocks <= counters[layout.CAPACITY] or not self._is_unswept:
                return
            self._sweep_turn()

    def prepare(self, blocks: int) -> FlatArrays:
        """The arrays, with room for a run of RUN_MAX blocks at most. Call under the lock, before each run."""
        assert blocks <= layout.RUN_MAX
        self.sweep_for(blocks)
        for_blocks(self.arrays, blocks)
        return self.arrays

    @property
    def _is_unswept(self) -> bool:
        return bool(self._gone or self._sweeping)

    def _take(self, arrays: FlatArrays) -> None:
        self.arrays = arrays
        self._scratch = scratch(arrays.rows)

    def _pod_set(self, pods: frozenset[str]) -> _PodSet:
        known = self._pod_sets.get(pods)
        if known is None or known.version != self._version:
            rows = {pod: row for row, pod in enumerate(pods)}
            numbers = np.fromiter((self._numbers.get(pod, -1) for pod in rows), np.int64, len(rows))
            strides = np.fromiter((self._strides.get(pod, 1) for pod in rows), np.int32, len(rows))
            known = _PodSet(self._version, rows, numbers, strides if (strides > 1).any() else strides[:0])
            if len(self._pod_sets) >= _POD_SETS_MAX:
                self._pod_sets.clear()
            self._pod_sets[pods] = known
        return known

    def _sweep_turn(self) -> None:
        """Sweeps a part of the slots; after the last, the numbers of pods that were gone before are free."""
        if not self._sweeping:
            self._sweeping, self._gone, self._swept = self._gone, [], 0
        sweep(self.arrays, self._swept, self._swept + SWEEP_SLOTS)
        self._swept += SWEEP_SLOTS
        if self._swept >= self.arrays.counters[layout.SLOTS_USED]:
            self.arrays.gone[self._sweeping] = 0
            self.arrays.pod_blocks[self._sweeping] = 0
            self._free_numbers += self._sweeping
            self._sweeping = []


def _allocate(capacity_blocks: int, capacity_bytes: int, tiers: int, released_names: int) -> FlatArrays:
    """Memory for so many blocks. What is not used yet is reserved only, and takes none."""
    slots = reserved((capacity_blocks, 8), np.uint32)
    counters = np.zeros(layout.COUNTERS, np.int64)
    lists = layout.NEWEST, layout.OLDEST, layout.FREE, layout.ROW_FREE, layout.ALIAS_FREE, layout.FURTHER_FREE
    counters[list(lists)] = layout.NO_SLOT
    counters[layout.CAPACITY] = capacity_blocks
    counters[layout.BYTES_MAX] = capacity_bytes
    sets = max(1, released_names // layout.RELEASED_WAYS)
    # When a call begins, the ceiling holds (see `flat_update`).
    aliases = capacity_bytes // layout.ALIAS_BYTES + layout.RUN_MAX
    further = capacity_bytes // layout.FURTHER_BYTES + layout.RUN_MAX
    return FlatArrays(
        slots=slots,
        keys=slots.view(np.uint64),
        buckets=empty_table(capacity_blocks),
        rows=_empty_rows(capacity_blocks, capacity_bytes, tiers, 1),
        names=reserved((capacity_blocks,), np.uint64),
        first_alias=reserved((capacity_blocks,), np.uint32),
        name_buckets=empty_table(capacity_blocks + aliases),
        aliases=reserved((aliases, 2), np.uint64),
        further=reserved((further, 2), np.uint64),
        further_buckets=empty_table(further),
        released=reserved((sets, 2, layout.RELEASED_WAYS), np.uint64),
        pod_blocks=reserved((layout.PODS_MAX + 1,), np.int64),
        gone=reserved((layout.PODS_MAX + 1,), np.uint8),
        lives=reserved((layout.PODS_MAX + 1,), np.uint64),
        counters=counters,
    )


def _empty_rows(capacity_blocks: int, capacity_bytes: int, tiers: int, words: int) -> NDArray[np.uint64]:
    """Rows of so many words for each tier, as many as there can be."""
    rows = min(capacity_blocks, capacity_bytes // (layout.BLOCK_BYTES + words * 8) + layout.RUN_MAX)
    return reserved((tiers, rows, words), np.uint64)


def _for_pods(arrays: FlatArrays, pods: int) -> FlatArrays:
    """Arrays whose rows have a bit for each of so many pods; all rows are copied where they had not."""
    tiers, _, words = arrays.rows.shape
    if pods <= words * 64:
        return arrays
    counters = arrays.counters
    rows = _empty_rows(int(counters[layout.CAPACITY]), int(counters[layout.BYTES_MAX]), tiers, 2 * words)
    used, tiers_used = int(counters[layout.ROWS_USED]), int(counters[layout.TIERS_USED])
    rows[:tiers_used, :used, :words] = arrays.rows[:tiers_used, :used]
    return arrays._replace(rows=rows)
