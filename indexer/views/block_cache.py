"""A pod's blocks by engine hash, on the flat index: one map of hashes for all pods, see `flat_names`.

Hashes become names: 64 bits, mixed with the model, and with
the place of an index block in a larger engine block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from common.jit import inlined, kernel
from indexer.index import layout
from indexer.index.engine_hashes import ALIASES_MAX, give_name, keys_named, name_blocks
from indexer.index.holders import count_further, held_tiers, hold
from indexer.index.index import SWEEP_SLOTS, FlatIndex
from indexer.index.layout import LOW, NOTHING, PART_BLOCKS, FlatArrays, HeldBlocks
from indexer.index.update import place_blocks, remove_named
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER, TIERS_MAX
from indexer.views.view_parts import Change, ChangeLog, Kind
from indexer.wire.columns import hash_to_uint64
from indexer.wire.events import EngineHash

_SPLITS_MAX = 16
_NAMES_MAX = 1 + ALIASES_MAX
# Places in what `_list_held` counts.
_BLOCKS, _NAMES, _COPIES = range(3)


class Dropped(StrEnum):
    """What removing one copy of a block did."""

    LAST = "last"
    COPY = "copy"


class FlatCache:
    """Blocks of one pod life in one KV cache group, by the engine's hashes.

    Engine hashes and the block keys they stand for come in; references in the index are counted. Hashes of
    two pods, models, groups or lives never meet.
    """

    def __init__(
        self,
        index: FlatIndex,
        holder: str,
        model: str,
        group: int | None = None,
        change_log: ChangeLog | None = None,
    ) -> None:
        # Number that the engine's hashes are mixed with.
        self.scope = xxh3_64_intdigest(model.encode("utf-8", "surrogatepass"))
        self._index = index
        self._holder = holder
        self._group = group
        self.change_log = change_log or ChangeLog()  # where changes are recorded
        # Index blocks of one engine block: an engine has one block size, so this is one number, 1 in groups
        # other than the lead.
        self._splits: tuple[int, ...] = () if group is None else (1,)

    def expect(self, split: int) -> None:
        """Engine blocks of so many index blocks may have been stored."""
        if split not in self._splits:
            self._splits = (split, *self._splits)[:_SPLITS_MAX]

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> int:
        """Counts one copy of each block. Nothing is given up for room: the index itself evicts.

        Args:
            hashes: Of consecutive engine blocks.
            keys: Their index blocks, the same number for each hash.

        Returns:
            How many hashes stood for other blocks before; these are given up.
        """
        split = len(keys) // len(hashes)
        self.expect(split)
        reused = self._store(self._names(hashes, split), keys, self._index.tiers.number(tier))
        return -(-reused // split)

    def _store(self, names: NDArray[np.uint64], keys: Keys, tier: int) -> int:
        reused = self._index.store(self._holder, tier, keys, names)
        self.record(Kind.STORED, tier, names, keys)
        return reused

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """Counts one copy more of a block that was stored before; False if it is not known (any more)."""
        number = self._index.tiers.number(tier)
        return any(self._copy(self._names((engine_hash,), split), number) for split in self._splits)

    def _copy(self, names: NDArray[np.uint64], tier: int) -> bool:
        if not len(keys := self._keys(names)):
            return False
        self._index.store(self._holder, tier, keys, names)
        self.record(Kind.COPIED, tier, names)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """Counts one copy less of a block; None if none is held in this tier."""
        number = self._index.tiers.number(tier)
        for split in self._splits:
            if (outcome := self._drop(self._names((engine_hash,), split), number)) >= 0:
                return Dropped.LAST if outcome > 0 else Dropped.COPY
        return None

    def _drop(self, names: NDArray[np.uint64], tier: int) -> int:
        with self._index.lock:
            pod = self._index.number(self._holder)
            outcome: int = remove_named(self._index.arrays, pod, tier, names)
        if outcome >= 0:
            self.record(Kind.REMOVED, tier, names)
        return outcome

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """Whether each hash stands for its keys and has a copy in this tier."""
        known = self._keys(self._names(hashes, len(keys) // len(hashes)))
        bit = np.uint8(1 << self._index.tiers.number(tier))
        return np.array_equal(known, keys) and bool((self._index.held(keys, self._holder) & bit).all())

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """Key of the block's last index block; None if it is not known (any more)."""
        for split in self._splits:
            if len(keys := self._keys(self._names((engine_hash,), split)[-1:])):
                return int(keys[0])
        return None

    def _keys(self, names: NDArray[np.uint64]) -> Keys:
        """Return the keys of the blocks that names mean, or lately meant; empty if one is unknown."""
        keys = np.empty(len(names), np.uint64)
        with self._index.lock:
            pod = self._index.number(self._holder)
            return keys if keys_named(self._index.arrays, pod, names, keys) else keys[:0]

    def clear(self) -> None:
        """Begins a new life: drops all, in the index too."""
        self._index.clear_pod(self._holder)
        self.change_log.add(self._group, Kind.CLEARED)

    def change(self, change: Change) -> Keys:
        """Apply a change that another router recorded; return the keys of what it stored."""
        names, keys = change.name_array, change.key_array
        match change.kind:
            case Kind.STORED:
                self._store(names, keys, change.tier)
            case Kind.COPIED:
                # A full index may have lost some of them.
                for place in range(len(names)):
                    self._copy(names[place : place + 1], change.tier)
            case Kind.REMOVED:
                self._drop(names, change.tier)
            case Kind.CLEARED:
                raise ValueError("a group is cleared with its view")
        return keys

    def names_of(self, handles: NDArray[np.uint64], split: int) -> NDArray[np.uint64]:
        """Return the names of engine blocks of so many index blocks."""
        names = np.empty(len(handles) * split, np.uint64)
        name_blocks(handles, np.uint64(self.scope), split, names)
        return names

    def record(self, kind: Kind, tier: int, names: NDArray[np.uint64], keys: Keys | None = None) -> None:
        """Record a change that somebody else made to the index."""
        self.change_log.add(self._group, kind, tier, names, keys)

    def export(self) -> Iterator[HeldBlocks | None]:
        """Lists all that is held; see `ViewContent.parts`."""
        index, start, used, counts = self._index, 0, 1, np.zeros(3, np.int64)
        left_out = index.tiers.number(SPECULATIVE_TIER)
        room = HeldBlocks(
            keys=np.empty(PART_BLOCKS, np.uint64),
            tiers=np.empty(PART_BLOCKS, np.uint8),
            name_counts=np.empty(PART_BLOCKS, np.uint8),
            names=np.empty(PART_BLOCKS + _NAMES_MAX, np.uint64),
            copies=np.empty((PART_BLOCKS + TIERS_MAX, 3), np.int64),
        )
        while start < used:
            with index.lock:
                pod = index.number(self._holder)  # first: a new number may replace the arrays
                used = int(index.arrays.counters[layout.SLOTS_USED])
                start = _list_held(index.arrays, pod, left_out, start, start + SWEEP_SLOTS, room, counts)
            blocks, names, copies = map(int, counts)
            part = HeldBlocks(
                keys=room.keys[:blocks].copy(),
                tiers=room.tiers[:blocks].copy(),
                name_counts=room.name_counts[:blocks].copy(),
                names=room.names[:names].copy(),
                copies=room.copies[:copies].copy(),
            )
            yield part if blocks else None

    def restore(self, part: HeldBlocks) -> None:
        """Adds a part that another cache listed, to a life in which nothing was stored."""
        index = self._index
        # What one call adds must fit.
        kept = min(len(part.keys), int(index.arrays.counters[layout.CAPACITY]))
        held = HeldBlocks(
            keys=part.keys[:kept],
            tiers=part.tiers[:kept],
            name_counts=part.name_counts[:kept],
            names=part.names[: int(part.name_counts[:kept].sum())],
            copies=part.copies[part.copies[:, 0] < kept],
        )
        with index.lock:
            pod = index.number(self._holder)
            # What the pod holds already gains a copy in each tier.
            most = max(len(held.names), len(held.copies) + kept * len(index.tiers.names))
            _take_held(index.prepare(most), pod, held, np.empty(kept, np.int64))

    def _names(self, hashes: Sequence[EngineHash], split: int) -> NDArray[np.uint64]:
        return self.names_of(
            np.array([hash_to_uint64(engine_hash) for engine_hash in hashes], np.uint64), split
        )


@kernel
def _list_held(
    arrays: FlatArrays,
    pod: int,
    left_out: int,
    start: int,
    stop: int,
    found: HeldBlocks,
    counts: NDArray[np.int64],
) -> int:
    """Writes what a pod holds in these slots, until there is no more room.

    Args:
        left_out: A tier that does not count.
        found: Overwritten.
        counts: int64 [3], written: blocks, names and further copies.

    Returns:
        The slot to go on with.
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
            or counts[_NAMES] + _NAMES_MAX > len(found.names)
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
    first = counts[_NAMES]
    name = first
    if arrays.names[slot] != NOTHING:
        found.names[name] = arrays.names[slot]
        name += 1
        alias = np.int64(arrays.first_alias[slot])
        while alias != layout.NO_SLOT:
            found.names[name] = arrays.aliases[alias, 0]
            name += 1
            alias = np.int64(arrays.aliases[alias, 1] & LOW)
    found.name_counts[place] = np.uint8(name - first)
    for tier in range(arrays.counters[layout.TIERS_USED]):
        further = count_further(arrays, slot, pod, tier) if (tiers >> tier) & 1 else 0
        if further > 0:
            copy = counts[_COPIES]
            found.copies[copy, 0] = place
            found.copies[copy, 1] = tier
            found.copies[copy, 2] = further
            counts[_COPIES] = copy + 1
    counts[_NAMES] = name
    counts[_BLOCKS] = place + 1


@kernel
def _take_held(arrays: FlatArrays, pod: int, held: HeldBlocks, chain: NDArray[np.int64]) -> None:
    """Adds what `_list_held` wrote of another index; there must be room for so many blocks and names.

    Args:
        chain: int64 [blocks], written.
    """
    place_blocks(arrays, held.keys, chain)
    name = 0
    for place in range(len(held.keys)):
        slot = chain[place]
        for tier in range(arrays.rows.shape[0]):
            if (held.tiers[place] >> tier) & 1:
                hold(arrays, slot, pod, tier, 1)
        for _ in range(held.name_counts[place]):
            give_name(arrays, slot, held.names[name])
            name += 1
    for copy in range(len(held.copies)):
        hold(arrays, chain[held.copies[copy, 0]], pod, held.copies[copy, 1], held.copies[copy, 2])
