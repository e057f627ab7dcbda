"""One published event to a row of numbers, compiled: the plain events that nearly all are.

Comes in: bytes that nobody has checked, and where an event begins. Goes out: its row (see `event_rows`), its
hashes and its tokens; or only that it is unusual. Batches are not known here (see `parse_kernels`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined
from indexer import event_rows as rows
from indexer.events import MAX_GROUP, MAX_HASH_BYTES, MAX_TOKENS, MAX_WINDOW_TOKENS
from indexer.msgpack_kernels import (
    BROKEN,
    NIL,
    big_endian,
    eight_bytes,
    find_text,
    read_array,
    read_bytes,
    read_map,
    read_number,
    read_text,
    skip_value,
    text_table,
)

# Fields by their place in the arrays of vLLM 0.16-0.23; only maps have a salt.
(
    _TYPE,
    _HASHES,
    _PARENT_HASH,
    _TOKEN_IDS,
    _BLOCK_SIZE,
    _LORA_ID,
    _MEDIUM,
    _LORA_NAME,
    _EXTRA_KEYS,
    _GROUP_IDX,
    _SPEC_KIND,
    _WINDOW,
    _SALT,
) = range(13)
_NAMES = text_table(
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "cache_salt",
)
_UNKNOWN = -1
_STORED_FIELDS_MIN = 5
_REMOVED_FIELDS = np.array([_TYPE, _HASHES, _MEDIUM, _GROUP_IDX], np.int64)

# Sets of fields are bits; the latter two are by kind.
_NEVER_NIL = 1 << _TYPE | 1 << _HASHES | 1 << _TOKEN_IDS | 1 << _BLOCK_SIZE
_REQUIRED = np.array([0, 1 << _HASHES, 1 << _HASHES, 0], np.int64)
_ALLOWED = np.array(
    [0, (1 << 13) - 1, sum(1 << int(field) for field in _REMOVED_FIELDS), 1 << _TYPE], np.int64
)

_TAGS = text_table("OTHER", "BlockStored", "BlockRemoved", "AllBlocksCleared")
_MEDIA = text_table(*rows.MEDIA)
_SPEC_KINDS = text_table(*rows.SPEC_KINDS)

# The columns and the greatest values of the fields that are numbers.
_NUMBER_COLUMNS = np.full(13, -1, np.int64)
_NUMBER_COLUMNS[[_BLOCK_SIZE, _LORA_ID, _GROUP_IDX, _WINDOW]] = (
    rows.BLOCK_SIZE,
    rows.LORA_ID,
    rows.GROUP,
    rows.WINDOW,
)
_NUMBERS_MAX = np.zeros(13, np.uint64)
_NUMBERS_MAX[[_BLOCK_SIZE, _LORA_ID, _GROUP_IDX, _WINDOW]] = (
    MAX_TOKENS,
    2**63 - 1,
    MAX_GROUP,
    MAX_WINDOW_TOKENS,
)

_TOKEN_MAX = np.uint64(0xFFFF_FFFF)
# A number of at most 32 bits at the front of eight bytes, by its first byte: its size (0: none such), how far
# it must be shifted, and which bits are left.
_TOKEN_SIZES = np.zeros(256, np.int64)
_TOKEN_SHIFTS = np.zeros(256, np.uint64)
_TOKEN_MASKS = np.zeros(256, np.uint64)
for _head, _width in (*((_head, 0) for _head in range(0x80)), (0xCC, 1), (0xCD, 2), (0xCE, 4)):
    _TOKEN_SIZES[_head] = 1 + _width
    _TOKEN_SHIFTS[_head] = 64 - 8 * (1 + _width)
    _TOKEN_MASKS[_head] = 256 ** (_width or 1) - 1

# A row of which nothing is known yet.
_BLANK = np.full(rows.EVENT_COLUMNS, -1, np.int64)
_BLANK[
    [
        rows.KIND,
        rows.HASH_COUNT,
        rows.HAS_PARENT,
        rows.PARENT,
        rows.TOKEN_COUNT,
        rows.BLOCK_SIZE,
        rows.MEDIUM,
    ]
] = 0
_NESTED_MAX = 64


@inlined
def read_event(
    data: NDArray[np.uint8],
    at: int,
    limit: int,
    event: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    hash_at: int,
    tokens: NDArray[np.uint32],
    token_at: int,
) -> int:
    """Fills an event's row.

    Unusual is: a kind, medium or kind of group that is not known; extra keys other than the adapter's name,
    a salt, an adapter without a name or with one that is not ASCII; a field that is missing, comes twice, is
    of a wrong type or out of its range; an unknown field of many arrays or maps; what is no msgpack.

    Args:
        data: uint8 [bytes].
        at: Where the event begins.
        limit: Where it must have ended.
        event: int64 [EVENT_COLUMNS], written, but for START and END.
        hashes: uint64 [any], written from `hash_at` on.
        hash_at: See above.
        tokens: uint32 [any], written from `token_at` on.
        token_at: See above.

    Returns:
        The event's end; BROKEN if it is unusual, and then what was written is of no use.
    """
    blank_event(event)
    event[rows.HASH_START] = hash_at
    event[rows.TOKEN_START] = token_at
    at, count, is_map = _read_event_head(data, at, limit)
    seen = 0
    guess = _TYPE
    for position in range(count):
        field = position
        if is_map:
            start, length = read_text(data, at, limit)
            if start == BROKEN:
                return BROKEN
            field = find_text(data, start, length, _NAMES, guess)
            guess = field + 1 if field < _SALT else 0
            at = start + length
        elif position > 0:
            field = _field_at(event[rows.KIND], position)
        if field == _UNKNOWN:
            at = skip_value(data, at, limit, _NESTED_MAX)
        elif seen >> field & 1:
            return BROKEN
        else:
            seen |= 1 << field
            at = _read_field(data, at, limit, field, event, hashes, tokens)
        if at == BROKEN:
            return BROKEN
    return at if _is_whole(event, seen, count, is_map) else BROKEN


@inlined
def blank_event(event: NDArray[np.int64]) -> None:
    """Makes a row one of kind OTHER, with nothing told."""
    for column in range(len(_BLANK)):
        event[column] = _BLANK[column]


@inlined
def _read_event_head(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int, bool]:
    """Where an event's first field begins, or BROKEN; how many it has, and whether it is a map."""
    start, count = read_map(data, at, limit)
    if start != BROKEN:
        return start, count, True
    start, count = read_array(data, at, limit)
    return start, count, False


@inlined
def _field_at(kind: int, position: int) -> int:
    """The field at a place of an event's array."""
    if kind == rows.STORED and position <= _WINDOW:
        return position
    if kind == rows.REMOVED and position < len(_REMOVED_FIELDS):
        return int(_REMOVED_FIELDS[position])
    return _UNKNOWN


@inlined
def _is_whole(event: NDArray[np.int64], seen: int, count: int, is_map: bool) -> bool:
    """Whether an event has what its kind must have, and nothing that its kind does not know."""
    kind = event[rows.KIND]
    if kind == rows.OTHER or seen & _REQUIRED[kind] != _REQUIRED[kind] or seen & ~_ALLOWED[kind]:
        return False
    if kind == rows.STORED and not is_map and count < _STORED_FIELDS_MIN:
        return False
    return bool(event[rows.LORA_ID] <= 0 or event[rows.LORA_END] > event[rows.LORA_START])


@inlined
def _read_field(
    data: NDArray[np.uint8],
    at: int,
    limit: int,
    field: int,
    event: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    tokens: NDArray[np.uint32],
) -> int:
    """Reads one field into its columns. Returns its end, or BROKEN."""
    if at < limit and data[at] == NIL:
        return BROKEN if _NEVER_NIL >> field & 1 else at + 1
    if field == _HASHES:
        at, event[rows.HASH_COUNT] = _read_hashes(data, at, limit, hashes, event[rows.HASH_START])
        return at
    if field == _TOKEN_IDS:
        at, event[rows.TOKEN_COUNT] = _read_tokens(data, at, limit, tokens, event[rows.TOKEN_START])
        return at
    if field == _PARENT_HASH:
        at, bits = _read_hash(data, at, limit)
        event[rows.HAS_PARENT] = 1
        event[rows.PARENT] = np.int64(bits)
        return at
    if field == _EXTRA_KEYS:
        return _read_extra_keys(data, at, limit, event)
    column = _NUMBER_COLUMNS[field]
    if column >= 0:
        # A negative number's bits are more than any of these.
        at, bits, _ = read_number(data, at, limit)
        event[column] = np.int64(bits)
        return at if bits <= _NUMBERS_MAX[field] else BROKEN
    return _read_text_field(data, at, limit, field, event)


@inlined
def _read_text_field(
    data: NDArray[np.uint8], at: int, limit: int, field: int, event: NDArray[np.int64]
) -> int:
    start, length = read_text(data, at, limit)
    if start == BROKEN:
        return BROKEN
    end = start + length
    place = 0
    if field == _TYPE:
        place = find_text(data, start, length, _TAGS, rows.STORED)
        event[rows.KIND] = place
    elif field == _MEDIUM:
        place = find_text(data, start, length, _MEDIA, 1)
        event[rows.MEDIUM] = place
    elif field == _SPEC_KIND:
        place = find_text(data, start, length, _SPEC_KINDS, 0)
        event[rows.SPEC_KIND] = place
    elif field == _LORA_NAME:
        event[rows.LORA_START] = start
        event[rows.LORA_END] = end
        for position in range(start, end):
            if data[position] >= 0x80:
                return BROKEN
    else:
        return BROKEN
    return end if place >= 0 else BROKEN


@inlined
def _read_hash(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, np.uint64]:
    end, bits, _ = read_number(data, at, limit)
    if end != BROKEN:
        return end, bits
    start, length = read_bytes(data, at, limit)
    if start == BROKEN or not 1 <= length <= MAX_HASH_BYTES:
        return BROKEN, bits
    end = start + length
    width = min(length, 8)
    return end, big_endian(data, end - width, limit, width)


@inlined
def _read_hashes(
    data: NDArray[np.uint8], at: int, limit: int, hashes: NDArray[np.uint64], first: int
) -> tuple[int, int]:
    """A list of hashes: its end, or BROKEN, and how many it has."""
    at, count = read_array(data, at, limit)
    if at == BROKEN or count > MAX_TOKENS:
        return BROKEN, 0
    for position in range(first, first + count):
        at, hashes[position] = _read_hash(data, at, limit)
        if at == BROKEN:
            return BROKEN, 0
    return at, count


@inlined
def _read_tokens(
    data: NDArray[np.uint8], at: int, limit: int, tokens: NDArray[np.uint32], first: int
) -> tuple[int, int]:
    """A list of token ids: its end, or BROKEN, and how many it has."""
    at, count = read_array(data, at, limit)
    if at == BROKEN or count > MAX_TOKENS:
        return BROKEN, 0
    for position in range(first, first + count):
        if limit - at >= 8:
            word = eight_bytes(data, at)
            head = np.int64(word >> np.uint64(56))
            size = _TOKEN_SIZES[head]
            if size:
                tokens[position] = (word >> _TOKEN_SHIFTS[head]) & _TOKEN_MASKS[head]
                at += size
                continue
        at, bits, _ = read_number(data, at, limit)
        if at == BROKEN or bits > _TOKEN_MAX:
            return BROKEN, 0
        tokens[position] = bits
    return at, count


@inlined
def _read_extra_keys(data: NDArray[np.uint8], at: int, limit: int, event: NDArray[np.int64]) -> int:
    """As many entries as there are hashes, each nil or the adapter's name alone: their end, or BROKEN."""
    at, count = read_array(data, at, limit)
    if at == BROKEN or count == 0 or count != event[rows.HASH_COUNT]:
        return BROKEN
    for _ in range(count):
        if at < limit and data[at] == NIL:
            at += 1
            continue
        at, items = read_array(data, at, limit)
        if at == BROKEN or items != 1:
            return BROKEN
        start, length = read_text(data, at, limit)
        if start == BROKEN or not _is_lora_name(data, start, length, event):
            return BROKEN
        at = start + length
    return at


@inlined
def _is_lora_name(data: NDArray[np.uint8], start: int, length: int, event: NDArray[np.int64]) -> bool:
    """Whether a text is the adapter's name, which must have come before."""
    name = event[rows.LORA_START]
    if name < 0 or event[rows.LORA_END] - name != length:
        return False
    different = False
    for position in range(length):
        different |= data[start + position] != data[name + position]
    return not different
