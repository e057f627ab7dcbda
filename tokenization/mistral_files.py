"""Whether engines read and write a model's prompts by `mistral-common`: its directory in, an answer out.

vLLM's rule: the directory holds Mistral's own form of the tokenizer and of the weights. Chats then have no
template, and a special token's text within a prompt is text. Knows only the files' names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

_TEKKEN, _SENTENCEPIECE = "tekken.json", "tokenizer.model.v*"
_OWN_WEIGHTS, _WEIGHTS = "consolidated*.safetensors", "*.safetensors"
_ANY_TEXT = re.compile("")


class MistralForm(Enum):
    """A tokenizer of Mistral's own."""

    TEKKEN = "tekken"
    SENTENCEPIECE = "sentencepiece"

    def read_otherwise(self, special_tokens: Iterable[str]) -> re.Pattern[str]:
        """What is in every text that `tokenizer.json` may turn into other ids than this form does.

        Args:
            special_tokens: The texts of those in tokenizer.json.
        """
        if self is MistralForm.SENTENCEPIECE:
            return _ANY_TEXT
        texts = [re.escape(text) for text in special_tokens]
        # A pattern of nothing would be found everywhere.
        return re.compile("|".join(texts) if texts else "(?!)")


def mistral_form(directory: Path) -> MistralForm | None:
    """The form that engines take for this model; None: they take `tokenizer.json`.

    Without any weights the directory does not tell, and Mistral's tokenizer is taken for the engines' own:
    rather no ids than wrong ones.
    """
    if (directory / _TEKKEN).is_file():
        form = MistralForm.TEKKEN
    elif any(directory.glob(_SENTENCEPIECE)):
        form = MistralForm.SENTENCEPIECE
    else:
        return None
    is_told = any(directory.glob(_OWN_WEIGHTS)) or not any(directory.glob(_WEIGHTS))
    return form if is_told else None
