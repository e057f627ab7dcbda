"""Decoder of published batches into columns of numbers, which a kernel applies.

msgspec decodes a batch at once; a batch for which that fails is decoded event by event (see `decode`). Events
that do not fit the columns are available as typed events. Independent of pods, sequences and keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, TypeVar

import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from common.jit import inlined, kernel
from indexer.errors import PayloadError
from indexer.wire.decode import (
    ARRAY_BATCH,
    BROKEN,
    EXTRA_KEYS,
    KINDS,
    MAP_BATCH,
    NIL,
    Event,
    decode_event,
    from_array,
    split_batch,
    typed,
)
from indexer.wire.events import MAX_TOKENS, EngineHash, KVEvent

(
    KIND,  # see below
    HASH_START,  # start of its hashes in `hashes`
    HASH_COUNT,
    HAS_PARENT,  # 0 or 1
    PARENT,  # 64-bit form of the parent's hash; 0 without a parent
    TOKEN_START,  # start of its tokens in `tokens`
    TOKEN_COUNT,
    BLOCK_SIZE,  # tokens per block; 0 if missing
    HAS_LORA,  # 0 or 1
    MEDIUM,  # index in MEDIA; 0 if missing
    GROUP,  # KV cache group; -1 if missing
    SPEC_KIND,  # index in SPEC_KINDS; -1 if missing
) = range(12)
EVENT_COLUMNS = 12
# Values of KIND. Events of kind OTHER must be read as typed events.
OTHER, STORED, REMOVED, CLEARED = range(4)

MEDIA = ("", "GPU", "CPU", "CPU_PINNED", "DISK", "STORAGE", "EXTERNAL")
SPEC_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "sink_full_attention",
    "chunked_local_attention",
    "mamba",
    "encoder_only_attention",
    "cross_attention",
    "unknown",
)

_KINDS = {kind: place for place, kind in enumerate(KINDS, STORED)}
_UNUSUAL = -2
_MEDIA: dict[str | None, int] = {None: 0, **{medium: place for place, medium in enumerate(MEDIA)}}
_SPEC_KINDS: dict[str | None, int] = {None: -1, **{kind: place for place, kind in enumerate(SPEC_KINDS)}}
_LOW_64 = (1 << 64) - 1
_BLANK = Event("", [])
# Batches of fewer events are converted row by row, because the numpy calls cost as much as this many rows.
_FEW = 24

_Value = TypeVar("_Value")
# Event of one row: decoded with its batch, decoded alone, or the error.
_Read = Event | KVEvent | PayloadError


class Batch(Struct, frozen=True):
    """Rows of one payload's events."""

    first: int  # row of its first event
    end: int  # row behind its last event
    ts: float = 0.0  # publication time in seconds since the epoch, by the engine's clock
    unread: str | None = None  # decoding error: "oversize" or "broken_batch"; None: decoded


class Columns(Struct, frozen=True):
    """Events of some payloads, as columns."""

    batches: Sequence[Batch]  # one per payload, in order
    events: NDArray[np.int64]  # int64 [events, EVENT_COLUMNS], one row per event, batch by batch
    hashes: NDArray[np.uint64]  # uint64 [hashes], block hashes of all events
    tokens: NDArray[np.uint32]  # uint32 [tokens], token ids of all events
    kinds: Sequence[int]  # number of events of each KIND
    _rows: Sequence[_Read]

    def typed(self, batch: Batch) -> list[KVEvent | PayloadError]:
        """Return a batch's events, with an error in place of each event that cannot be decoded."""
        return [_typed_or_error(row) for row in self._rows[batch.first : batch.end]]


class EventDecoder:
    """Decoder for payloads of any number of pods; not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._are_arrays = False

    def decode(self, payloads: Sequence[bytes]) -> Columns:
        """Decode payloads; a malformed payload does not affect the others."""
        batches: list[Batch] = []
        events: list[_Read] = []
        for payload in payloads:
            first = len(events)
            try:
                ts, found = self._read(payload)
            except PayloadError as error:
                batches.append(Batch(first, first, unread=error.reason))
            else:
                events += found
                batches.append(Batch(first, len(events), ts))
        if not events:
            table = np.empty((0, EVENT_COLUMNS), np.int64)
            return Columns(batches, table, np.empty(0, np.uint64), np.empty(0, np.uint32), [0] * 4, ())
        return self._columns(batches, events)

    def _read(self, payload: bytes) -> tuple[float, Sequence[_Read]]:
        """Return a batch's time and events: try the last batch's layout, the other one, then one by one."""
        if len(payload) > self._max_bytes:
            raise PayloadError("oversize", f"payload has {len(payload)} bytes, more than {self._max_bytes}")
        for _ in range(2):
            try:
                if self._are_arrays:
                    arrays = ARRAY_BATCH.decode(payload)
                    return arrays.ts, list(map(from_array, arrays.events))
                batch = MAP_BATCH.decode(payload)
            except BROKEN:
                self._are_arrays = not self._are_arrays
            else:
                return batch.ts, batch.events
        raw = split_batch(payload, self._max_bytes)
        return raw.ts, [_typed_or_error(each) for each in raw.events]

    def _columns(self, batches: Sequence[Batch], events: Sequence[_Read]) -> Columns:
        plain: Sequence[Any] = events
        if set(map(type, events)) != {Event}:
            # Events that were decoded alone are applied by the view, not by the kernel.
            plain = [event if isinstance(event, Event) else _BLANK for event in events]
        ids, token_counts = _token_ids([event.token_ids for event in plain])
        if len(plain) < _FEW:
            table = np.array(self._few_rows(plain, token_counts.tolist()), np.int64)
        else:
            table = self._many_rows(plain, token_counts)
        hashes = _hashes_to_uint64([*chain.from_iterable([event.block_hashes for event in plain])])
        found = np.bincount(table[:, KIND], minlength=len(_KINDS) + 1).tolist()
        return Columns(batches, table, hashes, ids, found, events)

    def _few_rows(self, events: Sequence[Event], token_counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return one row per event, with its cells in the order of the column names above."""
        table: list[tuple[int, ...]] = []
        hash_start = token_start = 0
        for event, tokens in zip(events, token_counts, strict=True):
            blocks, parent = len(event.block_hashes), event.parent_block_hash
            lora, group = event.lora_name, event.group_idx
            medium = _MEDIA.get(event.medium, _UNUSUAL)
            spec = _SPEC_KINDS.get(event.kv_cache_spec_kind, _UNUSUAL)
            is_usual = (
                tokens >= 0
                and _UNUSUAL not in (medium, spec)
                and event.cache_salt is None
                and (lora or not event.lora_id)
                and _is_plain(bytes(event.extra_keys), lora, blocks)
            )
            kind = _KINDS.get(event.type, OTHER) if is_usual else OTHER
            handle = 0 if parent is None else hash_to_uint64(parent)
            run = token_start, max(tokens, 0)
            table.append(
                (
                    *(kind, hash_start, blocks, parent is not None, handle - (handle >> 63 << 64), *run),
                    *(event.block_size, lora is not None, medium, -1 if group is None else group, spec),
                )
            )
            hash_start += blocks
            token_start += run[1]
        return table

    def _many_rows(self, events: Sequence[Event], token_counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of many events, built column by column."""
        # One list per attribute: transposing tuples of all attributes takes twice as long.
        parents = [event.parent_block_hash for event in events]
        loras = [event.lora_name for event in events]
        media = [event.medium for event in events]
        specs = [event.kv_cache_spec_kind for event in events]
        table = np.zeros((len(events), EVENT_COLUMNS), np.int64)
        counts = np.array([len(event.block_hashes) for event in events], np.int64)
        table[:, KIND] = _column([event.type for event in events], lambda kind: _KINDS.get(kind, OTHER))
        table[:, HASH_COUNT] = counts
        table[:, HASH_START] = np.cumsum(counts) - counts
        table[:, TOKEN_COUNT] = np.maximum(token_counts, 0)
        table[:, TOKEN_START] = np.cumsum(table[:, TOKEN_COUNT]) - table[:, TOKEN_COUNT]
        without = parents.count(None)
        table[:, HAS_PARENT] = 1
        if without == len(events):
            table[:, HAS_PARENT] = 0
        elif without:
            table[:, HAS_PARENT] = [parent is not None for parent in parents]
        if without < len(events):
            table[:, PARENT] = _hashes_to_uint64([parent or 0 for parent in parents]).view(np.int64)
        table[:, BLOCK_SIZE] = _column([event.block_size for event in events], int)
        table[:, HAS_LORA] = _column(loras, lambda lora: lora is not None)
        table[:, MEDIUM] = _column(media, lambda medium: _MEDIA.get(medium, _UNUSUAL))
        groups = [event.group_idx for event in events]
        table[:, GROUP] = _column(groups, lambda group: -1 if group is None else group)
        table[:, SPEC_KIND] = _column(specs, lambda kind: _SPEC_KINDS.get(kind, _UNUSUAL))
        unusual = (token_counts < 0) | (table[:, [MEDIUM, SPEC_KIND]] == _UNUSUAL).any(axis=1)
        salts = [event.cache_salt for event in events]
        unusual |= np.asarray(_column(salts, lambda salt: salt is not None))
        unusual |= ~_are_plain(events, loras, counts)
        table[unusual, KIND] = OTHER
        return table


def _typed_or_error(read: _Read | Raw) -> KVEvent | PayloadError:
    try:
        if isinstance(read, Raw):
            return decode_event(read)
        return typed(read) if isinstance(read, Event) else read
    except PayloadError as error:
        return error


def _column(values: Sequence[Any], value_of: Callable[[Any], _Value]) -> _Value | list[_Value]:
    """Return the values of a column; a single value if all are equal, as nearly always."""
    first = values[0]
    if values.count(first) == len(values):
        return value_of(first)
    return [value_of(value) for value in values]


def _hashes_to_uint64(hashes: Sequence[EngineHash]) -> NDArray[np.uint64]:
    """Return the 64-bit forms of hashes, see `hash_to_uint64`."""
    try:
        return np.frombuffer(array("Q", hashes), np.uint64)  # type: ignore[type-var]
    except (TypeError, OverflowError):
        return np.frombuffer(array("Q", map(hash_to_uint64, hashes)), np.uint64)


def hash_to_uint64(engine_hash: EngineHash) -> int:
    """Return an engine's hash as an unsigned 64-bit number.

    Of a digest these are its last 8 bytes, as in vLLM's own integer form; of a negative number its two's
    complement.
    """
    if isinstance(engine_hash, bytes):
        return int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _LOW_64


def _token_ids(lists: Sequence[Raw]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return all tokens, and the length of each list; -1 for a malformed list."""
    ends = np.array([*accumulate(map(len, lists))], np.int64)
    data = np.frombuffer(b"".join(lists), np.uint8)
    tokens, counts = np.empty(len(data), np.uint32), np.empty(len(lists), np.int64)
    used = read_token_lists(data, ends, MAX_TOKENS, tokens, counts)
    return tokens[:used], counts


def _are_plain(
    events: Sequence[Event], loras: Sequence[str | None], counts: NDArray[np.int64]
) -> NDArray[np.bool]:
    """Return, per event, whether its blocks depend on tokens and the adapter's name only."""
    extras, lora_ids = [event.extra_keys for event in events], [event.lora_id for event in events]
    first, lora = extras[0], loras[0]
    is_one = loras.count(lora) == len(events) and (counts == counts[0]).all()
    if extras.count(first) == len(events) and (is_one or first == NIL):
        are_plain = np.array(_is_plain(bytes(first), lora, int(counts[0])))
    else:
        are_plain = np.array(list(map(_is_plain, map(bytes, extras), loras, counts.tolist())))
    if any(lora_ids):
        named = [not number or bool(lora) for number, lora in zip(lora_ids, loras, strict=True)]
        are_plain = are_plain & np.array(named)
    return are_plain


@lru_cache(1024)
def _is_plain(extra: bytes, lora: str | None, blocks: int) -> bool:
    try:
        entries = EXTRA_KEYS.decode(extra)
    except BROKEN:
        return False
    if entries is None:
        return True
    names = [lora] if lora is not None else []
    return len(entries) == blocks and all(not entry or entry == names for entry in entries)


@kernel
def read_token_lists(
    data: NDArray[np.uint8],
    ends: NDArray[np.int64],
    longest: int,
    tokens: NDArray[np.uint32],
    counts: NDArray[np.int64],
) -> int:
    """Decode msgpack arrays of unsigned numbers below 2**32.

    Args:
        data: uint8 [bytes], the concatenated arrays.
        ends: int64 [arrays], end of each array in `data`.
        longest: Most numbers of an array.
        tokens: uint32 [bytes], written; a malformed array writes none.
        counts: int64 [arrays], written: length of each array; -1 for a malformed one.

    Returns:
        Number of tokens written.
    """
    at = np.int64(0)
    used = np.int64(0)
    for place in range(len(ends)):
        end = ends[place]
        counts[place] = _read_list(data, int(at), end, longest, tokens, int(used))
        used += max(np.int64(0), counts[place])
        at = end
    return int(used)


@inlined
def _read_list(
    data: NDArray[np.uint8], at: int, end: int, longest: int, tokens: NDArray[np.uint32], used: int
) -> int:
    if at >= end:
        return -1
    head = np.int64(data[at])
    at += 1
    count = np.int64(0)
    if head & 0xF0 == 0x90:
        count = head & 0x0F
    elif head in (0xDC, 0xDD):
        width = 2 if head == 0xDC else 4
        if end - at < width:
            return -1
        for _ in range(width):
            count = count << 8 | np.int64(data[at])
            at += 1
    else:
        return -1
    # Each number takes at least one byte.
    if count > min(longest, end - at):
        return -1
    for place in range(used, used + count):
        if at >= end:
            return -1
        number = np.int64(data[at])
        at += 1
        if number >= 0x80:
            width = 1 if number == 0xCC else 2 if number == 0xCD else 4 if number == 0xCE else 0
            if width == 0 or end - at < width:
                return -1
            number = np.int64(0)
            for _ in range(width):
                number = number << 8 | np.int64(data[at])
                at += 1
        tokens[place] = np.uint32(number)
    return int(count) if at == end else -1
