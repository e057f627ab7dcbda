"""A pod's blocks by engine hash, on the flat index: one map of hashes for all pods, see `flat_names`.

See `pod_cache` for what comes in and goes out. Hashes become names: 64 bits, mixed with the model, and with
the place of an index block in a larger engine block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from indexer.events import EngineHash
from indexer.flat_index import TURN_BLOCKS, FlatIndex
from indexer.flat_names import holds_named, key_named
from indexer.flat_naming import name_hashes
from indexer.flat_update import remove_named, store_blocks
from indexer.keys import Keys
from indexer.pod_cache import Dropped

_LOW_64 = (1 << 64) - 1
_ONE_EACH = np.empty(0, np.int32)


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

    def _names(self, hashes: Sequence[EngineHash], split: int) -> NDArray[np.uint64]:
        handles = np.array([handle_of(engine_hash) for engine_hash in hashes], np.uint64)
        names = np.empty(len(hashes) * split, np.uint64)
        name_hashes(handles, np.uint64(self.scope), split, names)
        return names


def handle_of(engine_hash: EngineHash) -> int:
    """An engine's hash as an unsigned 64-bit number: a digest's last 8 bytes, as vLLM's own integer form."""
    if isinstance(engine_hash, bytes):
        return int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _LOW_64
