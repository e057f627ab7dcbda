"""Incremental decoder: turns generated token ids into text as soon as the text is final."""

from __future__ import annotations

from tokenization.tokenizer import REPLACEMENT, PromptTokenizer

# A UTF-8 character has at most 4 bytes and a token at least one, so a character spans at most 4 tokens.
_CHARACTER_TOKENS_MAX = 4
_CONTEXT_TOKENS_MAX = 8


class IncrementalDecoder:
    """Decoder of one request's generated ids; the concatenated output equals decoding all ids at once.

    Text that ends in U+FFFD may contain the first bytes of a character. It is held back for at most as many
    tokens as a character can span.
    """

    def __init__(self, tokenizer: PromptTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._token_texts = tokenizer.token_texts(skip_special_tokens=skip_special_tokens)
        # Last emitted tokens, decoded again as context, because decoders may drop a leading space.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add the next id and return the text that became final; may be empty."""
        if self._token_texts is not None and not self._pending:
            text = self._token_texts[token_id]
            if text is not None:
                return text
        # A skipped token does not end a character, which may continue after it.
        if token_id in self._skipped_ids:
            return ""
        self._pending.append(token_id)
        for held in range(min(_CHARACTER_TOKENS_MAX, len(self._pending))):
            text = self._emit_all_but(held)
            if text is not None:
                return text
        return ""

    def flush(self) -> str:
        """Return the text that was held back, when the request has ended."""
        before, after = self._context_text, self._decode(self._context + self._pending)
        self._context, self._context_text, self._pending = [], "", []
        return after[len(before) :]

    def _emit_all_but(self, held: int) -> str | None:
        """Emit the pending text without the last `held` tokens, or None if that would split a character."""
        cut = len(self._pending) - held
        before = self._context_text
        final = self._decode(self._context + self._pending[:cut])
        if held == 0:
            if final.endswith(REPLACEMENT):
                return None
        elif cut == 0 or len(self._pending) <= _CHARACTER_TOKENS_MAX:
            return None
        else:
            rest = self._decode(self._pending[cut:])
            if final + rest != self._decode(self._context + self._pending):
                return None
        emitted, self._pending = self._pending[:cut], self._pending[cut:]
        # Restarted only when it is full, because the text of a growing context is already known.
        if len(self._context) < _CONTEXT_TOKENS_MAX:
            self._context, self._context_text = self._context + emitted, final
        else:
            self._context, self._context_text = emitted, self._decode(emitted)
        return final[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
