"""Text to token ids, exactly as the `tokenizers` library encodes it; knows no chat templates."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tokenization.errors import TokenizerLoadError, UnsupportedPromptError
from tokenization.fast_encoder import EncodingFacts, FastEncoder, TokenIds

# The library reads it at each call. Its threads take part in every call, also in those of a few words, and
# cost more than these do; whoever has set it otherwise means it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextEncoder:
    """Encodes as the tokenizer does; safe to share between threads.

    Raises:
        TokenizerLoadError: Post-processing is of a kind that is not known.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head, self._tail = _affixes(tokenizer)
        cutting = _cutting(tokenizer) if is_segmentable(tokenizer) else []
        longest_first = sorted(cutting, key=len, reverse=True)
        self._special_tokens = re.compile("|".join(map(re.escape, longest_first))) if cutting else None
        # Those that what follows may turn into another, longer one.
        self._extensible = {
            token for token in cutting for other in cutting if other != token and other.startswith(token)
        }
        self._fast = FastEncoder.of(tokenizer, self._by_library)

    @property
    def affix_tokens(self) -> tuple[int, int]:
        """How many tokens `add_special_tokens` adds before and behind a text."""
        return len(self._head), len(self._tail)

    @property
    def facts(self) -> EncodingFacts:
        """How texts are encoded so far."""
        fast = self._fast
        return EncodingFacts(False, 0, 0) if fast is None else fast.facts

    def encode(self, text: str, *, add_special_tokens: bool = False) -> TokenIds:
        """Encode a text.

        Raises:
            UnsupportedPromptError: The text holds half of a surrogate pair.
        """
        ids = None if self._fast is None else self._fast.encode(text)
        if ids is None:
            ids = self._by_library(text)
        if not add_special_tokens:
            return ids
        # Not np.concatenate, which gives up the GIL: to have it back may take longer than to copy.
        return np.frombuffer(bytearray().join((self._head, ids, self._tail)), np.uint32)  # type: ignore[arg-type]

    def closed_prefix(self, text: str) -> str:
        """The part of `text` whose ids are the same whatever follows: up to its last special token."""
        finder = self._special_tokens
        if finder is None:
            return ""
        ends = [found.end() for found in finder.finditer(text) if found.group() not in self._extensible]
        return text[: ends[-1]] if ends else ""

    def _by_library(self, text: str) -> TokenIds:
        try:
            # As a batch: one text alone it encodes with the GIL held.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:  # of a text, what has no UTF-8 form
            raise UnsupportedPromptError("the prompt holds half of a surrogate pair", "prompt") from error
        return _array(encoding.ids)


def is_segmentable(tokenizer: Tokenizer) -> bool:
    """Whether cutting at special tokens is exact for this tokenizer; False where that is in doubt."""
    cutting = _cutting(tokenizer)
    others = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return bool(cutting) and not _depends_on_place(tokenizer) and not _overlap(cutting, others)


def _cutting(tokenizer: Tokenizer) -> list[str]:
    """Added tokens that are found in the raw text, whatever stands around them."""
    return [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
    ]


def _affixes(tokenizer: Tokenizer) -> tuple[TokenIds, TokenIds]:
    """What post-processing puts before and behind every text."""
    whole = tokenizer.encode("a", add_special_tokens=True)
    added = whole.special_tokens_mask
    head = next((at for at, mark in enumerate(added) if not mark), len(added))
    tail = next((at for at, mark in enumerate(reversed(added)) if not mark), 0)
    if whole.ids[head : len(added) - tail] != tokenizer.encode("a", add_special_tokens=False).ids:
        raise TokenizerLoadError(
            "post_processor: does more than to put tokens before and behind a text, which is not supported"
        )
    return _array(whole.ids[:head]), _array(whole.ids[len(added) - tail :])


def _array(ids: list[int]) -> TokenIds:
    return np.frombuffer(array("I", ids), np.uint32)


def _depends_on_place(tokenizer: Tokenizer) -> bool:
    """Whether a piece's ids depend on its standing first in the text."""
    return any(
        node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first"
        for node in _nodes(_pre_tokenizer(tokenizer))
    )


def _nodes(node: Any) -> Iterable[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for child in node.get("pretokenizers") or []:
            yield from _nodes(child)


def _overlap(cutting: Sequence[str], others: Sequence[str]) -> bool:
    """Whether some text could be cut in two ways: one token's end is another's beginning, or lies within."""
    beginnings = {token[:length] for token in cutting for length in range(1, len(token))}
    beginnings_of_others = {token[:length] for token in others for length in range(1, len(token))}
    ends = {token[-length:] for token in others for length in range(1, len(token))}
    ends_of_cutting = {token[-length:] for token in cutting for length in range(1, len(token))}
    if beginnings & ends or beginnings_of_others & ends_of_cutting:
        return True
    within = re.compile("|".join(map(re.escape, sorted(cutting, key=len, reverse=True))))
    return any((found := within.search(token)) and found.group() != token for token in others)


def _pre_tokenizer(tokenizer: Tokenizer) -> Any:
    """The pre-tokenizer as tokenizer.json writes it; None where there is none."""
    part = tokenizer.pre_tokenizer
    return None if part is None else json.loads(part.__getstate__())
