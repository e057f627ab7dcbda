"""What a render endpoint answers, checked: JSON in, prompts and their media items out.

The form is vLLM's GenerateRequest, see `prompt_media`. Knows no HTTP.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec
import numpy as np

from router.prompt_media import MediaFeatures, known_part
from router.prompt_tokens import PromptTokens, known_parts
from router.request import RequestKind


class _Rendered(msgspec.Struct):
    """What is read of a rendered prompt; one without ids is none."""

    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    features: MediaFeatures | None = None


def read_rendered(kind: RequestKind, data: bytes) -> PromptTokens:
    """Reads the answer to a request of this kind: a list of prompts for completions, else one prompt.

    Raises:
        ValueError: It is no such answer, or what it tells of media items cannot be.
        OverflowError: A token id is out of range.
        RecursionError: It is nested too deeply.
    """
    several = kind is RequestKind.COMPLETIONS
    form: Any = list[_Rendered] if several else _Rendered
    answer = msgspec.json.decode(data, type=form)
    rendered: list[_Rendered] = answer if several else [answer]
    prompts = [np.frombuffer(array("I", prompt.token_ids), np.uint32) for prompt in rendered]
    parts = [known_part(ids, prompt.features) for ids, prompt in zip(prompts, rendered, strict=True)]
    return known_parts(parts, sum(map(len, prompts)))
