"""The text of single token ids, for tokenizers that decode by joining the bytes of each id.

In: a library tokenizer. Out: by id, the text that it adds wherever it stands. Remembered, because generation
asks for it with every token; as many entries as a model has ids.
"""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

REPLACEMENT = "\ufffd"


class OwnTexts(dict[int, str | None]):
    """By token id; None for an id that may hold a part of a character only.

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
        own = self[token_id] = None if REPLACEMENT in text else text
        return own


def own_texts(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> OwnTexts | None:
    """What single ids mean; None where that depends on the ids around them."""
    if not isinstance(tokenizer.decoder, ByteLevel):
        return None
    return OwnTexts(tokenizer, skip_special_tokens=skip_special_tokens)
