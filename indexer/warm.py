"""Compiles the indexer's kernels, or loads them, before the first request or event comes.

From an empty cache this takes a minute or two, from a filled one about a second; see `kernel_cache` for where
it lies.
"""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np

from indexer.config import IndexerConfig, PodStream
from indexer.flat_applier import FlatApplier, FlatEngine
from indexer.flat_index import FlatIndex
from indexer.hybrid import HybridMatcher
from indexer.keys import BlockHasher
from indexer.tiers import SPECULATIVE_TIER, Tiers

_PODS = tuple(f"warm-{number}" for number in range(6))
_BYTES = 1 << 20


@cache
def warm_kernels() -> None:
    """Calls every kernel once, on an index of its own."""
    config = IndexerConfig(block_tokens=1, hash_seed=0, max_payload_bytes=_BYTES)
    hasher = BlockHasher(1, 0)
    index = FlatIndex(_BYTES, Tiers())
    engine = FlatEngine(config, index, hasher)
    for pod in _PODS:
        state = FlatApplier(engine, PodStream(pod, "warm", "tcp://127.0.0.1:1", None))
        state.apply([_batch(_store([1, 2], None), _store([3], 2))])
        state.apply([_batch(_store([4], 3), _store([], None), _removal(4), _removal(9))])
    # Tokens that may be written to, and ones that may not, are different types.
    hasher.chain(0, np.frombuffer(bytes(4), np.uint32))
    keys = hasher.chain(hasher.root("warm"), [1, 2, 3])
    index.add(_PODS[0], SPECULATIVE_TIER, keys)
    index.learn_stride(_PODS[0], 2)
    index.match(keys, frozenset(_PODS))
    index.held(keys, _PODS[0])
    HybridMatcher(index, 1)
    index.remove(_PODS[0], SPECULATIVE_TIER, keys)
    copied = FlatApplier(engine, PodStream("warm-copy", "warm", "tcp://127.0.0.1:1", None)).view
    for part in state.view.parts():
        if part is not None:
            copied.restore(part)
    # More than fits into what is there at first: arrays and tables are made anew.
    index.add(_PODS[0], "cpu", np.arange(2048, dtype=np.uint64))
    index.add(_PODS[0], "cpu", np.arange(2048, dtype=np.uint64))
    index.clear_pod(_PODS[1])
    index.tier_blocks(_PODS[0], "cpu")
    index.stats()


def _batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, None])


def _store(tokens: list[int], parent: int | None) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": tokens or [1],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 1 if tokens else 0,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _removal(engine_hash: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [engine_hash], "medium": "GPU"}
