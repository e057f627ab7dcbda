"""Decoder of one published message into typed events.

Supports the layouts of vLLM 0.16 to 0.32 (events as arrays or as maps) and of SGLang. A malformed event is
skipped with a reason, and the rest of its batch is kept. Independent of pods, sequences and keys. `columns`
decodes many messages at once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import astuple

from indexer.errors import PayloadError
from indexer.wire.events import (
    MAX_EVENTS,
    MAX_TOKENS,
    AllBlocksCleared,
    BlockInactive,
    BlockRemoved,
    BlockStored,
    EngineHash,
    EngineHashes,
    ExtraKeys,
    GroupIdx,
    KVEvent,
    TokenIds,
    TokenPairs,
    WindowTokens,
)

UNKNOWN_EVENT = "unknown_event"
BROKEN_EVENT = "broken_event"
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

BROKEN = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for malformed input."""
_NO_TOKENS, NIL = Raw(b"\x90"), Raw(b"\xc0")


class Event(Struct, gc=False):
    """Event of any kind in map layout; token ids and extra keys are not decoded yet."""

    type: str
    block_hashes: EngineHashes
    parent_block_hash: EngineHash | None = None
    token_ids: Raw = _NO_TOKENS
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw = NIL
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: WindowTokens | None = None
    cache_salt: str | None = None


class _Metadata(Struct):
    cache_salt: str | None = None


class _StoredArray(Struct, array_like=True, tag="BlockStored", gc=False):
    """BlockStored in array layout, with the field order of vLLM 0.16-0.23; later fields are ignored."""

    block_hashes: EngineHashes
    parent_block_hash: EngineHash | None
    token_ids: Raw
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | _Metadata | None = None
    extra_keys: Raw = NIL
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: WindowTokens | None = None


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: EngineHashes
    medium: str | None = None
    group_idx: GroupIdx | None = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _InactiveArray(_RemovedArray, tag="BlockInactive", gc=False):
    pass


class _MapTag(Struct):
    type: str


class _ArrayTag(Struct, array_like=True):
    type: str


ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray | _InactiveArray


_Event = TypeVar("_Event")


class Batch(Struct, Generic[_Event], array_like=True):
    """Batch of events of one layout; elements behind the rank are ignored."""

    ts: float
    events: Annotated[list[_Event], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


MAP_BATCH = msgspec.msgpack.Decoder(Batch[Event])
ARRAY_BATCH = msgspec.msgpack.Decoder(Batch[ArrayEvent])
_raw_batch = msgspec.msgpack.Decoder(Batch[Raw])
_map_event = msgspec.msgpack.Decoder(KVEvent)
_map_of_pairs = msgspec.msgpack.Decoder(Event)
_array_event = msgspec.msgpack.Decoder(ArrayEvent)
_tokens = msgspec.msgpack.Decoder(TokenIds)
_pairs = msgspec.msgpack.Decoder(TokenPairs)
EXTRA_KEYS = msgspec.msgpack.Decoder(ExtraKeys | None)
_map_tag = msgspec.msgpack.Decoder(_MapTag)
_array_tag = msgspec.msgpack.Decoder(_ArrayTag)


def split_batch(payload: bytes, max_bytes: int) -> Batch[Raw]:
    """Split a payload into its undecoded events.

    Args:
        payload: msgpack of [ts, events, data_parallel_rank], rank optional, further elements ignored.

    Raises:
        PayloadError: The payload is larger than `max_bytes` ("oversize") or malformed ("broken_batch").
    """
    if len(payload) > max_bytes:
        raise PayloadError("oversize", f"payload has {len(payload)} bytes, more than {max_bytes}")
    try:
        return _raw_batch.decode(payload)
    except BROKEN as error:
        raise PayloadError("broken_batch", f"payload: expected a batch of events: {error}") from None


def decode_event(raw: bytes | Raw) -> KVEvent:
    """Decode one event.

    Raises:
        PayloadError: The event is of an unknown kind ("unknown_event") or malformed ("broken_event").
    """
    try:
        if _is_map(raw):
            return _decode_map(raw)
        return typed(from_array(_array_event.decode(raw)))
    except BROKEN as error:
        raise PayloadError(_reason(raw), str(error)) from None


def _decode_map(raw: bytes | Raw) -> KVEvent:
    try:
        event: KVEvent = _map_event.decode(raw)
        return event
    except msgspec.ValidationError as error:
        try:
            return typed(_map_of_pairs.decode(raw))
        except (msgspec.ValidationError, PayloadError):
            raise error from None


def typed(event: Event) -> KVEvent:
    """Return a typed event with all fields decoded.

    Raises:
        PayloadError: The event is of an unknown kind ("unknown_event") or malformed ("broken_event").
    """
    match event.type:
        case "BlockRemoved":
            return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
        case "BlockInactive":
            return BlockInactive(event.block_hashes, event.medium, event.group_idx)
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case "BlockStored":
            fields = {name: getattr(event, name) for name in Event.__struct_fields__ if name != "type"}
            try:
                fields["token_ids"], fields["next_tokens"] = _tokens_of(event)
                fields["extra_keys"] = EXTRA_KEYS.decode(event.extra_keys)
            except BROKEN as error:
                raise PayloadError(BROKEN_EVENT, str(error)) from None
            return BlockStored(**fields)
        case kind:
            raise PayloadError(UNKNOWN_EVENT, f"unknown kind of event: {kind[:100]!r}")


def _tokens_of(event: Event) -> tuple[TokenIds, TokenIds | None]:
    """Return a store's tokens, and the token behind each block if the engine reports pairs of tokens.

    With EAGLE, SGLang reports each token as the pair with its next one, and counts pairs in `block_size`.
    """
    try:
        return _tokens.decode(event.token_ids), None
    except msgspec.ValidationError:
        pairs = _pairs.decode(event.token_ids)
    if any(second != after for (_, second), (after, _) in pairwise(pairs)):
        raise msgspec.ValidationError("token_ids: a pair must begin with the second token of the last one")
    size = event.block_size or len(pairs)
    return [first for first, _ in pairs], [pair[1] for pair in pairs[size - 1 :: size]]


def from_array(event: ArrayEvent) -> Event:
    """Convert an event from array layout to map layout."""
    match event:
        case _StoredArray():
            hashes, parent, tokens, size, lora_id, medium, lora, extra, group, kind, window = astuple(event)
            salt = lora.cache_salt if isinstance(lora, _Metadata) else None
            name = None if isinstance(lora, _Metadata) else lora
            return Event(
                *("BlockStored", hashes, parent, tokens, size, lora_id, medium),
                *(name, extra, group, kind, window, salt),
            )
        case _RemovedArray():
            kind = str(event.__struct_config__.tag)
            return Event(kind, event.block_hashes, medium=event.medium, group_idx=event.group_idx)
        case _:
            return Event("AllBlocksCleared", [])


def _is_map(raw: bytes | Raw) -> bool:
    first = memoryview(raw)[:1].tobytes()
    return b"\x80" <= first <= b"\x8f" or first in (b"\xde", b"\xdf")


def _reason(raw: bytes | Raw) -> str:
    try:
        tag = (_map_tag if _is_map(raw) else _array_tag).decode(raw).type
    except BROKEN:
        return BROKEN_EVENT
    return BROKEN_EVENT if tag in KINDS else UNKNOWN_EVENT
