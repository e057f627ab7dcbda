"""Bytes of one published message to typed events.

Reads every layout from vLLM 0.16 to 0.32 (events as arrays or as maps) and SGLang's. A broken event is left
out and its reason told; the rest of its batch is kept. Nothing here knows pods, sequences or keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from indexer.errors import PayloadError
from indexer.events import (
    MAX_EVENTS,
    MAX_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineHash,
    EngineHashes,
    EventBatch,
    ExtraKeys,
    KVEvent,
    TokenIds,
)

UNKNOWN_EVENT = "unknown_event"
BROKEN_EVENT = "broken_event"

_BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A batch and what had to be left out of it.

    Attributes:
        batch: All events that could be read, in order.
        rejected: A reason for each event that could not.
    """

    batch: EventBatch
    rejected: tuple[str, ...]


def decode_batch(payload: bytes, max_bytes: int) -> Decoded:
    """Reads one payload.

    Args:
        payload: msgpack of [ts, events, data_parallel_rank], rank optional, further elements ignored.
        max_bytes: A longer payload is refused unread.

    Raises:
        PayloadError: The payload is "oversize", or "broken_batch".
    """
    if len(payload) > max_bytes:
        raise PayloadError("oversize", f"payload has {len(payload)} bytes, more than {max_bytes}")
    try:
        frame = _frame_decoder.decode(payload)
    except _BROKEN as error:
        raise PayloadError("broken_batch", f"payload is no batch of events: {error}") from None
    events: list[KVEvent] = []
    rejected: list[str] = []
    for raw in frame.events:
        try:
            events.append(_decode_event(raw))
        except _BROKEN:
            rejected.append(_reason(raw))
    return Decoded(EventBatch(frame.ts, tuple(events), frame.data_parallel_rank), tuple(rejected))


class _Frame(Struct, array_like=True):
    ts: float
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


class _StoredArray(Struct, array_like=True, tag="BlockStored"):
    """Field order of vLLM 0.16-0.23; what follows in later layouts is not read."""

    block_hashes: EngineHashes
    parent_block_hash: EngineHash | None
    token_ids: TokenIds
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: EngineHashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_frame_decoder = msgspec.msgpack.Decoder(_Frame)
_map_decoder = msgspec.msgpack.Decoder(KVEvent)
_array_decoder = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_any_decoder = msgspec.msgpack.Decoder(Any)


def _decode_event(raw: Raw) -> KVEvent:
    if _is_map(memoryview(raw)[0]):
        event: KVEvent = _map_decoder.decode(raw)
        return event
    match _array_decoder.decode(raw):
        case _StoredArray() as stored:
            return BlockStored(*(getattr(stored, name) for name in _StoredArray.__struct_fields__))
        case _RemovedArray() as removed:
            return BlockRemoved(removed.block_hashes, removed.medium, removed.group_idx)
        case _:
            return AllBlocksCleared()


def _is_map(first_byte: int) -> bool:
    return first_byte & 0xF0 == 0x80 or first_byte in (0xDE, 0xDF)


def _reason(raw: Raw) -> str:
    """Tells a kind of event that we do not know from one that we know but cannot read."""
    try:
        event = _any_decoder.decode(raw)
    except _BROKEN:
        return BROKEN_EVENT
    if isinstance(event, dict):
        tag = event.get("type")
    else:
        tag = event[0] if isinstance(event, list) and event else None
    known = tag in ("BlockStored", "BlockRemoved", "AllBlocksCleared")
    return UNKNOWN_EVENT if isinstance(tag, str) and not known else BROKEN_EVENT
