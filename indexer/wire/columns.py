"""Published messages to columns of numbers that a kernel applies, and typed events of the rest.

msgspec decodes a batch at once; a batch of which that fails is read event by event (see `decode`). Nothing
here knows pods, sequences or keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
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
    Event,
    decode_event,
    from_array,
    split_batch,
    typed,
)
from indexer.wire.events import MAX_TOKENS, EngineHash, KVEvent

(
    KIND,  # see below
    HASH_START,  # its part of `hashes`; a count of 0 where it has none
    HASH_COUNT,
    HAS_PARENT,  # 0 or 1
    PARENT,  # the parent hash's 64 bits; 0 where it has none
    TOKEN_START,  # its part of `tokens`
    TOKEN_COUNT,
    BLOCK_SIZE,  # 0 where it tells none
    HAS_LORA,  # 0 or 1
    MEDIUM,  # place in MEDIA; 0 where it tells none
    GROUP,  # -1 where it tells none
    SPEC_KIND,  # place in SPEC_KINDS; -1 where it tells none
) = range(12)
EVENT_COLUMNS = 12
# Values of KIND. OTHER is left to whoever reads typed events.
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
_NIL = Raw(b"\xc0")
_BLANK = Event("", [])
# Extra keys of which is known whether they are plain.
_KNOWN_MAX = 1024
# Rows of fewer events are made one by one: numpy's calls cost as much as so many.
_FEW = 24

_Value = TypeVar("_Value")
# A row's event: as msgspec read it with its batch, or as it was read by itself.
_Read = Event | KVEvent | PayloadError


class Batch(Struct, frozen=True):
    """The rows of a payload's events."""

    first: int  # row of its first event
    end: int  # row behind its last
    ts: float = 0.0  # when it was published, seconds since the epoch by the engine's clock
    unread: str | None = None  # why it could not be read, "oversize" or "broken_batch"; None if it could


class Columns(Struct, frozen=True):
    """Events of some payloads, as columns."""

    batches: Sequence[Batch]  # one for each payload, in order
    events: NDArray[np.int64]  # a row for each event, batch by batch: int64 [events, EVENT_COLUMNS]
    hashes: NDArray[np.uint64]  # the hashes of all events: uint64
    tokens: NDArray[np.uint32]  # their tokens: uint32
    kinds: Sequence[int]  # how many of the events are of each kind, by KIND
    _rows: Sequence[_Read]

    def typed(self, batch: Batch) -> list[KVEvent | PayloadError]:
        """Return a batch's events, and the error in place of each that cannot be read."""
        return [_typed_or_error(row) for row in self._rows[batch.first : batch.end]]


class EventDecoder:
    """Decodes payloads of one or many pods; for one thread at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._are_arrays = False
        self._known: dict[tuple[bytes, str | None, int], bool] = {}

    def decode(self, payloads: Sequence[bytes]) -> Columns:
        """Reads payloads, whatever they hold; a payload that is no batch costs its neighbours nothing."""
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
        """A batch's time and events, by the layout that the last one had, or by the other, or one by one."""
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
            # What was read one by one is the view's to apply.
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
        """One row for each event, its cells in the order of the names above."""
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
                and self._is_plain(event.extra_keys, lora, blocks)
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
        """Fill the rows column by column, as `_few_rows` does one by one."""
        # Lists of attributes: to transpose tuples of all takes twice as long.
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
        unusual |= ~self._are_plain(events, loras, counts)
        table[unusual, KIND] = OTHER
        return table

    def _are_plain(
        self, events: Sequence[Event], loras: Sequence[str | None], counts: NDArray[np.int64]
    ) -> NDArray[np.bool]:
        """Whether what the blocks depend on besides tokens is told by the adapter's name alone."""
        extras, lora_ids = [event.extra_keys for event in events], [event.lora_id for event in events]
        first, lora = extras[0], loras[0]
        is_one = loras.count(lora) == len(events) and (counts == counts[0]).all()
        if extras.count(first) == len(events) and (is_one or first == _NIL):
            are_plain = np.array(self._is_plain(first, lora, int(counts[0])))
        else:
            are_plain = np.array(list(map(self._is_plain, extras, loras, counts.tolist())))
        if any(lora_ids):
            named = [not number or bool(lora) for number, lora in zip(lora_ids, loras, strict=True)]
            are_plain = are_plain & np.array(named)
        return are_plain

    def _is_plain(self, extra: Raw, lora: str | None, blocks: int) -> bool:
        asked = bytes(extra), lora, blocks
        known = self._known.get(asked)
        if known is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            known = self._known[asked] = _is_plain(*asked)
        return known


def _typed_or_error(read: _Read | Raw) -> KVEvent | PayloadError:
    try:
        if isinstance(read, Raw):
            return decode_event(read)
        return typed(read) if isinstance(read, Event) else read
    except PayloadError as error:
        return error


def _column(values: Sequence[Any], value_of: Callable[[Any], _Value]) -> _Value | list[_Value]:
    """The values of a column; only one of them where all are the same, as nearly always."""
    first = values[0]
    if values.count(first) == len(values):
        return value_of(first)
    return [value_of(value) for value in values]


def _hashes_to_uint64(hashes: Sequence[EngineHash]) -> NDArray[np.uint64]:
    """The 64 bits of hashes, an unsigned number as it is, of a negative one the two's complement."""
    try:
        return np.frombuffer(array("Q", hashes), np.uint64)  # type: ignore[type-var]
    except (TypeError, OverflowError):
        return np.frombuffer(array("Q", map(hash_to_uint64, hashes)), np.uint64)


def hash_to_uint64(engine_hash: EngineHash) -> int:
    """An engine's hash as an unsigned 64-bit number: a digest's last 8 bytes, as vLLM's own integer form."""
    if isinstance(engine_hash, bytes):
        return int.from_bytes(engine_hash[-8:], "big")
    return engine_hash & _LOW_64


def _token_ids(lists: Sequence[Raw]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """All tokens, and how many each list has; -1: it is none, and has none."""
    ends = np.array([*accumulate(map(len, lists))], np.int64)
    data = np.frombuffer(b"".join(lists), np.uint8)
    tokens, counts = np.empty(len(data), np.uint32), np.empty(len(lists), np.int64)
    used = read_token_lists(data, ends, MAX_TOKENS, tokens, counts)
    return tokens[:used], counts


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
    """Reads arrays of unsigned numbers below 2**32.

    Args:
        data: uint8 [bytes], the arrays one behind the other.
        ends: int64 [arrays], where each must end.
        longest: Most numbers of an array.
        tokens: uint32 [bytes], written; an array that is broken leaves nothing in it.
        counts: int64 [arrays], written: how many numbers each has; -1 for a broken one.

    Returns:
        How many tokens were written.
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
    # A number takes a byte at least.
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
