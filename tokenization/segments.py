"""Encoding piece by piece: text in, the ids of the whole text out, most of them from memory.

A tokenizer cuts text at its special tokens before anything else and encodes what lies between on its own. So
these segments can be encoded, and remembered, apart: the next turn of a conversation costs only its new text.
Knows no chat templates.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cachetools import LRUCache
from tokenizers import AddedToken, Tokenizer


class SegmentEncoder:
    """Encodes without post-processing (no BOS is added), exactly as the tokenizer would the whole text.

    Args:
        tokenizer: Must be `segmentable`.
        capacity_bytes: Most memory for remembered segments; the least recently used go first.
    """

    def __init__(self, tokenizer: Tokenizer, capacity_bytes: int) -> None:
        self._tokenizer = tokenizer
        tokens = {token.content: token_id for token_id, token in _cutting(tokenizer).items()}
        self._token_ids = tokens
        # The longest first: of two that begin alike the library, too, takes the longer one.
        longest_first = sorted(tokens, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._lock = threading.Lock()
        self._segments: LRUCache[str, _Segment] = LRUCache(capacity_bytes, getsizeof=_Segment.size_of)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = []
        # A pattern with one group: segments at even places, the tokens between them at odd ones.
        for at, part in enumerate(self._cut.split(text)):
            if at % 2:
                ids.append(self._token_ids[part])
            elif part:
                ids.extend(self._segment(part))
        return ids

    def _segment(self, text: str) -> array[int]:
        with self._lock:
            known = self._segments.get(text)
        if known is not None:
            return known.ids
        ids = array("I", self._tokenizer.encode(text, add_special_tokens=False).ids)
        segment = _Segment(ids, sys.getsizeof(text) + sys.getsizeof(ids))
        if segment.size_bytes <= self._segments.maxsize:
            with self._lock:
                self._segments[text] = segment
        return ids


class _Segment(NamedTuple):
    ids: array[int]
    size_bytes: int

    @staticmethod
    def size_of(segment: _Segment) -> int:
        return segment.size_bytes


def segmentable(tokenizer: Tokenizer) -> bool:
    """Whether cutting at special tokens is exact for this tokenizer; False where that is in doubt."""
    cutting = [token.content for token in _cutting(tokenizer).values()]
    others = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return bool(cutting) and not _depends_on_place(tokenizer) and not _overlap(cutting, others)


def _cutting(tokenizer: Tokenizer) -> Mapping[int, AddedToken]:
    """Added tokens that are found in the raw text, whatever stands around them."""
    return {
        token_id: token
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.content and not (token.normalized or token.single_word or token.lstrip or token.rstrip)
    }


def _depends_on_place(tokenizer: Tokenizer) -> bool:
    """Whether a piece's ids depend on its standing first in the text."""
    return any(
        node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first"
        for node in _nodes(json.loads(tokenizer.to_str()).get("pre_tokenizer"))
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
