"""Texts word by word: a text in, its ids out, those of known words from memory.

A language has few words, and the library takes 0.2 us for each character of them, known or not. Words are
what lies between exact cuts (see `cuts`), so their ids are those that they have in the text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from tokenization.cuts import WordCuts, split_words
from tokenization.plain_words import PlainWords
from tokenization.segment_memory import TokenIds
from tokenization.shares import encode_together
from tokenization.word_kernels import LINE_WORDS, LONG_LINE_WORDS, WAYS, encode_words, put_words

WORDS_CHARS_MAX = 8 << 10
"""Of more at once only what is mostly known: the library is as fast with the rest, and gives up the GIL."""
_KNOWN_SHARE = 0.75
# So little that another thread's taking the GIL meanwhile would cost more.
_INLINE_CHARS = 128
# One in so many bytes is for words too long for a line of the others.
_LONG_SHARE = 8
_NO_IDS: TokenIds = np.zeros(0, np.uint32)


class WordEncoder:
    """Encodes as the tokenizer does; safe to share between threads.

    Args:
        tokenizer: A byte-level BPE.
        cuts: Where its texts fall into words.
        specials: Special tokens, in front of and behind which any text may be cut.
        capacity_bytes: Most memory for words; what was not asked for lately makes room.

    Attributes:
        used_bytes: Memory taken.
    """

    def __init__(
        self, tokenizer: Tokenizer, cuts: WordCuts, specials: Iterable[str], capacity_bytes: int
    ) -> None:
        self._tokenizer = tokenizer
        self._plain = PlainWords.of(tokenizer)
        self._has_lines = cuts is WordCuts.LINES
        self._specials = special_tree(specials)
        long_bytes = capacity_bytes // _LONG_SHARE
        self._table = _table(LINE_WORDS, capacity_bytes - long_bytes)
        self._long_table = _table(LONG_LINE_WORDS, long_bytes)
        self.used_bytes = self._table.nbytes + self._long_table.nbytes
        # Unknown to clients, who could else have one set serve all of their words.
        self._seed = np.uint64(secrets.randbits(64))
        compile_words()

    def encode(self, text: str) -> TokenIds:
        """The ids of a text, without special tokens around it."""
        ids = self._encoded(text, 0.0)
        assert ids is not None
        return ids

    def encode_known(self, text: str) -> TokenIds | None:
        """The same, if nearly all of the text is known; None: the library should encode it as a whole."""
        return self._encoded(text, _KNOWN_SHARE) if len(text) <= WORDS_CHARS_MAX else None

    def _encoded(self, text: str, share: float) -> TokenIds | None:
        """The ids of a text of which at least this share is known; None for any other."""
        if not text:
            return _NO_IDS
        utf8 = bytearray(text, "utf-8")
        data = np.frombuffer(utf8, np.uint8)
        # No byte makes more than three ids: that is as much longer as the normal form makes a text.
        room = np.empty(4 * len(utf8), np.uint32)
        ids, missing = encode_words(
            data, self._table, self._long_table, self._specials, self._seed, self._has_lines, room
        )
        if not missing:
            return room[:ids].copy()
        places = room[len(room) - 3 * missing :].reshape(missing, 3)[::-1]
        if share and int((places[:, 2] - places[:, 1]).sum()) > (1 - share) * len(utf8):
            return None
        words = [utf8[start:end].decode() for _, start, end in places.tolist()]
        return self._with_fresh(data, room, ids, words)

    def _with_fresh(
        self, data: NDArray[np.uint8], room: TokenIds, known: int, words: Sequence[str]
    ) -> TokenIds:
        """The ids of a text of which words lack, which are remembered.

        Args:
            room: As `encode_words` has written it.
            known: How many ids the other words have.
            words: Those that lack, in their order.
        """
        apart = list(dict.fromkeys(words))
        fresh = self._encode(apart)
        if len(apart) < len(words):
            ids_of = dict(zip(apart, fresh, strict=True))
            fresh = [ids_of[word] for word in words]
        counts, fresh_ids = np.array(list(map(len, fresh))), np.array(list(chain(*fresh)), np.uint32)
        ids = np.empty(known + len(fresh_ids), np.uint32)
        put_words(data, room, fresh_ids, counts, self._table, self._long_table, self._seed, ids)
        return ids

    def _encode(self, words: Sequence[str]) -> list[list[int]]:
        if sum(map(len, words)) > _INLINE_CHARS:
            return [encoding.ids for encoding in encode_together(self._tokenizer, words)]
        return list(map(self._encode_one, words))

    def _encode_one(self, word: str) -> list[int]:
        if self._plain is not None and (ids := self._plain.ids(word)) is not None:
            return ids
        encoding: Encoding = self._tokenizer.encode(word, add_special_tokens=False)
        return encoding.ids


@cache
def compile_words() -> None:
    """Compiles the kernels (or loads them from their cache), so that the first request need not wait."""
    tables, seed = (_table(LINE_WORDS, 0), _table(LONG_LINE_WORDS, 0)), np.uint64(0)
    data, room, ids = np.zeros(1, np.uint8), np.zeros(4, np.uint32), np.zeros(1, np.uint32)
    encode_words(data, *tables, special_tree(()), seed, True, room)
    put_words(data, room, ids, np.array([1]), *tables, seed, ids)
    split_words("a", WordCuts.LINES)


def _table(line_words: int, capacity_bytes: int) -> NDArray[np.uint32]:
    """A table with room for one set of words at least."""
    sets = max(1, capacity_bytes // (4 * line_words * WAYS))
    return np.zeros((sets * WAYS, line_words), np.uint32)


def special_tree(tokens: Iterable[str]) -> NDArray[np.int32]:
    """Special tokens as `encode_words` reads them, the root first.

    Returns:
        int32 [nodes, 4]: for each a byte, its first child, its next sibling, and whether a token ends there.
    """
    root: dict[int, Any] = {}
    ends: set[int] = set()
    for token in filter(None, tokens):
        node = root
        for byte in token.encode():
            node = node.setdefault(byte, {})
        ends.add(id(node))
    rows: list[list[int]] = [[0, 0, 0, 0]]
    waiting = [(root, 0)]
    for node, row in waiting:
        sibling = 0
        for byte, child in node.items():
            rows.append([byte, 0, sibling, id(child) in ends])
            sibling = len(rows) - 1
            waiting.append((child, sibling))
        rows[row][1] = sibling
    return np.array(rows, np.int32)
