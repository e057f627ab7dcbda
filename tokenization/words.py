"""Short texts word by word: a text in, its ids out, those of known words from memory.

A language has few words, and the library takes 0.2 us for each character of them, known or not. Words are
what lies between exact cuts (see `cuts`), so their ids are those that they have in the text.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import chain

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
# Text and ids of a word with their entry, as most words are.
_ENTRY_BYTES = 256


class WordEncoder:
    """Encodes as the tokenizer does; safe to share between threads.

    Args:
        tokenizer: A byte-level BPE.
        words: See `exact_words`.
        specials: Finds special tokens at which any text may be cut, and captures them; None: there are none.
        capacity_bytes: Most memory for words. What was not asked for while half of it was used up goes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        words: re.Pattern[str],
        specials: re.Pattern[str] | None,
        capacity_bytes: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._find = words.findall
        self._specials = specials
        self._words_max = capacity_bytes // 2 // _ENTRY_BYTES
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}

    def encode(self, text: str) -> TokenIds:
        """The ids of a text, without special tokens around it."""
        words = self._words(text)
        known = list(map(self._young.get, words))
        try:
            joined = b"".join(known)  # type: ignore[arg-type]  # None is what it stops at
        except TypeError:
            fresh = self._fresh({word for word, ids in zip(words, known, strict=True) if ids is None})
            joined = b"".join(
                [fresh[word] if ids is None else ids for word, ids in zip(words, known, strict=True)]
            )
        # Writable: kernels are compiled anew for arrays that are not.
        return np.frombuffer(bytearray(joined), np.uint32)

    def _words(self, text: str) -> list[str]:
        if self._specials is None:
            return self._find(text)
        # A special token is one word, whatever stands beside it.
        return list(chain.from_iterable(map(self._find, self._specials.split(text))))

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
