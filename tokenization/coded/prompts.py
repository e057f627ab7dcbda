"""What the libraries that build prompts have in common: types, errors, and limits on their input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tokenization.errors import TokenizerLoadError, UnsupportedPromptError

TokenIds: TypeAlias = NDArray[np.uint32]

# Limits of what a library, which holds Python's lock, does in 0.2 s.
_CHARS_MAX = 1 << 20
_MESSAGES_MAX = 2000
_RUN_CHARS_MAX = 1000
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_MARKS = r"!-/:-@\[-`{-~\u2010-\u2027\u2030-\u205e\u3001-\u3029\uff01-\uff0f\uff1a-\uff20"
# Runs that an encoder may take for one word, punctuation or white space. Lookbehind keeps the search linear.
_KINDS = (rf"[^\d{_SPACES}{_MARKS}]", rf"[^\w{_SPACES}]", rf"[{_SPACES}]")
_LONG_RUN = re.compile("|".join(f"(?<!{kind}){kind}{{{_RUN_CHARS_MAX},}}" for kind in _KINDS))


def check_texts(values: Sequence[object]) -> None:
    """Reject messages and tools with very much text or long words, whose encoding takes quadratic time.

    Raises:
        UnsupportedPromptError: There are too many of them, or a word or the sum of all texts is too long.
    """
    chars, pending = 0, list(values)
    if len(pending) > _MESSAGES_MAX:
        raise unsupported("more messages than the model's library renders at once")
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str):
            chars += len(value)
            is_long = len(value) >= _RUN_CHARS_MAX and _LONG_RUN.search(value.replace("_", "-"))
            if is_long or chars > _CHARS_MAX:
                raise unsupported("a text or a word is too long for the model's library")


def unsupported(message: str) -> UnsupportedPromptError:
    """Return the error for a chat that cannot be turned into ids here."""
    return UnsupportedPromptError(message, "messages")


def missing_library(model: str, library: str) -> TokenizerLoadError:
    """Return the error for a model whose library is not installed."""
    return TokenizerLoadError(f"{model} needs the library {library}; pip install 'kvroute[models]'")
