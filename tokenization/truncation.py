"""`truncate_prompt_tokens`: a request's wish to have its prompt cut, as vLLM's server grants it.

A body in, a rule out that cuts token ids. What post-processing adds counts; it stays unless a side is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenization.errors import PromptError, UnsupportedPromptError
from tokenization.fast_encoder import TokenIds

_FIELD = "truncate_prompt_tokens"
_TO_CONTEXT = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens of a prompt stay.

    Attributes:
        tokens_max: Most tokens; None keeps all.
        keeps_end: Whether the last ones stay; else the first.
        keeps_affixes: Whether what post-processing adds stays in any case.
    """

    tokens_max: int | None = None
    keeps_end: bool = True
    keeps_affixes: bool = True

    def apply(self, ids: TokenIds, head_tokens: int, tail_tokens: int) -> TokenIds:
        """Cuts a prompt of which so many tokens at either end come from post-processing.

        Raises:
            PromptError: What post-processing adds is alone longer than the limit.
        """
        if self.tokens_max is None or len(ids) <= self.tokens_max:
            return ids
        if not self.keeps_affixes or self.tokens_max == 0:
            head_tokens = tail_tokens = 0
        room = self.tokens_max - head_tokens - tail_tokens
        if room < 0:
            raise PromptError(
                f"{_FIELD} leaves no room for the {head_tokens + tail_tokens} special tokens", _FIELD
            )
        end = len(ids) - tail_tokens
        kept = ids[end - room : end] if self.keeps_end else ids[head_tokens : head_tokens + room]
        return np.concatenate((ids[:head_tokens], kept, ids[end:]))


WHOLE = Truncation()


def truncation_of(body: Mapping[str, Any], context_tokens: int | None, output_tokens: int) -> Truncation:
    """Reads the fields of a request.

    Args:
        body: The decoded JSON.
        context_tokens: The most that may be asked for; -1 leaves one of them to the answer. None: not known.
        output_tokens: The most that the answer may have; 0 where none is asked for.

    Raises:
        PromptError: A field has the wrong type or is out of range.
        UnsupportedPromptError: The prompt is to be cut to a context that is not known.
    """
    wanted = body.get(_FIELD)
    if wanted is None:
        return WHOLE
    if type(wanted) is not int or wanted < _TO_CONTEXT:
        raise PromptError(f"{_FIELD} must be a whole number of at least {_TO_CONTEXT}", _FIELD)
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise PromptError("truncation_side must be left or right", "truncation_side")
    if context_tokens is None:
        if wanted == _TO_CONTEXT:
            raise UnsupportedPromptError("the model's context is not known", _FIELD)
    elif wanted > context_tokens:
        raise PromptError(f"{_FIELD} is more than the {context_tokens} tokens of the context", _FIELD)
    elif wanted == _TO_CONTEXT:
        wanted = context_tokens - (1 if output_tokens else 0)
    return Truncation(wanted, keeps_end=side != "right", keeps_affixes=side is None)
