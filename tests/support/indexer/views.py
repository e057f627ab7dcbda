"""Kit of the indexer's tests: test data, and a pod view with its index."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

from indexer.config import IndexerConfig
from indexer.index.contract import PodMatch
from indexer.index.index import FlatIndex
from indexer.keys import BlockHasher, Keys
from indexer.views.block_cache import BlockCache
from indexer.views.hybrid import HybridMatcher, group_holder
from indexer.views.pod_view import PodView
from indexer.views.view_parts import Outcome
from indexer.wire.events import BlockStored, KVEvent
from indexer.wire.tiers import Tiers
from tests.support.indexer.decoding import EventBatch
from tests.support.indexer.plain_view import MappedCache, apply_batch
from tests.support.indexer.reference_index import ReferenceIndex
from tests.support.paths import DATA

POD = "10.0.0.1:8000"
MODEL = "m"
_FLAT_BYTES, _FLAT_BLOCKS = 8 << 20, 20_000


def read_json(name: str) -> Any:
    """Read a gzipped JSON file of tests/data."""
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def read_lines(name: str) -> list[dict[str, Any]]:
    """Read a gzipped file of JSON lines of tests/data."""
    return [json.loads(line) for line in gzip.decompress((DATA / name).read_bytes()).splitlines()]


class OnePod:
    """Pod view with its index, and queries on it.

    Args:
        block_tokens: Tokens of an index block.
        flat: Whether to use the flat index; else the reference.
        settings: Settings of the indexer.
    """

    def __init__(self, block_tokens: int = 4, *, flat: bool = False, **settings: Any) -> None:
        config = IndexerConfig(block_tokens=block_tokens, hash_seed=1, **settings)
        tiers = Tiers(config.tier_weights)
        flat_index = FlatIndex(_FLAT_BYTES, tiers, capacity_blocks=_FLAT_BLOCKS) if flat else None
        self.index: Any = flat_index or ReferenceIndex(config.capacity_blocks, tiers)
        self.hasher = BlockHasher(block_tokens, 1)
        self.hybrid = HybridMatcher(self.index, self.hasher)

        def cache_of(group: int | None) -> Any:
            holder = POD if group is None else group_holder(POD, group)
            if flat_index is not None:
                return BlockCache(flat_index, holder, MODEL)
            return MappedCache(self.index, holder)

        self.view = PodView(MODEL, cache_of=cache_of, tiers=tiers, hasher=self.hasher, config=config)

    def apply(self, *events: KVEvent) -> Outcome:
        """Apply events as one batch."""
        outcome = apply_batch(self.view, EventBatch(0.0, events))
        self.hybrid.set_groups(POD, self.view.groups, is_paired=self.view.is_paired)
        return outcome

    def keys(
        self,
        tokens: list[int],
        lora: str | None = None,
        salt: str | None = None,
        extras: Sequence[bytes] = (),
    ) -> Keys:
        """Return the keys of a prompt."""
        return self.hasher.chain(self.hasher.root(MODEL, lora, salt), tokens, extras)

    def match(
        self, keys: Keys, prompt_tokens: int | None = None, tokens: list[int] | None = None
    ) -> PodMatch:
        """Return the match of a prompt."""
        return self.hybrid.refine(keys, self.index.match(keys, [POD]), prompt_tokens, tokens)[POD]

    def tiers(self, tokens: list[int], lora: str | None = None, salt: str | None = None) -> dict[str, int]:
        """Return the cached blocks of a prompt by tier."""
        return dict(self.match(self.keys(tokens, lora, salt)).blocks_by_tier)

    def cached(self, tokens: list[int], lora: str | None = None, salt: str | None = None) -> int:
        """Return the number of cached blocks of a prompt."""
        return sum(self.tiers(tokens, lora, salt).values())


def stored(
    hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, **fields: Any
) -> BlockStored:
    """Return a store of blocks of 4 tokens."""
    return BlockStored(hashes, parent, tokens, fields.pop("block_size", 4), **fields)
