"""In-memory index of exact pod sets per block, in flat arrays under a hard memory limit.

Input: block keys (see `indexer.keys`). Output: the longest cached prefix per pod. The arrays are described in
`indexer.index.layout`. One lock guards all of them. It is held for at most a thousand blocks of an event, or
for one prompt of a match. Only a new pod that needs longer bitsets holds it for longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import KW_ONLY, InitVar, dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.errors import ConfigError
from indexer.index import layout
from indexer.index.contract import IndexStats, PodMatches
from indexer.index.hash_table import empty_table, reserved
from indexer.index.layout import FlatArrays
from indexer.index.match import count_copies, cut_to_served, held_blocks, match_blocks, scratch
from indexer.index.update import (
    count_holders,
    ensure_room,
    remove_blocks,
    store_with_room,
    sweep,
    used_bytes,
)
from indexer.keys import EMPTY, Keys
from indexer.wire.tiers import Tiers

# Blocks per turn under the lock, about 0.2 ms.
TURN_BLOCKS = 1024
# Slots that are examined per turn under the lock.
SWEEP_SLOTS = 16_384
# Maximum of sweep turns before a run of blocks is stored: a few milliseconds.
_SWEEPS_FOR_ROOM = 8
# Pause between turns: a lock that is taken again at once starves the threads that wait for it.
_PAUSE_S = 0.0001
_POD_SETS_MAX = 64


@dataclass(frozen=True, slots=True, eq=False)
class _PodSet:
    """Set of queried pods with their numbers as of `version`."""

    version: int
    rows: dict[str, int]
    numbers: NDArray[np.int64]
    strides: NDArray[np.int32]  # empty if all are 1 and nothing is dropped
    drops: NDArray[np.int32]  # as many as `strides`


@dataclass(eq=False)
class FlatIndex:
    """Index of the pods that hold each block. Thread-safe; effects are visible when a method returns.

    References are counted per (key, pod, tier): an engine may keep several physical copies of one block, and
    reports each when it is stored and when it is removed. A pod holds the block until all are removed.

    When the capacity is reached, the least recently used block is evicted with all its holders; removing it
    afterwards is a no-op. `add` and `match` use blocks. Within one call, earlier keys count as more recent: a
    chain is usable only from its start, so it must lose its tail first. Blocks of one call never evict one
    another; of a call longer than the capacity only the first blocks are kept.

    A pod is any text that names one holder; a separately indexed KV cache group is a holder of its own.
    A tier that `tiers` does not name counts as "other".

    Raises:
        ConfigError: The capacity is less than one block, or more than 2**31 - 1.
    """

    capacity_bytes: int  # maximum memory for blocks; beyond it the least recently used ones are evicted
    tiers: Tiers
    _: KW_ONLY
    capacity_blocks: InitVar[int | None] = None  # maximum of unique blocks; None: as many as fit
    # Engine hashes that are kept after their blocks were removed, of all pods together.
    removed_hashes: InitVar[int] = 262_144

    def __post_init__(self, capacity_blocks: int | None, removed_hashes: int) -> None:
        fitting = self.capacity_bytes // layout.BLOCK_BYTES
        blocks = fitting if capacity_blocks is None else min(fitting, capacity_blocks)
        if not 0 < blocks < 1 << 31:
            raise ConfigError(f"index: capacity of {blocks} blocks, must be 1..{(1 << 31) - 1}")
        self.lock = threading.Lock()
        self._set_arrays(_allocate(blocks, self.capacity_bytes, len(self.tiers.names), removed_hashes))
        self._numbers: dict[str, int] = {}
        self._free_numbers: list[int] = []
        self._numbers_used = 0
        self._epochs = 0
        self._version = 0
        self._pod_sets: dict[frozenset[str], _PodSet] = {}
        self._strides: dict[str, int] = {}  # index blocks per block of the pod's engine, where not 1
        self._dropping: set[str] = set()  # pods whose engines drop the last matched block of a hit
        # Scratch memory under the lock: slots of the blocks that are being stored or matched.
        self.chain = np.empty(TURN_BLOCKS, np.int64)
        # Numbers of removed pods: not yet being swept, being swept, and the first slot not yet swept.
        self._gone: list[int] = []
        self._sweeping: list[int] = []
        self._swept = 0

    def set_time(self, now_s: float) -> None:
        """Set the time of the changes that follow, with which lost blocks are remembered."""
        self.arrays.counters[layout.NOW_S] = int(now_s)

    def add(self, pod: str, tier: str, keys: Keys) -> None:
        """Add one reference per key; a repeated key counts twice.

        Does not sleep, so callers may hold locks of their own.
        """
        self.store(pod, self.tiers.number(tier), keys)

    def store(self, pod: str, tier: int, keys: Keys, hashes: NDArray[np.uint64] = EMPTY) -> int:
        """Add references under scoped hashes; return how many of these stood for other blocks before."""
        kept = min(len(keys), int(self.arrays.counters[layout.CAPACITY]))
        reused = 0
        # Backwards, because within one call earlier keys count as more recent.
        for end in range(kept, 0, -TURN_BLOCKS):
            turn = slice(max(0, end - TURN_BLOCKS), end)
            with self.lock:
                number = self.number(pod)
                self.sweep_to_fit(len(keys[turn]))
                reused += store_with_room(self.arrays, number, tier, keys[turn], hashes[turn], self.chain)
        if kept < len(keys):
            with self.lock:
                self.arrays.counters[layout.EVICTED] += len(keys) - kept
        return reused

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """Remove one reference per key that is held; return how many were the pod's last in this tier."""
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
        """Remove all blocks of a pod and return their number. Its references are swept later."""
        with self.lock:
            number = self._numbers.pop(pod, None)
            if number is None:
                return 0
            self._version += 1
            self.arrays.gone[number] = max(1, self.arrays.counters[layout.NOW_S])
            self._gone.append(number)
            return int(self.arrays.pod_blocks[number])

    def set_stride(self, pod: str, stride: int) -> None:
        """Set the index blocks per block of the pod's engine; matches are cut to multiples of it.

        An engine serves only whole blocks of its own, of which a first index block may match although the
        rest differs.
        """
        if self._strides.get(pod, 1) != stride:
            with self.lock:
                self._version += 1
                self._strides[pod] = stride
                if stride == 1:
                    del self._strides[pod]

    def set_drop(self, pod: str, drops: bool) -> bool:
        """Set whether the pod's engine drops the last block of each hit; return whether that changed."""
        if (pod in self._dropping) == drops:
            return False
        with self.lock:
            self._version += 1
            self._dropping = self._dropping | {pod} if drops else self._dropping - {pod}
        return True

    def match(self, keys: Keys, pods: Collection[str], servable_blocks: int | None = None) -> PodMatches:
        """Return, per pod, the length of the longest cached prefix of `keys` that its engine serves.

        Args:
            keys: Chained keys of a prompt, first block first.
            pods: The pods to match. Repeated frozensets are fastest, because their numbers are cached.
            servable_blocks: Blocks before the prompt's last token, for engines that drop a block. None: all.

        Returns:
            One match per pod. The blocks of the longest match become the most recently used ones.
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
            behind = self.arrays.counters[layout.BEHIND_HELD : layout.BEHIND_LOST_S + 1].tolist()
        strides, held = pod_set.strides, blocks
        if len(strides):
            held = blocks.copy()
            servable = len(keys) if servable_blocks is None else servable_blocks
            cut_to_served(blocks, counts, strides, pod_set.drops, servable)
            longest = int(blocks.max(initial=0))
        return PodMatches(
            pod_set.rows, self.tiers, blocks, counts, longest, strides=strides, held=held, behind=behind
        )

    def held(self, keys: Keys, pod: str) -> NDArray[np.uint8]:
        """Return which of `keys` the pod holds, also after holes, without marking them as used.

        Returns:
            uint8 [keys], the bit 1 << (place in `tiers.names`) for each tier that holds it; 0: not held.
        """
        tiers = np.zeros(len(keys), np.uint8)
        with self.lock:
            if (number := self._numbers.get(pod)) is not None:
                held_blocks(self.arrays, keys, number, tiers)
        return tiers

    def lost_s(self, key: int) -> int | None:
        """Return the second at which a pod last lost a block, if remembered; sweeps cleared pods first."""
        self.sweep()
        found, lost_s = self.arrays.lost[key & (layout.LOST_KEYS - 1)].tolist()
        return int(lost_s) if found == key else None

    def copies(self, keys: Keys, pod: str, tier: str) -> NDArray[np.int32]:
        """Return int32 [keys], the number of copies of each block that the pod holds in this tier."""
        copies = np.zeros(len(keys), np.int32)
        with self.lock:
            if (number := self._numbers.get(pod)) is not None:
                count_copies(self.arrays, keys, number, self.tiers.number(tier), copies)
        return copies

    def stats(self) -> IndexStats:
        """Return the index's size. Sweeps first, so that blocks of cleared pods do not count."""
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
                capacity_bytes=self.capacity_bytes,
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
        """Count a pod's blocks in one tier, as `blocks_by_tier` does."""
        blocks = self.blocks_by_tier().get(pod)
        return 0 if blocks is None else int(blocks[self.tiers.number(tier)])

    def blocks_by_tier(self) -> dict[str, NDArray[np.int64]]:
        """Count each pod's blocks, int64 [tiers]. Concurrent changes may or may not be included.

        Scans all blocks, turn by turn: milliseconds per million blocks.
        """
        with self.lock:
            numbers = dict(self._numbers)
        blocks = np.zeros((max(numbers.values(), default=-1) + 1, len(self.tiers.names)), np.int64)
        start = 0
        while True:
            with self.lock:
                count_holders(self.arrays, start, start + SWEEP_SLOTS, blocks)
                start += SWEEP_SLOTS
                if start >= self.arrays.counters[layout.SLOTS_USED]:
                    break
            time.sleep(_PAUSE_S)
        return {pod: blocks[number] for pod, number in numbers.items()}

    def sweep(self) -> None:
        """Remove all references of cleared pods, turn by turn."""
        while self._is_unswept:
            with self.lock:
                self._sweep_turn()
            time.sleep(_PAUSE_S)

    def number(self, pod: str) -> int:
        """Return the number of a pod's current epoch, assigning one if needed. Call it under the lock.

        Raises:
            ConfigError: There are more than PODS_MAX pods.
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
            self._epochs += 1
            group_bit = layout.GROUP_BIT if layout.GROUP_MARK in pod else layout.NOTHING
            self.arrays.epochs[number] = np.uint64(self._epochs) | group_bit
            self._numbers[pod] = number
            self._version += 1
            self._set_arrays(_for_pods(self.arrays, self._numbers_used))
        return number

    def sweep_to_fit(self, blocks: int) -> None:
        """Sweep until a run of this many blocks fits, so that blocks of cleared pods leave first.

        Gives up after a few turns. Call it under the lock, before each run without a call of `prepare`.
        """
        counters = self.arrays.counters
        for _ in range(_SWEEPS_FOR_ROOM):
            if not self._is_unswept or counters[layout.BLOCKS] + blocks <= counters[layout.CAPACITY]:
                return
            self._sweep_turn()

    def prepare(self, blocks: int) -> FlatArrays:
        """Ensure room for a run of at most RUN_MAX blocks; return the arrays. Call it under the lock."""
        assert blocks <= layout.RUN_MAX
        self.sweep_to_fit(blocks)
        ensure_room(self.arrays, blocks)
        return self.arrays

    @property
    def _is_unswept(self) -> bool:
        return bool(self._gone or self._sweeping)

    def _set_arrays(self, arrays: FlatArrays) -> None:
        self.arrays = arrays
        self._scratch = scratch(arrays.rows)

    def _pod_set(self, pods: frozenset[str]) -> _PodSet:
        known = self._pod_sets.get(pods)
        if known is None or known.version != self._version:
            rows = {pod: row for row, pod in enumerate(pods)}
            numbers = np.fromiter((self._numbers.get(pod, -1) for pod in rows), np.int64, len(rows))
            strides = np.fromiter((self._strides.get(pod, 1) for pod in rows), np.int32, len(rows))
            drops = np.where([pod in self._dropping for pod in rows], strides, 0).astype(np.int32)
            if not (strides > 1).any() and not drops.any():
                strides, drops = strides[:0], drops[:0]
            known = _PodSet(self._version, rows, numbers, strides, drops)
            if len(self._pod_sets) >= _POD_SETS_MAX:
                self._pod_sets.clear()
            self._pod_sets[pods] = known
        return known

    def _sweep_turn(self) -> None:
        """Sweep one part of the slots. After the last part, free the numbers of the pods that were swept."""
        if not self._sweeping:
            self._sweeping, self._gone, self._swept = self._gone, [], 0
        sweep(self.arrays, self._swept, self._swept + SWEEP_SLOTS)
        self._swept += SWEEP_SLOTS
        if self._swept >= self.arrays.counters[layout.SLOTS_USED]:
            self.arrays.gone[self._sweeping] = 0
            self.arrays.pod_blocks[self._sweeping] = 0
            self._free_numbers += self._sweeping
            self._sweeping = []


def _allocate(capacity_blocks: int, capacity_bytes: int, tiers: int, removed_hashes: int) -> FlatArrays:
    """Reserve arrays for this many blocks; pages take memory when they are first used."""
    slots = reserved((capacity_blocks, 8), np.uint32)
    counters = np.zeros(layout.COUNTERS, np.int64)
    lists = layout.NEWEST, layout.OLDEST, layout.FREE, layout.ROW_FREE, layout.ALIAS_FREE, layout.EXTRA_FREE
    counters[list(lists)] = layout.NO_SLOT
    counters[layout.CAPACITY] = capacity_blocks
    counters[layout.BYTES_MAX] = capacity_bytes
    sets = max(1, removed_hashes // layout.REMOVED_WAYS)
    # The byte limit holds before each run (see `ensure_room`), and a run adds at most RUN_MAX entries.
    aliases = capacity_bytes // layout.ALIAS_BYTES + layout.RUN_MAX
    extra_copies = capacity_bytes // layout.EXTRA_BYTES + layout.RUN_MAX
    return FlatArrays(
        slots=slots,
        keys=slots.view(np.uint64),
        buckets=empty_table(capacity_blocks),
        rows=_empty_rows(capacity_blocks, capacity_bytes, tiers, 1),
        hashes=reserved((capacity_blocks,), np.uint64),
        first_alias=reserved((capacity_blocks,), np.uint32),
        hash_buckets=empty_table(capacity_blocks + aliases),
        aliases=reserved((aliases, 2), np.uint64),
        extra_copies=reserved((extra_copies, 2), np.uint64),
        extra_copy_buckets=empty_table(extra_copies),
        removed=reserved((sets, 2, layout.REMOVED_WAYS), np.uint64),
        lost=reserved((layout.LOST_KEYS, 2), np.uint64),
        pod_blocks=reserved((layout.PODS_MAX + 1,), np.int64),
        gone=reserved((layout.PODS_MAX + 1,), np.int64),
        epochs=reserved((layout.PODS_MAX + 1,), np.uint64),
        counters=counters,
    )


def _empty_rows(capacity_blocks: int, capacity_bytes: int, tiers: int, words: int) -> NDArray[np.uint64]:
    """Reserve bitsets of `words` words per tier, as many as fit into the byte limit."""
    rows = min(capacity_blocks, capacity_bytes // (layout.BLOCK_BYTES + words * 8) + layout.RUN_MAX)
    return reserved((tiers, rows, words), np.uint64)


def _for_pods(arrays: FlatArrays, pods: int) -> FlatArrays:
    """Return arrays whose rows have a bit for each pod; copies all rows if they must become longer."""
    tiers, _, words = arrays.rows.shape
    if pods <= words * 64:
        return arrays
    counters = arrays.counters
    rows = _empty_rows(int(counters[layout.CAPACITY]), int(counters[layout.BYTES_MAX]), tiers, 2 * words)
    used, tiers_used = int(counters[layout.ROWS_USED]), int(counters[layout.TIERS_USED])
    rows[:tiers_used, :used, :words] = arrays.rows[:tiers_used, :used]
    return arrays._replace(rows=rows)
