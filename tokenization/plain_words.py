"""Plain words' ids by the tokenizer's model alone: letters and ASCII's punctuation in, their ids out.

Most of what the library does for a word that it sees alone is to normalize and split it, with a regex. How
the known families split letters and the punctuation behind them is known: each is a piece. For tokenizers
whose texts fall into words, see `cuts.exact_words`.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

_PUNCTUATION = r"[!-/:-@\[-`{-~]*"
# One capital at most, and in front: some families cut inside of words, where capitals begin.
_PLAIN = re.compile(f"( ?[A-Z]?[a-z]+)({_PUNCTUATION})").fullmatch
_PART = re.compile(f" ?[A-Z]?[a-z]*{_PUNCTUATION}").fullmatch
# The space in the byte-level alphabet, in which all that is plain besides stands for itself.
_SPACE = "\u0120"


class PlainWords:
    """Encodes as the tokenizer does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenize = tokenizer.model.tokenize

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PlainWords | None:
        """For a tokenizer; None where an added token may be found in a plain word."""
        added = tokenizer.get_added_tokens_decoder().values()
        return None if any(_PART(token.content) for token in added) else cls(tokenizer)

    def ids(self, word: str) -> list[int] | None:
        """A word's ids, without special tokens around it; None for one that is not plain."""
        plain = _PLAIN(word)
        if plain is None:
            return None
        letters, punctuation = plain.groups()
        tokens = self._tokenize(letters.replace(" ", _SPACE))
        if punctuation:
            tokens += self._tokenize(punctuation)
        return [token.id for token in tokens]
