"""Encoding of KV events, compared with batches encoded by vLLM 0.32.0."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest

from model_server.kv_events.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    encode_batch,
)
from tests.support.paths import DATA

VECTORS = DATA / "vllm_0_32_event_vectors.jsonl"
KINDS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}


def vectors() -> list[Any]:
    """Return the captured batches: name, bytes in hex, and content."""
    lines = [json.loads(line) for line in VECTORS.read_text().splitlines()]
    return [pytest.param(bytes.fromhex(line["hex"]), line["generic"], id=line["name"]) for line in lines]


def plain(value: Any) -> Any:
    """Decode the vectors' JSON notation of bytes."""
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["$bytes"]) if "$bytes" in value else {k: plain(v) for k, v in value.items()}
        )
    return [plain(item) for item in value] if isinstance(value, list) else value


def event(fields: dict[str, Any]) -> KVEvent:
    """Return the event struct of a vector."""
    kind = KINDS[fields["type"]]
    return kind(**{name: value for name, value in fields.items() if name != "type"})


@pytest.mark.parametrize(("wire", "generic"), vectors())
def test_batches_are_encoded_byte_for_byte_as_vllm_does(wire: bytes, generic: list[Any]) -> None:
    """The same events encode to the same bytes as in vLLM 0.32.0, whatever fields are set."""
    ts, events, rank = plain(generic)
    assert encode_batch(KVEventBatch(ts, [event(fields) for fields in events], rank)) == wire


def test_required_fields_are_on_the_wire_even_when_empty() -> None:
    """A stored event without adapter, parent or options encodes exactly vLLM's seven fields and its type."""
    stored = BlockStored([1], None, [5, 6], 2, None, "GPU", None)
    _, [fields], rank = msgpack.unpackb(encode_batch(KVEventBatch(1.0, [stored])))
    assert fields == {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert rank == 0
