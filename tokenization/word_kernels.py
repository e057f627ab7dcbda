"""Words of a text and the table of their ids, compiled: UTF-8 bytes in, ids out, and the words that lack.

A line of the table is what a processor reads from memory at once: a word's text and its ids. Lines stand in
sets of four; the hash of a word tells its set, its text which line it is. Words for which such a line is too
short have a table of longer ones. Where a word ends is `cuts` written out (see there for why it is exact).
Knows no tokenizer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel

WAYS = 4
"""Lines of a set."""

LINE_WORDS, LONG_LINE_WORDS = 16, 64
"""32-bit numbers of a line: the hash's upper half, the sizes, then the text and, from the end, the ids."""

# What else the second number holds: whether the line was asked for since its set was last full.
_ASKED = np.uint32(1 << 31)
_SIZE_BITS = np.uint32(16)
_SIZE = np.uint32((1 << 15) - 1)
_HEAD = 2
# A line has room for shorter words, unless they have more ids than bytes.
_LONG_BYTES_MIN = 12

# A node of the special tokens' tree: its byte, its first child, its next sibling, whether a token ends there.
_BYTE, _CHILD, _SIBLING, _IS_END = range(4)

_HALF = np.uint64(32)
_LOWER = np.uint64((1 << 32) - 1)
_MIX = np.uint64(29)
_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)

_TAB, _LINE_FEED, _RETURN, _BLANK = 9, 10, 13, 32


@kernel
def encode_words(
    data: NDArray[np.uint8],
    table: NDArray[np.uint32],
    long_table: NDArray[np.uint32],
    specials: NDArray[np.int32],
    seed: np.uint64,
    has_lines: bool,
    room: NDArray[np.uint32],
) -> tuple[int, int]:
    """Writes the ids of a text's known words, and where the others stand.

    Args:
        data: uint8 [bytes], a text in UTF-8.
        table: uint32 [sets * WAYS, LINE_WORDS].
        long_table: uint32 [sets * WAYS, LONG_LINE_WORDS].
        specials: int32 [nodes, 4], the tree of special tokens: each is a word, whatever stands beside it.
        seed: Of the hash.
        has_lines: Whether a line's end is a word of its own in front of a letter or digit.
        room: uint32 [4 * bytes or more], written: from the front ids, from the end, for each word that lacks,
            the number of ids in front of it and its first and last byte's places.

    Returns:
        How many ids, and how many words lack.
    """
    end = len(data)
    ids = missing = 0
    at = 0
    while at < end:
        # Up to the next special token the text is one of its own.
        until = at
        special = 0
        while until < end and special == 0:
            special = _special_bytes(data, until, end, specials)
            if special == 0:
                until += 1
        while at < until + special:
            stop = word_end(data, at, until, has_lines) if at < until else until + special
            count = _known_ids(data, at, stop, table, seed, room, ids)
            if count < 0 and stop - at >= _LONG_BYTES_MIN:
                count = _known_ids(data, at, stop, long_table, seed, room, ids)
            if count >= 0:
                ids += count
            else:
                missing += 1
                entry = len(room) - 3 * missing
                room[entry] = ids
                room[entry + 1] = at
                room[entry + 2] = stop
            at = stop
    return ids, missing


@kernel
def put_words(
    data: NDArray[np.uint8],
    room: NDArray[np.uint32],
    fresh: NDArray[np.uint32],
    counts: NDArray[np.int64],
    table: NDArray[np.uint32],
    long_table: NDArray[np.uint32],
    seed: np.uint64,
    ids: NDArray[np.uint32],
) -> None:
    """Writes the ids of a text's words, those that lacked in their places, and puts these into the tables.

    There they get the places of such as were not asked for lately where a set is full. Those for which a long
    line is too short are passed over, see `fits`.

    Args:
        data: uint8 [bytes].
        room: As `encode_words` has written it.
        fresh: uint32 [ids], of the words that lacked, in their order.
        counts: int64 [words], how many of them each has.
        table: See `encode_words`, as for `long_table` and `seed`.
        ids: uint32 [ids of known words + fresh], written.
    """
    known = first = 0
    for word in range(len(counts)):
        entry = len(room) - 3 * (word + 1)
        while known < room[entry]:
            ids[first + known] = room[known]
            known += 1
        last = first + counts[word]
        for position in range(first, last):
            ids[position + known] = fresh[position]
        _remember(data[room[entry + 1] : room[entry + 2]], fresh[first:last], table, long_table, seed)
        first = last
    while first + known < len(ids):
        ids[first + known] = room[known]
        known += 1


@kernel
def word_ends(data: NDArray[np.uint8], has_lines: bool, ends: NDArray[np.int64]) -> int:
    """Writes where the words of a text without special tokens end.

    Args:
        data: uint8 [bytes], a text in UTF-8.
        has_lines: See `encode_words`.
        ends: int64 [bytes or more], written.

    Returns:
        How many words there are.
    """
    words = at = 0
    while at < len(data):
        at = word_end(data, at, len(data), has_lines)
        ends[words] = at
        words += 1
    return words


def fits(word_bytes: int, ids: int) -> bool:
    """Whether a word and its ids fit into a line of either table."""
    is_long = word_bytes >= _LONG_BYTES_MIN and _fits(word_bytes, ids, LONG_LINE_WORDS)
    return bool(is_long or _fits(word_bytes, ids, LINE_WORDS))


@inlined
def word_end(data: NDArray[np.uint8], at: int, end: int, has_lines: bool) -> int:
    """Where the word that begins at `at` ends, in a text that ends at `end`."""
    while True:
        start = at
        while at < end and _is_space(data[at]):
            at += 1
        if at == end:
            return end
        if not (has_lines and at > start and data[at - 1] == _LINE_FEED and _is_letter_at(data, at, end)):
            while at < end and not _is_space(data[at]):
                at += 1
            if at == end:
                return end
        # Letters, digits, ASCII's punctuation and a line's end: there a word ends, unless line feeds follow
        # the punctuation, which some families add to it.
        last = data[at - 1]
        if last == _LINE_FEED or _is_letter_before(data, at, start):
            return at
        if _is_punctuation(last) and data[at] != _RETURN and data[at] != _LINE_FEED:
            return at


@inlined
def _is_space(byte: np.uint8) -> bool:
    return byte in (_BLANK, _TAB, _LINE_FEED, _RETURN)


@inlined
def _is_punctuation(byte: np.uint8) -> bool:
    return 33 <= byte <= 47 or 58 <= byte <= 64 or 91 <= byte <= 96 or 123 <= byte <= 126


@inlined
def _is_ascii_letter(byte: np.uint8) -> bool:
    return 48 <= byte <= 57 or 65 <= byte <= 90 or 97 <= byte <= 122


@inlined
def _is_letter_before(data: NDArray[np.uint8], at: int, start: int) -> bool:
    """Whether the character that ends at `at` is a letter or digit to every tokenizer."""
    if data[at - 1] < 0x80:
        return _is_ascii_letter(data[at - 1])
    first = at - 1
    while first > start and data[first] & 0xC0 == 0x80:
        first -= 1
    return _is_letter_at(data, first, at)


@inlined
def _is_letter_at(data: NDArray[np.uint8], at: int, end: int) -> bool:
    """Whether the character at `at` is a letter or digit to every tokenizer, see `cuts`."""
    byte = np.int64(data[at])
    if byte < 0x80:
        return _is_ascii_letter(data[at])
    if byte < 0xE0:
        if at + 1 >= end:
            return False
        char = (byte & 0x1F) << 6 | (np.int64(data[at + 1]) & 0x3F)
        return 0x0410 <= char <= 0x044F
    if byte >= 0xF0 or at + 2 >= end:
        return False
    char = (byte & 0x0F) << 12 | (np.int64(data[at + 1]) & 0x3F) << 6 | (np.int64(data[at + 2]) & 0x3F)
    return (
        0x3041 <= char <= 0x3096
        or 0x30A1 <= char <= 0x30FA
        or 0x4E00 <= char <= 0x9FA5
        or 0xAC00 <= char <= 0xD7A3
    )


@inlined
def _special_bytes(data: NDArray[np.uint8], at: int, end: int, specials: NDArray[np.int32]) -> int:
    """Bytes of the longest special token at `at`; 0 where there is none."""
    longest = 0
    node = specials[0, _CHILD]
    position = at
    while node > 0 and position < end:
        if specials[node, _BYTE] != data[position]:
            node = specials[node, _SIBLING]
            continue
        position += 1
        if specials[node, _IS_END]:
            longest = position - at
        node = specials[node, _CHILD]
    return longest


@inlined
def _known_ids(
    data: NDArray[np.uint8],
    at: int,
    stop: int,
    table: NDArray[np.uint32],
    seed: np.uint64,
    room: NDArray[np.uint32],
    ids: int,
) -> int:
    """Writes the ids of this word behind others and tells how many they are; -1 if no line holds it."""
    line = _find(data, at, stop, table, seed)
    if line < 0:
        return -1
    count = np.int64(table[line, 1] & _SIZE)
    for position in range(count):
        room[ids + position] = table[line, table.shape[1] - 1 - position]
    return count


@inlined
def _find(data: NDArray[np.uint8], at: int, stop: int, table: NDArray[np.uint32], seed: np.uint64) -> int:
    """The line that holds this word, which is marked as asked for; -1 if none does."""
    number = _hash(data, at, stop, seed)
    first = _first_line(number, table)
    size = stop - at
    for line in range(first, first + WAYS):
        if table[line, 0] != np.uint32(number >> _HALF):
            continue
        if np.int64((table[line, 1] & ~_ASKED) >> _SIZE_BITS) != size:
            continue
        position = 0
        while 4 * position < size:
            if table[line, _HEAD + position] != _four_bytes(data, at + 4 * position, stop):
                break
            position += 1
        if 4 * position >= size:
            if not table[line, 1] & _ASKED:
                table[line, 1] |= _ASKED
            return line
    return -1


@inlined
def _fits(word_bytes: int, ids: int, line_words: int) -> bool:
    return word_bytes > 0 and (word_bytes + 3) // 4 + ids <= line_words - _HEAD


@inlined
def _remember(
    word: NDArray[np.uint8],
    ids: NDArray[np.uint32],
    table: NDArray[np.uint32],
    long_table: NDArray[np.uint32],
    seed: np.uint64,
) -> None:
    size = len(word)
    is_long = not _fits(size, len(ids), LINE_WORDS)
    if is_long and not (size >= _LONG_BYTES_MIN and _fits(size, len(ids), LONG_LINE_WORDS)):
        return
    where = long_table if is_long else table
    # The same word may have lacked twice in one text.
    if _find(word, 0, size, where, seed) < 0:
        _write(word, ids, where, seed)


@inlined
def _write(
    word: NDArray[np.uint8], ids: NDArray[np.uint32], table: NDArray[np.uint32], seed: np.uint64
) -> None:
    size = len(word)
    number = _hash(word, 0, size, seed)
    line = _line_for(table, _first_line(number, table))
    table[line, 0] = np.uint32(number >> _HALF)
    table[line, 1] = np.uint32(len(ids)) | (np.uint32(size) << _SIZE_BITS)
    for position in range((size + 3) // 4):
        table[line, _HEAD + position] = _four_bytes(word, 4 * position, size)
    for position in range(len(ids)):
        table[line, table.shape[1] - 1 - position] = ids[position]


@inlined
def _first_line(number: np.uint64, table: NDArray[np.uint32]) -> int:
    """The first line of the set that the lower half of a hash tells, however many there are."""
    sets = np.uint64(len(table) // WAYS)
    return np.int64((number & _LOWER) * sets >> _HALF) * WAYS


@inlined
def _line_for(table: NDArray[np.uint32], first: int) -> int:
    """The line of a set that a new word gets: an empty one, or one that was not asked for lately."""
    for line in range(first, first + WAYS):
        if table[line, 1] == 0:
            return line
    for line in range(first, first + WAYS):
        if not table[line, 1] & _ASKED:
            return line
    for line in range(first, first + WAYS):
        table[line, 1] &= ~_ASKED
    return first


@inlined
def _hash(data: NDArray[np.uint8], at: int, stop: int, seed: np.uint64) -> np.uint64:
    number = seed ^ np.uint64(stop - at)
    while at < stop:
        number = (number ^ np.uint64(_four_bytes(data, at, stop))) * _FACTOR
        number ^= number >> _MIX
        at += 4
    return number


@inlined
def _four_bytes(data: NDArray[np.uint8], at: int, stop: int) -> np.uint32:
    """Up to four bytes as a number, none of them from `stop` on."""
    if stop - at >= 4:
        return (
            np.uint32(data[at])
            | np.uint32(data[at + 1]) << np.uint32(8)
            | np.uint32(data[at + 2]) << np.uint32(16)
            | np.uint32(data[at + 3]) << np.uint32(24)
        )
    number = np.uint32(0)
    for position in range(stop - at):
        number |= np.uint32(data[at + position]) << np.uint32(8 * position)
    return number
