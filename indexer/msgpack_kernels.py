"""Reading msgpack, compiled: single values out of bytes that nobody has checked.

Comes in: bytes as uint8[:], where to read, and the `limit` that must not be passed. Goes out: where the value
ends and what it is, or BROKEN in place of the end if it is cut off or of another type. Nothing at `limit` or
behind is ever read. Events are not known here. Format: https://github.com/msgpack/msgpack/blob/master/spec.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined

BROKEN = -1

NIL = 0xC0
FLOAT32 = 0xCA
FLOAT64 = 0xCB

_INVALID = -1
# For each first byte of 0xC0..0xDF: bytes of the length that follows, fixed bytes behind it, and for each
# unit of the length so many bytes, or so many further values.
_FORMATS = np.array(
    [
        (0, 0, 0, 0),  # nil
        (_INVALID, 0, 0, 0),
        (0, 0, 0, 0),  # false
        (0, 0, 0, 0),  # true
        *((width, 0, 1, 0) for width in (1, 2, 4)),  # bin
        *((width, 1, 1, 0) for width in (1, 2, 4)),  # ext
        *((0, size, 0, 0) for size in (4, 8)),  # float
        *((0, size, 0, 0) for size in (1, 2, 4, 8)),  # uint
        *((0, size, 0, 0) for size in (1, 2, 4, 8)),  # int
        *((0, 1 + size, 0, 0) for size in (1, 2, 4, 8, 16)),  # fixext
        *((width, 0, 1, 0) for width in (1, 2, 4)),  # str
        *((width, 0, 0, 1) for width in (2, 4)),  # array
        *((width, 0, 0, 2) for width in (2, 4)),  # map
    ],
    np.int64,
)
# What a negative number of 1, 2, 4 and 8 bytes has in its upper bits once it is widened.
_SIGN_BITS = np.array([-1 << 8, -1 << 16, -1 << 32, 0], np.int64).view(np.uint64)

_EIGHT = np.uint64(8)
_ZERO = np.uint64(0)


def text_table(*texts: str) -> NDArray[np.uint8]:
    """A table for `find_text`: uint8 [texts, 1 + longest], the length first."""
    encoded = [text.encode() for text in texts]
    table = np.zeros((len(texts), 1 + max(map(len, encoded))), np.uint8)
    for row, text in zip(table, encoded, strict=True):
        row[: 1 + len(text)] = (len(text), *text)
    return table


@inlined
def find_text(data: NDArray[np.uint8], start: int, length: int, table: NDArray[np.uint8], guess: int) -> int:
    """The row of `table` that holds these bytes, looked for from row `guess` on; -1 if none does."""
    rows = table.shape[0]
    for step in range(rows):
        row = guess + step if guess + step < rows else guess + step - rows
        if table[row, 0] == length:
            position = 0
            while position < length and table[row, 1 + position] == data[start + position]:
                position += 1
            if position == length:
                return row
    return -1


@inlined
def as_int(number: np.integer[Any]) -> int:
    """A number as int: compiled, `int` alone would leave an unsigned one unsigned."""
    return int(np.int64(number))


@inlined
def eight_bytes(data: NDArray[np.uint8], at: int) -> np.uint64:
    """The unsigned number in eight bytes, which the caller has seen to be there: one load when compiled."""
    number = _ZERO
    for position in range(8):
        number = (number << _EIGHT) | np.uint64(data[at + position])
    return number


@inlined
def big_endian(data: NDArray[np.uint8], at: int, limit: int, width: int) -> np.uint64:
    """The unsigned number in 1..8 bytes, which the caller has seen to be there."""
    if limit - at >= 8:
        return eight_bytes(data, at) >> np.uint64(64 - 8 * width)
    number = _ZERO
    for position in range(at, at + width):
        number = (number << _EIGHT) | np.uint64(data[position])
    return number


@inlined
def skip_value(data: NDArray[np.uint8], at: int, limit: int, containers_max: int) -> int:
    """The end of the value at `at`, whatever it is.

    Args:
        data: uint8 [bytes].
        at: Where the value begins.
        limit: Where it must have ended.
        containers_max: Arrays and maps that it may hold, itself among them; so deep, at most, can it be.

    Returns:
        Its end, or BROKEN.
    """
    left = 1
    while left > 0:
        # Each value takes a byte at least: lengths that are only claimed end here.
        if left > limit - at:
            return BROKEN
        first = as_int(data[at])
        at += 1
        left -= 1
        values = 0
        if first < 0x80 or first >= 0xE0:
            continue
        if first < 0xA0:
            containers_max -= 1
            values = (first & 0x0F) if first >= 0x90 else 2 * (first & 0x0F)
        elif first < 0xC0:
            at += first & 0x1F
        else:
            width = as_int(_FORMATS[first & 0x1F, 0])
            if width == _INVALID or limit - at < width:
                return BROKEN
            units = as_int(big_endian(data, at, limit, width)) if width else 0
            at += width + as_int(_FORMATS[first & 0x1F, 1] + units * _FORMATS[first & 0x1F, 2])
            values = units * as_int(_FORMATS[first & 0x1F, 3])
            if first >= 0xDC:
                containers_max -= 1
        if containers_max < 0:
            return BROKEN
        left += values
    return at if at <= limit else BROKEN


@inlined
def read_number(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, np.uint64, bool]:
    """A whole number: its end or BROKEN, its 64 bits (two's complement), whether it is negative."""
    if at >= limit:
        return BROKEN, _ZERO, False
    first = as_int(data[at])
    at += 1
    if first < 0x80:
        return at, np.uint64(first), False
    if first >= 0xE0:
        return at, np.uint64(first) | _SIGN_BITS[0], True
    if not 0xCC <= first <= 0xD3:
        return BROKEN, _ZERO, False
    width = 1 << (first & 3)
    if limit - at < width:
        return BROKEN, _ZERO, False
    bits = big_endian(data, at, limit, width)
    negative = first >= 0xD0 and as_int(data[at]) >= 0x80
    if negative:
        bits |= _SIGN_BITS[first & 3]
    return at + width, bits, negative


@inlined
def read_array(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """The head of an array: where its first value begins, or BROKEN, and how many there are."""
    return _read_head(data, at, limit, 0x90, 0x0F, 0xDC, 2)


@inlined
def read_map(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """The head of a map: where its first key begins, or BROKEN, and how many there are."""
    return _read_head(data, at, limit, 0x80, 0x0F, 0xDE, 2)


@inlined
def read_text(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """The head of a text: where its first byte is, or BROKEN, and how many bytes it has."""
    return _read_head(data, at, limit, 0xA0, 0x1F, 0xD9, 1)


@inlined
def read_bytes(data: NDArray[np.uint8], at: int, limit: int) -> tuple[int, int]:
    """The head of a byte string: where its first byte is, or BROKEN, and how many it has."""
    # It has no short form: 0x100 is no byte.
    return _read_head(data, at, limit, 0x100, 0, 0xC4, 1)


@inlined
def _read_head(
    data: NDArray[np.uint8], at: int, limit: int, short: int, mask: int, long: int, narrowest: int
) -> tuple[int, int]:
    """Where the content begins, or BROKEN, and its length, of which each unit has its byte before `limit`.

    Args:
        data: uint8 [bytes].
        at: Where the head begins.
        limit: Where the content must have ended.
        short: First byte of the form that holds its length.
        mask: The length's bits therein.
        long: First byte of the first form whose length follows, in `narrowest` bytes; the next form's takes
            twice as many, at most four.
        narrowest: See above.
    """
    if at >= limit:
        return BROKEN, 0
    first = as_int(data[at])
    at += 1
    length = first & mask
    if first - length != short:
        width = narrowest << (first - long) if long <= first < long + 3 else 8
        if width > 4 or limit - at < width:
            return BROKEN, 0
        length = as_int(big_endian(data, at, limit, width))
        at += width
    return (at, length) if length <= limit - at else (BROKEN, 0)
