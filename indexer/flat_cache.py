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

from indexer.event_columns import handle_of
from indexer.events import EngineHash
from indexer.flat_export import (
    BLOCKS_LISTED,
    COPIES_LISTED,
    NAMES_LISTED,
    Listed,
    list_held,
    listed,
    take_held,
)
from indexer.flat_index import SWEEP_SLOTS, TURN_BLOCKS, FlatIndex
from indexer.flat_layout import CAPACITY, SLOTS_USED
from indexer.flat_names import holds_named, key_named, name_hashes
from indexer.flat_update import remove_named, store_blocks
from indexer.journal import Change, Journal, Kind
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER
from indexer.view_parts import PART_BLOCKS, CachePart, HeldBlocks, Splits


class Dropped(StrEnum):
    """What removing one copy of a block did."""

    LAST = "last"
    COPY = "copy"


class FlatCache:
    """Blocks of one pod life in one KV cache group, by the engine's hashes.

    Engine hashes and the block keys they stand for come in; references in the index are counted. Hashes of
    two pods, models, groups or lives never meet.

    Args:
        holder: The pod's name in the index.
        model: Names of different models never meet.
        group: The KV cache group; None for the lead group.

    Attributes:
        scope: What the engine's hashes are mixed with.
        journal: Where changes are recorded.
    """

    def __init__(
        self,
        index: FlatIndex,
        holder: str,
        model: str,
        group: int | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.scope = xxh3_64_intdigest(model.encode("utf-8", "surrogatepass"))
        self._index = index
        self._holder = holder
        self._group = group
        self.journal = journal or Journal()
        # Index blocks of one engine block; an engine has one block size, so this is one number.
        self._splits: list[int] = []

    def expect(self, split: int) -> None:
        """Engine blocks of so many index blocks may have been stored."""
        if split not in self._splits:
            self._splits.append(split)

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> int:
        """Counts one copy of each block. Nothing is given up for room: the index itself evicts.

        Args:
            hashes: Of consecutive engine blocks.
            keys: Their index blocks, the same number for each hash.
            tier: Where they lie.

        Returns:
            How many hashes stood for other blocks before; these are given up.
        """
        split = len(keys) // len(hashes)
        self.expect(split)
        names = self._names(hashes, split)
        number = self._index.tiers.number(tier)
        return -(-self._store(names, keys, number) // split)

    def _store(self, names: NDArray[np.uint64], keys: Keys, tier: int) -> int:
        """Count one copy of each block; return how many names stood for other blocks before."""
        reused = 0
        for end in range(len(keys), 0, -TURN_BLOCKS):
            start = max(0, end - TURN_BLOCKS)
            chain = np.empty(end - start, np.int64)
            with self._index.lock:
                pod = self._index.number(self._holder)
                arrays = self._index.prepare(end - start)
                reused += store_blocks(arrays, pod, tier, keys[start:end], names[start:end], chain)
        self.journal.add(self._group, Kind.STORED, tier, names, keys)
        return reused

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """Counts one copy more of a block that was stored before; False if it is not known (any more)."""
        number = self._index.tiers.number(tier)
        return any(self._copy(self._names((engine_hash,), split), number) for split in self._splits)

    def _copy(self, names: NDArray[np.uint64], tier: int) -> bool:
        """Count one copy more of all blocks of these names; False, and nothing done, if one is unknown."""
        key, chain = np.empty(1, np.uint64), np.empty(1, np.int64)
        with self._index.lock:
            pod = self._index.number(self._holder)
            if not all(key_named(self._index.arrays, name, pod, key) for name in names):
                return False
            for place in range(len(names)):
                key_named(self._index.arrays, names[place], pod, key)
                arrays = self._index.prepare(1)
                store_blocks(arrays, pod, tier, key, names[place : place + 1], chain)
        self.journal.add(self._group, Kind.COPIED, tier, names)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """Counts one copy less of a block; None if none is held in this tier."""
        number = self._index.tiers.number(tier)
        for split in self._splits:
            names = self._names((engine_hash,), split)
            with self._index.lock:
                pod = self._index.number(self._holder)
                outcomes = [remove_named(self._index.arrays, pod, number, name) for name in names]
            if max(outcomes) >= 0:
                self.journal.add(self._group, Kind.REMOVED, number, names)
                return Dropped.LAST if max(outcomes) > 0 else Dropped.COPY
        return None

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """Whether each hash stands for its keys and has a copy in this tier."""
        names = self._names(hashes, len(keys) // len(hashes))
        with self._index.lock:
            pod = self._index.number(self._holder)
            return holds_named(self._index.arrays, pod, self._index.tiers.number(tier), keys, names)

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """Key of the block's last index block; None if it is not known (any more)."""
        key = np.empty(1, np.uint64)
        for split in self._splits:
            name = self._names((engine_hash,), split)[-1]
            with self._index.lock:
                pod = self._index.number(self._holder)
                if key_named(self._index.arrays, name, pod, key):
                    return int(key[0])
        return None

    def clear(self) -> None:
        """Begins a new life: drops all, in the index too."""
        self._index.clear_pod(self._holder)
        self._splits.clear()
        self.journal.add(self._group, Kind.CLEARED)

    def change(self, change: Change) -> Keys:
        """Apply a change that another router recorded; return the keys of what it stored."""
        if self._group is not None:
            self.expect(1)
        names, keys = change.name_array, change.key_array
        match change.kind:
            case Kind.STORED:
                self._store(names, keys, change.tier)
            case Kind.COPIED:
                # A full index may have lost some of them.
                for place in range(len(names)):
                    self._copy(names[place : place + 1], change.tier)
            case Kind.REMOVED:
                with self._index.lock:
                    pod = self._index.number(self._holder)
                    for name in names:
                        remove_named(self._index.arrays, pod, change.tier, name)
            case Kind.CLEARED:
                raise ValueError("a group is cleared with its view")
        return keys

    def names_of(self, handles: NDArray[np.uint64], split: int) -> NDArray[np.uint64]:
        """Return the names of engine blocks of so many index blocks."""
        names = np.empty(len(handles) * split, np.uint64)
        name_hashes(handles, np.uint64(self.scope), split, names)
        return names

    def record(self, kind: Kind, tier: int, names: NDArray[np.uint64], keys: Keys | None = None) -> None:
        """Record a change that somebody else made to the index."""
        self.journal.add(self._group, kind, tier, names, keys)

    def export(self) -> Iterator[CachePart | None]:
        """List all that is held; see `ViewContent.parts`."""
        yield Splits(tuple(self._splits))
        index, found, start, used = self._index, listed(PART_BLOCKS), 0, 1
        left_out = index.tiers.number(SPECULATIVE_TIER)
        while start < used:
            with index.lock:
                pod = index.number(self._holder)  # first: a new number may replace the arrays
                used = int(index.arrays.counters[SLOTS_USED])
                start = list_held(index.arrays, pod, left_out, start, start + SWEEP_SLOTS, found)
            yield _copied(found) if found.counts[BLOCKS_LISTED] else None

    def restore(self, part: CachePart) -> None:
        """Adds a part that another cache listed, to a life in which nothing was stored."""
        match part:
            case Splits(splits):
                for split in splits:
                    self.expect(split)
            case HeldBlocks():
                self._restore_held(part)

    def _restore_held(self, part: HeldBlocks) -> None:
        index = self._index
        # What one call adds must fit.
        kept = min(len(part.keys), int(index.arrays.counters[CAPACITY]))
        names = part.names[: int(part.name_counts[:kept].sum())]
        copies = part.copies[part.copies[:, 0] < kept]
        chain = np.empty(kept, np.int64)
        with index.lock:
            pod = index.number(self._holder)
            # What the pod holds already gains a copy in each tier.
            arrays = index.prepare(max(len(names), len(copies) + kept * len(index.tiers.names)))
            take_held(
                arrays,
                pod,
                part.keys[:kept],
                part.tiers[:kept],
                part.name_counts[:kept],
                names,
                copies,
                chain,
            )

    def _names(self, hashes: Sequence[EngineHash], split: int) -> NDArray[np.uint64]:
        return self.names_of(np.array([handle_of(engine_hash) for engine_hash in hashes], np.uint64), split)


def _copied(found: Listed) -> HeldBlocks:
    """What was listed, in memory of its own."""
    blocks, names, copies = (
        int(found.counts[place]) for place in (BLOCKS_LISTED, NAMES_LISTED, COPIES_LISTED)
    )
    return HeldBlocks(
        keys=found.keys[:blocks].copy(),
        tiers=found.tiers[:blocks].copy(),
        name_counts=found.name_counts[:blocks].copy(),
        names=found.names[:names].copy(),
        copies=found.copies[:copies].copy(),
    )
