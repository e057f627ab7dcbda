"""What the indexer's tests share: test data, and a pod's view with an index behind it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from indexer.apply import Applied, PodView
from indexer.config import IndexerConfig
from indexer.events import BlockStored, EventBatch, KVEvent
from indexer.keys import BlockHasher
from indexer.reference_index import ReferenceIndex
from indexer.tiers import TierWeights

DATA = Path(__file__).parents[1] / "data"
POD = "10.0.0.1:8000"
MODEL = "m"


def read_json(name: str) -> Any:
    """A gzipped JSON file of tests/data."""
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


def read_lines(name: str) -> list[dict[str, Any]]:
    """A gzipped file of JSON lines of tests/data."""
    return [json.loads(line) for line in gzip.decompress((DATA / name).read_bytes()).splitlines()]


class OnePod:
    """A pod's view, its index, and questions to it."""

    def __init__(self, block_tokens: int = 4, **settings: Any) -> None:
        config = IndexerConfig(block_tokens=block_tokens, hash_seed=1, **settings)
        self.index = ReferenceIndex(config.capacity_blocks, TierWeights(config.tier_weights))
        self.hasher = BlockHasher(block_tokens, 1)
        self.view = PodView(POD, MODEL, index=self.index, hasher=self.hasher, config=config)

    def apply(self, *events: KVEvent) -> Applied:
        """Applies events as one batch."""
        return self.view.apply(EventBatch(0.0, events))

    def tiers(self, tokens: list[int], lora: str | None = None, salt: str | None = None) -> dict[str, int]:
        """How many blocks of the prompt are cached, by tier."""
        keys = self.hasher.chain(self.hasher.root(MODEL, lora, salt), tokens)
        return dict(self.index.match(keys, [POD])[POD].blocks_by_tier)

    def cached(self, tokens: list[int], lora: str | None = None, salt: str | None = None) -> int:
        """How many blocks of the prompt are cached."""
        return sum(self.tiers(tokens, lora, salt).values())


def stored(
    hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, **fields: Any
) -> BlockStored:
    """A store of blocks of 4 tokens."""
    return BlockStored(hashes, parent, tokens, fields.pop("block_size", 4), **fields)
