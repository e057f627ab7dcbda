"""Text to token ids exactly as engines do it, and back; shared by router, indexer and model server."""

from tokenization.errors import (
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
    "PromptError",
    "PromptTokenizer",
    "PromptTooLongError",
    "TokenizationError",
    "TokenizerLoadError",
    "UnsupportedPromptError",
]
