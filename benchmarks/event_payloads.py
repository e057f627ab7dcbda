"""Event payloads in vLLM's format, and the indexer's path from their bytes to the index."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig, PodStream
from indexer.index.index import FlatIndex
from indexer.streams.ingest import Ingest

MODEL = "bench"
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 1024
_VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of the events.

    Attributes:
        blocks_per_event: 32 for a chunk of prefill, 1 for a decoding sequence.
        events_per_payload: Number of sequences in a batch; each engine step publishes one payload.
        layout: "map" as in vLLM 0.32, "array" as in 0.16-0.23.
        lora_name: Adapter of all events.
    """

    blocks_per_event: int
    events_per_payload: int = 16
    layout: Literal["map", "array"] = "map"
    lora_name: str | None = None

    def told(self) -> dict[str, object]:
        """Return this shape as a figure's setting."""
        return {
            "blocks_per_event": self.blocks_per_event,
            "events_per_payload": self.events_per_payload,
            "layout": self.layout,
            "lora": self.lora_name is not None,
            "block_tokens": BLOCK_TOKENS,
        }


@dataclass(frozen=True, slots=True)
class Payloads:
    """Payloads that store prompts, and payloads that remove their blocks, tails first as engines evict."""

    stores: Sequence[bytes]
    removals: Sequence[bytes]
    blocks: int


def make_payloads(shape: Shape, blocks: int, seed: int = 0) -> Payloads:
    """Make payloads for prompts of 1,024 blocks, or one of fewer, in groups of a payload's events."""
    rng = np.random.default_rng(seed)
    length = min(PROMPT_BLOCKS, max(shape.blocks_per_event, blocks // shape.events_per_payload))
    steps = length // shape.blocks_per_event
    per_group = steps * shape.blocks_per_event * shape.events_per_payload
    groups = max(1, blocks // per_group)
    stores: list[bytes] = []
    removals: list[bytes] = []
    for _ in range(groups):
        prompts = [_runs(shape, steps, rng) for _ in range(shape.events_per_payload)]
        stores += [_batch([prompt[step] for prompt in prompts], shape) for step in range(steps)]
        removals += [
            _batch([_removal(prompt[step]) for prompt in prompts], shape) for step in reversed(range(steps))
        ]
    return Payloads(stores, removals, groups * per_group)


def ingest(index: FlatIndex, pods: Sequence[str]) -> Ingest:
    """Return the subscriber's handler with these pods followed."""
    config = IndexerConfig(block_tokens=BLOCK_TOKENS, hash_seed=7, engine_hashes_per_pod=1 << 30)
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731 (twice the same)
    sink = Ingest(config, CollectorRegistry(), ignore, ignore, time.monotonic, index=index)
    for pod in pods:
        sink.opened(PodStream(pod, MODEL, "tcp://127.0.0.1:1"))
    return sink


def in_calls(payloads: Sequence[bytes], per_call: int) -> Iterator[Sequence[bytes]]:
    """Yield groups of payloads of the subscriber's read size."""
    for start in range(0, len(payloads), per_call):
        yield payloads[start : start + per_call]


def _runs(shape: Shape, steps: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    size = shape.blocks_per_event
    hashes = rng.integers(1, 2**64, steps * size, np.uint64).tolist()
    tokens = rng.integers(0, _VOCABULARY, steps * size * BLOCK_TOKENS, np.uint32).tolist()
    return [
        {
            "type": "BlockStored",
            "block_hashes": hashes[step * size : (step + 1) * size],
            "parent_block_hash": hashes[step * size - 1] if step else None,
            "token_ids": tokens[step * size * BLOCK_TOKENS : (step + 1) * size * BLOCK_TOKENS],
            "block_size": BLOCK_TOKENS,
            "lora_id": 1 if shape.lora_name else None,
            "medium": "GPU",
            "lora_name": shape.lora_name,
            "extra_keys": [[shape.lora_name] if shape.lora_name else None] * size,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        for step in range(steps)
    ]


def _removal(store: dict[str, Any]) -> dict[str, Any]:
    hashes = store["block_hashes"][::-1]
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def _batch(events: Sequence[dict[str, Any]], shape: Shape) -> bytes:
    ts = time.time()
    if shape.layout == "map":
        return msgspec.msgpack.encode([ts, events, None])
    return msgspec.msgpack.encode([ts, [list(event.values()) for event in events], None])
