"""What can go wrong between a request's text and its token ids.

TokenizationError
├── TokenizerLoadError       a tokenizer directory cannot be used
└── PromptError              the request's prompt is not what the API allows; names the field
    ├── PromptTooLongError       refused before it is encoded
    └── UnsupportedPromptError   allowed by the API, but not something this tokenizer can turn into ids
        └── MediaPromptError         it holds an image, sound or film
"""

from __future__ import annotations


class TokenizationError(Exception):
    """Root of this package's errors."""


class TokenizerLoadError(TokenizationError):
    """A tokenizer's files are missing or broken; the message names the file."""


class PromptError(TokenizationError):
    """The prompt in a request is malformed."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param  # the request's field that is wrong, as in OpenAI's error body


class PromptTooLongError(PromptError):
    """The prompt's text is longer than the caller allows."""

    def __init__(self, chars: int, chars_max: int, param: str) -> None:
        super().__init__(f"the prompt has {chars} characters, more than {chars_max}; shorten it", param)
        self.chars = chars


class UnsupportedPromptError(PromptError):
    """The prompt is well-formed, but holds something that has no token ids here."""


class MediaPromptError(UnsupportedPromptError):
    """A message holds an image, sound or film; what stands in front of it is known all the same."""
