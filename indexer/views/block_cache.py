"""Blocks of one pod by engine hash, on top of the flat index, see `indexer.index.engine_hashes`.

Engine hashes are scoped: mixed with the model and, if an engine block has several index blocks, with the
place of the index block in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.engine_hashes import ALIASES_MAX, add_hash, keys_by_hash, scope_hashes
from indexer.index.holders import add_holder, count_extra_copies, held_tiers
from indexer.index.index import SWEEP_SLOTS, FlatIndex
from indexer.index.layout import LOW, NOTHING, PART_BLOCKS, FlatArrays, HeldBlocks
from indexer.index.update import place_blocks, remove_by_hash
from indexer.keys import Keys, utf8
from indexer.views.view_parts import Change, ChangeLog, Kind, words
from indexer.wire.columns import hash_to_uint64
from indexer.wire.events import EngineHash
from indexer.wire.tiers import TIERS_MAX

_SPLITS_MAX = 16
_HASHES_MAX = 1 + ALIASES_MAX
# Places in the counts of `_list_blocks`.
_BLOCKS, _HASHES, _COPIES = range(3)


class Dropped(StrEnum):
    """Effect of removing one copy of a block: the last in its tier, or one of several."""

    LAST = "last"
    COPY = "copy"


@dataclass(eq=False)
class BlockCache:
    """Blocks of one pod epoch in one KV cache group, by the engine's hashes.

    Adds and removes references in the index. Hashes of different pods, models, groups and epochs are
    independent of one another.
    """

    index: FlatIndex
    holder: str
    model: InitVar[str]
    group: int | None = None
    change_log: ChangeLog = field(default_factory=ChangeLog)  # where changes are recorded

    def __post_init__(self, model: str) -> None:
        # Scope of the engine's hashes.
        self.scope = xxh3_64_intdigest(utf8(model))
        # Index blocks per engine block, as seen so far: one number, as an engine has one block size.
        # It is 1 in groups other than the lead group.
        self._splits: tuple[int, ...] = () if self.group is None else (1,)

    def add_split(self, split: int) -> None:
        """Record that engine blocks may have `split` index blocks."""
        if split not in self._splits:
            self._splits = (split, *self._splits)[:_SPLITS_MAX]

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> int:
        """Add one copy of each block; the index evicts other blocks as needed.

        Args:
            hashes: Hashes of consecutive engine blocks.
            keys: Keys of their index blocks, the same number for each hash.

        Returns:
            How many hashes stood for other blocks before; those blocks are removed.
        """
        split = len(keys) // len(hashes)
        self.add_split(split)
        reused = self._store(self._scoped(hashes, split), keys, self.index.tiers.number(tier))
        return -(-reused // split)

    def _store(self, scoped: NDArray[np.uint64], keys: Keys, tier: int) -> int:
        reused = self.index.store(self.holder, tier, keys, scoped)
        self.record(Kind.STORED, tier, scoped, keys)
        return reused

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """Add one copy of a block that was stored before; return False if it is unknown."""
        number = self.index.tiers.number(tier)
        return any(self._copy(self._scoped((engine_hash,), split), number) for split in self._splits)

    def _copy(self, scoped: NDArray[np.uint64], tier: int) -> bool:
        if not len(keys := self._keys(scoped)):
            return False
        self.index.store(self.holder, tier, keys, scoped)
        self.record(Kind.COPIED, tier, scoped)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """Remove one copy of a block; return None if the pod holds none in this tier."""
        number = self.index.tiers.number(tier)
        for split in self._splits:
            if (outcome := self._drop(self._scoped((engine_hash,), split), number)) >= 0:
                return Dropped.LAST if outcome > 0 else Dropped.COPY
        return None

    def _drop(self, scoped: NDArray[np.uint64], tier: int) -> int:
        with self.index.lock:
            pod = self.index.number(self.holder)
            outcome: int = remove_by_hash(self.index.arrays, pod, tier, scoped)
        if outcome >= 0:
            self.record(Kind.REMOVED, tier, scoped)
        return outcome

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """Return whether each hash stands for its keys and has a copy in this tier."""
        known = self._keys(self._scoped(hashes, len(keys) // len(hashes)))
        bit = np.uint8(1 << self.index.tiers.number(tier))
        return np.array_equal(known, keys) and bool((self.index.held(keys, self.holder) & bit).all())

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """Return the key of the block's last index block, or None if the block is unknown."""
        for split in self._splits:
            if len(keys := self._keys(self._scoped((engine_hash,), split)[-1:])):
                return int(keys[0])
        return None

    def _keys(self, scoped: NDArray[np.uint64]) -> Keys:
        """Return the keys of blocks by scoped hashes, removed ones included; empty if one is unknown."""
        keys = np.empty(len(scoped), np.uint64)
        with self.index.lock:
            pod = self.index.number(self.holder)
            return keys if keys_by_hash(self.index.arrays, pod, scoped, keys) else keys[:0]

    def clear(self) -> None:
        """Start a new epoch: remove all blocks, also from the index."""
        self.index.clear_pod(self.holder)
        self.change_log.add(self.group, Kind.CLEARED)

    def apply_change(self, change: Change) -> Keys:
        """Apply a change that another router recorded; return the keys of what it stored."""
        scoped, keys = words(change.names), words(change.keys)
        match change.kind:
            case Kind.STORED:
                self._store(scoped, keys, change.tier)
            case Kind.COPIED:
                # One by one, because a full index may have evicted some of them.
                for place in range(len(scoped)):
                    self._copy(scoped[place : place + 1], change.tier)
            case Kind.REMOVED:
                self._drop(scoped, change.tier)
            case Kind.CLEARED:
                raise ValueError("a group is cleared with its view")
        return keys

    def scoped(self, handles: NDArray[np.uint64], split: int) -> NDArray[np.uint64]:
        """Return the scoped hashes of the index blocks of engine blocks with `split` index blocks each."""
        scoped = np.empty(len(handles) * split, np.uint64)
        scope_hashes(handles, np.uint64(self.scope), split, scoped)
        return scoped

    def record(self, kind: Kind, tier: int, scoped: NDArray[np.uint64], keys: Keys | None = None) -> None:
        """Record in the change_log a change that was made directly in the index."""
        self.change_log.add(self.group, kind, tier, scoped, keys)

    def export(self) -> Iterator[HeldBlocks | None]:
        """List all blocks in parts; see `PodView.parts`."""
        index, start, used, counts = self.index, 0, 1, np.zeros(3, np.int64)
        left_out = index.tiers.speculative
        room = HeldBlocks(
            keys=np.empty(PART_BLOCKS, np.uint64),
            tiers=np.empty(PART_BLOCKS, np.uint8),
            hash_counts=np.empty(PART_BLOCKS, np.uint8),
            hashes=np.empty(PART_BLOCKS + _HASHES_MAX, np.uint64),
            copies=np.empty((PART_BLOCKS + TIERS_MAX, 3), np.int64),
        )
        while start < used:
            with index.lock:
                pod = index.number(self.holder)  # before using the arrays, which it may replace
                used = int(index.arrays.counters[layout.SLOTS_USED])
                start = _list_blocks(index.arrays, pod, left_out, start, start + SWEEP_SLOTS, room, counts)
            blocks, scoped, copies = map(int, counts)
            part = HeldBlocks(
                keys=room.keys[:blocks].copy(),
                tiers=room.tiers[:blocks].copy(),
                hash_counts=room.hash_counts[:blocks].copy(),
                hashes=room.hashes[:scoped].copy(),
                copies=room.copies[:copies].copy(),
            )
            yield part if blocks else None

    def restore(self, part: HeldBlocks) -> None:
        """Add a part that another cache exported. This epoch has stored nothing itself."""
        index = self.index
        # One call can add at most the capacity.
        kept = min(len(part.keys), int(index.arrays.counters[layout.CAPACITY]))
        held = HeldBlocks(
            keys=part.keys[:kept],
            tiers=part.tiers[:kept],
            hash_counts=part.hash_counts[:kept],
            hashes=part.hashes[: int(part.hash_counts[:kept].sum())],
            copies=part.copies[part.copies[:, 0] < kept],
        )
        with index.lock:
            pod = index.number(self.holder)
            # Blocks that the pod already holds gain an extra copy in each tier.
            most = max(len(held.hashes), len(held.copies) + kept * len(index.tiers.names))
            _restore_blocks(index.prepare(most), pod, held, np.empty(kept, np.int64))

    def _scoped(self, hashes: Sequence[EngineHash], split: int) -> NDArray[np.uint64]:
        return self.scoped(
            np.array([hash_to_uint64(engine_hash) for engine_hash in hashes], np.uint64), split
        )


def copies_in(held: HeldBlocks, tier: int) -> NDArray[np.uint64]:
    """Return a name of each copy in a tier, little-endian."""
    counts = (held.tiers >> np.uint8(tier) & np.uint8(1)).astype(np.int64) * (held.hash_counts > 0)
    extra = held.copies[held.copies[:, 1] == tier]
    counts[extra[:, 0]] += extra[:, 2]
    firsts = np.cumsum(held.hash_counts, dtype=np.int64) - held.hash_counts
    return np.repeat(held.hashes[firsts[counts > 0]], counts[counts > 0]).astype("<u8")


@kernel
def _list_blocks(
    arrays: FlatArrays,
    pod: int,
    left_out: int,
    start: int,
    stop: int,
    found: HeldBlocks,
    counts: NDArray[np.int64],
) -> int:
    """Write the blocks that a pod holds in these slots, until `found` is full; return the next slot.

    The tier `left_out` is ignored. `counts` receives the numbers of blocks, hashes and extra copies.
    """
    counts[:] = 0
    end: int = min(stop, arrays.counters[layout.SLOTS_USED])
    for slot in range(start, end):
        if arrays.slots[slot, layout.PREVIOUS] == np.uint32(layout.FREE_SLOT):
            continue
        tiers = held_tiers(arrays, slot, pod) & ~(1 << left_out)
        if tiers == 0:
            continue
        if (
            counts[_BLOCKS] == len(found.keys)
            or counts[_HASHES] + _HASHES_MAX > len(found.hashes)
            or counts[_COPIES] + TIERS_MAX > len(found.copies)
        ):
            return slot
        _list_slot(arrays, slot, pod, tiers, found, counts)
    return end


@inlined
def _list_slot(
    arrays: FlatArrays, slot: int, pod: int, tiers: int, found: HeldBlocks, counts: NDArray[np.int64]
) -> None:
    place = counts[_BLOCKS]
    found.keys[place] = arrays.keys[slot, 0]
    found.tiers[place] = np.uint8(tiers)
    first = counts[_HASHES]
    place_of_hash = first
    if arrays.hashes[slot] != NOTHING:
        found.hashes[place_of_hash] = arrays.hashes[slot]
        place_of_hash += 1
        alias = np.int64(arrays.first_alias[slot])
        while alias != layout.NO_SLOT:
            found.hashes[place_of_hash] = arrays.aliases[alias, 0]
            place_of_hash += 1
            alias = np.int64(arrays.aliases[alias, 1] & LOW)
    found.hash_counts[place] = np.uint8(place_of_hash - first)
    for tier in range(arrays.counters[layout.TIERS_USED]):
        extra = count_extra_copies(arrays, slot, pod, tier) if (tiers >> tier) & 1 else 0
        if extra > 0:
            copy = counts[_COPIES]
            found.copies[copy, 0] = place
            found.copies[copy, 1] = tier
            found.copies[copy, 2] = extra
            counts[_COPIES] = copy + 1
    counts[_HASHES] = place_of_hash
    counts[_BLOCKS] = place + 1


@kernel
def _restore_blocks(arrays: FlatArrays, pod: int, held: HeldBlocks, chain: NDArray[np.int64]) -> None:
    """Add blocks that `_list_blocks` read from another index. The caller ensures room."""
    place_blocks(arrays, held.keys, chain)
    place_of_hash = 0
    for place in range(len(held.keys)):
        slot = chain[place]
        for tier in range(arrays.rows.shape[0]):
            if (held.tiers[place] >> tier) & 1:
                add_holder(arrays, slot, pod, tier, 1)
        for _ in range(held.hash_counts[place]):
            add_hash(arrays, slot, held.hashes[place_of_hash])
            place_of_hash += 1
    for copy in range(len(held.copies)):
        add_holder(arrays, chain[held.copies[copy, 0]], pod, held.copies[copy, 1], held.copies[copy, 2])
