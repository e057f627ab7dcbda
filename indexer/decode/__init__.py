"""Bytes of one published message to typed events.

Reads every layout from vLLM 0.16 to 0.32 (events as arrays or as maps) and SGLang's. A broken event is left
out and its reason told; the rest of its batch is kept. Nothing here knows pods, sequences or keys. The fast
way, `parse`, leaves to `decode_event` what is not plain.
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
    GroupIdx,
    KVEvent,
    TokenIds,
    WindowTokens,
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
    raw_batch = split_batch(payload, max_bytes)
    events: list[KVEvent] = []
    rejected: list[str] = []
    for raw in raw_batch.events:
        try:
            events.append(decode_event(raw))
        except PayloadError as error:
            rejected.append(error.reason)
    batch = EventBatch(raw_batch.ts, tuple(events), raw_batch.data_parallel_rank)
    return Decoded(batch, tuple(rejected))


class RawBatch(Struct, array_like=True):
    """A batch whose events are still bytes; see `EventBatch`."""

    ts: float
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


def split_batch(payload: bytes, max_bytes: int) -> RawBatch:
    """Reads a payload as far as to where its events begin and end.

    Args:
        payload: See `decode_batch`.
        max_bytes: See `decode_batch`.

    Raises:
        PayloadError: The payload is "oversize", or "broken_batch".
    """
    if len(payload) > max_bytes:
        raise PayloadError("oversize", f"payload has {len(payload)} bytes, more than {max_bytes}")
    try:
        return _batch_decoder.decode(payload)
    except _BROKEN as error:
        raise PayloadError("broken_batch", f"payload is no batch of events: {error}") from None


def decode_event(raw: bytes | Raw) -> KVEvent:
    """Reads one event.

    Args:
        raw: Its msgpack, a map or an array.

    Raises:
        PayloadError: It is an "unknown_event", or a "broken_event".
    """
    try:
        if _is_map(raw):
            event: KVEvent = _map_decoder.decode(raw)
            return event
        return _of_array(_array_decoder.decode(raw))
    except _BROKEN as error:
        raise PayloadError(_reason(raw), str(error)) from None


class _Metadata(Struct):
    """What SGLang's last arrays, of July to September 2026, have where vLLM's have the adapter's name."""

    cache_salt: str | None = None


class _StoredArray(Struct, array_like=True, tag="BlockStored"):
    """Field order of vLLM 0.16-0.23; what follows in later layouts is not read."""

    block_hashes: EngineHashes
    parent_block_hash: EngineHash | None
    token_ids: TokenIds
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | _Metadata | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: WindowTokens | None = None


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: EngineHashes
    medium: str | None = None
    group_idx: GroupIdx | None = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_batch_decoder = msgspec.msgpack.Decoder(RawBatch)
_map_decoder = msgspec.msgpack.Decoder(KVEvent)
_array_decoder = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_any_decoder = msgspec.msgpack.Decoder(Any)


def _of_array(array: _StoredArray | _RemovedArray | _ClearedArray) -> KVEvent:
    match array:
        case _StoredArray(lora_name=_Metadata(cache_salt=salt)):
            fields = {name: getattr(array, name) for name in _StoredArray.__struct_fields__}
            return BlockStored(**fields | {"lora_name": None, "cache_salt": salt})
        case _StoredArray():
            return BlockStored(*(getattr(array, name) for name in _StoredArray.__struct_fields__))
        case _RemovedArray():
            return BlockRemoved(array.block_hashes, array.medium, array.group_idx)
        case _:
            return AllBlocksCleared()


def _is_map(raw: bytes | Raw) -> bool:
    first = memoryview(raw)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def _reason(raw: bytes | Raw) -> str:
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
