"""Short texts word by word: a text in, its ids out, those of known words from memory.

A language has few words, and the library takes 0.2 us for each character of them, known or not. Words are
what lies between exact cuts (see `cuts`), so their ids are those that they have in the text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding, Tokenizer

from tokenization.segment_memory import TokenIds
from tokenization.shares import encode_together

WORDS_CHARS_MAX = 8 << 10
"""The library does more at once on its own threads, and gives up the GIL meanwhile."""
# What is longer is no word of a language.
_WORD_CHARS_MAX = 48
# So little that another thread's taking the GIL meanwhile would cost more.
_INLINE_CHARS = 128
# Text and ids of a long word with their entry.
_ENTRY_BYTES = 384


class WordEncoder:
    """Encodes as the tokenizer does; safe to share between threads.

    Args:
        tokenizer: A byte-level BPE.
        words: See `exact_words`.
        capacity_bytes: Most memory for words. What was not asked for while half of it was used up goes.
    """

    def __init__(self, tokenizer: Tokenizer, words: re.Pattern[str], capacity_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._split = words.findall
        self._words_max = capacity_bytes // 2 // _ENTRY_BYTES
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}

    def encode(self, text: str) -> TokenIds:
        """The ids of a text, without special tokens around it."""
        words = self._split(text)
        known = list(map(self._young.get, words))
        if None in known:
            fresh = self._fresh({word for word, ids in zip(words, known, strict=True) if ids is None})
            known = [fresh[word] if ids is None else ids for word, ids in zip(words, known, strict=True)]
        # Writable: kernels are compiled anew for arrays that are not.
        return np.frombuffer(bytearray().join(known), np.uint32)  # type: ignore[arg-type]  # none is None now

    def _fresh(self, words: set[str]) -> dict[str, bytes]:
        """The ids of words that have not been asked for lately, which are remembered."""
        old = self._old
        ids = {word: old[word] for word in words if word in old}
        unknown = [word for word in words if word not in ids]
        for word, encoding in zip(unknown, self._encode(unknown), strict=True):
            ids[word] = array("I", encoding.ids).tobytes()
        for word, known in ids.items():
            if len(word) <= _WORD_CHARS_MAX:
                self._remember(word, known)
        return ids

    def _encode(self, words: Sequence[str]) -> list[Encoding]:
        if sum(map(len, words)) > _INLINE_CHARS:
            return encode_together(self._tokenizer, words)
        return [self._tokenizer.encode(word, add_special_tokens=False) for word in words]

    def _remember(self, word: str, ids: bytes) -> None:
        # Threads that meet here forget more than they have to, which costs time and no exactness.
        if len(self._young) >= self._words_max:
            self._old, self._young = self._young, {}
        self._young[word] = ids
