"""Incremental decoding: token ids in one at a time, text out as soon as it can no longer change.

Knows only `decode` and the texts of single ids; knows nothing of requests or streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from tokenization.tokenizer import PromptTokenizer

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes in UTF-8 and a token at least one: it spans at most 4 tokens.
_CHARACTER_TOKENS_MAX = 4
_CONTEXT_TOKENS_MAX = 8


class OwnTexts(dict[int, str | None]):
    """Texts that single ids add wherever they stand; None for an id that may hold a part of a character.

    Remembered, because generation asks with every token; as many entries as a model has ids.

    Args:
        tokenizer: Its decoder is `ByteLevel`.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special_tokens)
        own = self[token_id] = None if _REPLACEMENT in text else text
        return own


class IncrementalDecoder:
    """Turns one request's generated ids into text; what it has emitted, joined, is the decoding of them all.

    A tail that ends in U+FFFD may be the first bytes of a character and is held back, for at most as many
    tokens as a character can have.
    """

    def __init__(self, tokenizer: PromptTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._own_texts = tokenizer.own_texts(skip_special_tokens=skip_special_tokens)
        # Decoders may drop a leading space: the last emitted tokens are decoded again as context.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes the next id and returns the text that is now final, often one word, sometimes nothing."""
        if self._own_texts is not None and not self._pending:
            text = self._own_texts[token_id]
            if text is not None:
                return text
        # It separates nothing: a character may have begun before it and end behind it.
        if token_id in self._skipped_ids:
            return ""
        self._pending.append(token_id)
        for held in range(min(_CHARACTER_TOKENS_MAX, len(self._pending))):
            text = self._emit_all_but(held)
            if text is not None:
                return text
        return ""

    def flush(self) -> str:
        """Returns what was held back: the request has ended, no byte will complete it."""
        before, after = self._context_text, self._decode(self._context + self._pending)
        self._context, self._context_text, self._pending = [], "", []
        return after[len(before) :]

    def _emit_all_but(self, held: int) -> str | None:
        """Emits the pending text without the last `held` tokens, or None where that would cut a character."""
        cut = len(self._pending) - held
        before = self._context_text
        final = self._decode(self._context + self._pending[:cut])
        if held == 0:
            if final.endswith(_REPLACEMENT):
                return None
        elif cut == 0 or len(self._pending) <= _CHARACTER_TOKENS_MAX:
            return None
        else:
            rest = self._decode(self._pending[cut:])
            if final + rest != self._decode(self._context + self._pending):
                return None
        emitted, self._pending = self._pending[:cut], self._pending[cut:]
        # Begun anew only now and then: the text of a context that grows is known already.
        if len(self._context) < _CONTEXT_TOKENS_MAX:
            self._context, self._context_text = self._context + emitted, final
        else:
            self._context, self._context_text = emitted, self._decode(emitted)
        return final[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
