"""Errors of tokenization.

TokenizationError
├── TokenizerLoadError       a tokenizer directory cannot be used
└── PromptError              the request's prompt is invalid; names the field
    ├── PromptTooLongError       rejected before it is encoded
    └── UnsupportedPromptError   valid, but this tokenizer cannot turn it into ids
        └── MediaPromptError         it contains an image, audio or video
"""

from __future__ import annotations


class TokenizationError(Exception):
    """Base class of this package's errors."""


class TokenizerLoadError(TokenizationError):
    """A tokenizer's files are missing or broken; the message names the file."""


class PromptError(TokenizationError):
    """The prompt in a request is malformed."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param  # the invalid field of the request, as in OpenAI's error body


class PromptTooLongError(PromptError):
    """The prompt's text is longer than the caller allows."""

    def __init__(self, chars: int, chars_max: int, param: str) -> None:
        super().__init__(f"the prompt has {chars} characters, more than {chars_max}; shorten it", param)
        self.chars = chars


class UnsupportedPromptError(PromptError):
    """The prompt is valid, but part of it cannot be turned into token ids here."""


class MediaPromptError(UnsupportedPromptError):
    """A message contains an image, audio or video; the prompt is known up to it."""
