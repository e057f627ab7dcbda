"""Short texts word by word: a text in, its ids out, those of known words from memory.

A language has few words, and the library takes 0.2 us for each character of them, known or not. Words are
what lies between exact cuts (see `cuts`), so their ids are those that they have in the text.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from tokenization.cuts import WordCuts
from tokenization.segment_memory import TokenIds
from tokenization.shares import encode_together
from tokenization.word_kernels import LINE_WORDS, WAYS, encode_words, fits, remember_word

WORDS_CHARS_MAX = 8 << 10
"""The library does more at once on its own threads, and gives up the GIL meanwhile."""
# So little that another thread's taking the GIL meanwhile would cost more.
_INLINE_CHARS = 128
_LINE_BYTES = 4 * LINE_WORDS
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
        self._has_lines = cuts is WordCuts.LINES
        self._specials = special_tree(specials)
        sets = 1 << max(0, (capacity_bytes // (WAYS * _LINE_BYTES)).bit_length() - 1)
        self._table = np.zeros((sets * WAYS, LINE_WORDS), np.uint32)
        self.used_bytes = self._table.nbytes
        # Unknown to clients, who could else have one set serve all of their words.
        self._seed = np.uint64(secrets.randbits(64))
        # Compiled, or loaded, before the first request.
        self.encode("a")

    def encode(self, text: str) -> TokenIds:
        """The ids of a text, without special tokens around it."""
        if not text:
            return _NO_IDS
        data = bytearray(text, "utf-8")
        room = np.empty(4 * len(data), np.uint32)
        ids, missing = encode_words(
            np.frombuffer(data, np.uint8), self._table, self._specials, self._seed, self._has_lines, room
        )
        if not missing:
            return room[:ids].copy()
        places = room[len(room) - 3 * missing :].reshape(missing, 3)[::-1].tolist()
        words = [bytes(data[start:end]).decode() for _, start, end in places]
        fresh = self._fresh(dict.fromkeys(words))
        parts: list[NDArray[np.uint32]] = []
        at = 0
        for (known, _, _), word in zip(places, words, strict=True):
            parts += (room[at:known], fresh[word])
            at = known
        return np.frombuffer(bytearray().join([*parts, room[at:ids]]), np.uint32)  # type: ignore[list-item]

    def _fresh(self, words: Iterable[str]) -> Mapping[str, NDArray[np.uint32]]:
        """The ids of words that are not known, which are remembered."""
        unknown = list(words)
        ids = {}
        for word, encoding in zip(unknown, self._encode(unknown), strict=True):
            ids[word] = np.frombuffer(array("I", encoding.ids), np.uint32)
            data = bytearray(word, "utf-8")
            if fits(len(data), len(encoding.ids)):
                remember_word(np.frombuffer(data, np.uint8), ids[word], self._table, self._seed)
        return ids

    def _encode(self, words: Sequence[str]) -> list[Encoding]:
        if sum(map(len, words)) > _INLINE_CHARS:
            return encode_together(self._tokenizer, words)
        return [self._tokenizer.encode(word, add_special_tokens=False) for word in words]


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
