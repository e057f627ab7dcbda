"""Tokenization exactly as engines do it; shared by the router and the model server."""

from tokenization.encoder import TokenIds
from tokenization.errors import (
    MediaPromptError,
    PromptError,
    PromptTooLongError,
    TokenizationError,
    TokenizerLoadError,
    UnsupportedPromptError,
)
from tokenization.incremental import IncrementalDecoder
from tokenization.tokenizer import TINY_DIRECTORY, PromptTokenizer

__all__ = [
    "TINY_DIRECTORY",
    "IncrementalDecoder",
    "MediaPromptError",
    "PromptError",
    "PromptTokenizer",
    "PromptTooLongError",
    "TokenIds",
    "TokenizationError",
    "TokenizerLoadError",
    "UnsupportedPromptError",
]
