"""A pod's blocks by engine hash, on the flat index: one map of hashes for all pods, see `flat_names`.

See `pod_cache` for what comes in and goes out. Hashes become names: 64 bits, mixed with the model, and with
the place of an index block in a larger engine block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from indexer.events import EngineHash
from indexer.flat_export import (
    BLOCKS_LISTED,
    COPIES_LISTED,
    NAMES_LISTED,
    Listed,
    list_held,
    listed,
    take_held,
    take_released,
)
from indexer.flat_index import SWEEP_SLOTS, TURN_BLOCKS, FlatIndex
from indexer.flat_layout import CAPACITY, SLOTS_USED
from indexer.flat_names import holds_named, key_named
from indexer.flat_naming import name_hashes
from indexer.flat_released import released_by
from indexer.flat_update import remove_named, store_blocks
from indexer.keys import Keys
from indexer.pod_cache import Dropped
from indexer.tiers import SPECULATIVE_TIER
from indexer.view_parts import PART_BLOCKS, CachePart, HeldBlocks, ReleasedNames, Splits

_LOW_64 = (1 << 64) - 1
# Sets of released names that are looked at in one turn.
_TURN_SETS = 2048


class FlatCache:
    """A `PodCache` on the flat index.

    Args:
        index: Where blocks and their names lie.
        holder: The pod's name in the index.
        model: Names of different models never meet.

    Attributes:
        scope: What the engine's hashes are mixed with.
    """

    def __init__(self, index: FlatIndex, holder: str, model: str) -> None:
        self.scope = xxh3_64_intdigest(model.encode("utf-8", "surrogatepass"))
        self._index = index
        self._holder = holder
        # Index blocks of one engine block; an engine has one block size, so this is one number.
        self._splits: list[int] = []

    def expect(self, split: int) -> None:
        """Engine blocks of so many index blocks may have been stored."""
        if split not in self._splits:
            self._splits.append(split)

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> tuple[int, int]:
        """See `PodCache.store`. Nothing is ever given up for room: the index itself evicts."""
        split = len(keys) // len(hashes)
        self.expect(split)
        names = self._names(hashes, split)
        number = self._index.tiers.number(tier)
        reused = 0
        for end in range(len(keys), 0, -TURN_BLOCKS):
            start = max(0, end - TURN_BLOCKS)
            chain = np.empty(end - start, np.int64)
            with self._index.lock:
                pod = self._index.number(self._holder)
                arrays = self._index.prepare(end - start)
                reused += store_blocks(arrays, pod, number, keys[start:end], names[start:end], chain)
        return -(-reused // split), 0

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        """See `PodCache.copy`."""
        number = self._index.tiers.number(tier)
        key, chain = np.empty(1, np.uint64), np.empty(1, np.int64)
        for split in self._splits:
            names = self._names((engine_hash,), split)
            with self._index.lock:
                pod = self._index.number(self._holder)
                if not all(key_named(self._index.arrays, name, pod, key) for name in names):
                    continue
                for place in range(split):
                    key_named(self._index.arrays, names[place], pod, key)
                    arrays = self._index.prepare(1)
                    store_blocks(arrays, pod, number, key, names[place : place + 1], chain)
                return True
        return False

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """See `PodCache.drop`."""
        number = self._index.tiers.number(tier)
        for split in self._splits:
            names = self._names((engine_hash,), split)
            with self._index.lock:
                pod = self._index.number(self._holder)
                outcomes = [remove_named(self._index.arrays, pod, number, name) for name in names]
            if max(outcomes) >= 0:
                return Dropped.LAST if max(outcomes) > 0 else Dropped.COPY
        return None

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """See `PodCache.holds_all`."""
        names = self._names(hashes, len(keys) // len(hashes))
        with self._index.lock:
            pod = self._index.number(self._holder)
            return holds_named(self._index.arrays, pod, self._index.tiers.number(tier), keys, names)

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """See `PodCache.tail_key`."""
        key = np.empty(1, np.uint64)
        for split in self._splits:
            name = self._names((engine_hash,), split)[-1]
            with self._index.lock:
                if key_named(self._index.arrays, name, self._index.number(self._holder), key):
                    return int(key[0])
        return None

    def clear(self) -> None:
        """See `PodCache.clear`."""
        self._index.clear_pod(self._holder)
        self._splits.clear()

    def export(self) -> Iterator[CachePart | None]:
        """See `PodCache.export`."""
        yield Splits(tuple(self._splits))
        index, found, start, used = self._index, listed(PART_BLOCKS), 0, 1
        left_out = index.tiers.number(SPECULATIVE_TIER)
        while start < used:
            with index.lock:
                used = int(index.arrays.counters[SLOTS_USED])
                start = list_held(
                    index.arrays, index.number(self._holder), left_out, start, start + SWEEP_SLOTS, found
                )
            yield _copied(found) if found.counts[BLOCKS_LISTED] else None
        for first in range(0, len(index.arrays.released), _TURN_SETS):
            with index.lock:
                life = int(index.arrays.lives[index.number(self._holder)])
                names, keys = released_by(index.arrays.released, first, first + _TURN_SETS, life)
            for at in range(0, len(names), PART_BLOCKS):
                end = at + PART_BLOCKS
                yield ReleasedNames(names[at:end].copy(), keys[at:end].copy())
            yield None

    def restore(self, part: CachePart) -> None:
        """See `PodCache.restore`."""
        match part:
            case Splits(splits):
                for split in splits:
                    self.expect(split)
            case HeldBlocks():
                self._restore_held(part)
            case ReleasedNames(names, keys):
                with self._index.lock:
                    take_released(self._index.arrays, self._index.number(self._holder), names, keys)
            case _:
                raise TypeError(f"{type(part).__name__} is no part of a flat index")

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
        handles = np.array([handle_of(engine_hash) for engine_hash in hashes], np.uint64)
        names = np.empty(len(hashes) * split, np.uint64)
        name_hashes(handles, np.uint64(self.scope), split, names)
        return names


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


def handle_of(engine_hash: EngineHash) -> int:
    """An engine's hash as an unsigned 64-bit number: a digest's last 8 bytes, as vLLM's own integer form."""
    if isinstance(engine_hash, bytes):
        return int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _LOW_64
