"""A request's prompts as the engine's own token ids, or the reason why they are not known.

Knows which model has which tokenizer; knows nothing of pods or keys. Never fails a request for its own lack:
routing then goes by load alone, and says why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from router.errors import ConfigError, RequestError
from router.request import RequestKind, RouteRequest
from tokenization import (
    PromptError,
    PromptTokenizer,
    PromptTooLongError,
    TokenizerLoadError,
    UnsupportedPromptError,
)
from tokenization.openai_prompts import chat_prompt, completion_prompts

_log = logging.getLogger(__name__)

LONGER_THAN_CONTEXT = "longer_than_context"
"""Why a prompt that every engine will refuse is routed by load alone."""

_BYTES_PER_TOKEN = 4
_TOKEN_ID_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What is known of a request's prompts.

    Attributes:
        prompts: Token ids of every prompt (a completions request may hold several); empty when unknown.
        total: Number of prompt tokens, estimated from the body's size when unknown.
        degraded: Why the ids are not known; None when they are.
    """

    prompts: tuple[list[int], ...]
    total: int
    degraded: str | None = None


class TokenizerRegistry:
    """Tokenizers by base model name."""

    def __init__(self, tokenizers: Mapping[str, PromptTokenizer]) -> None:
        self._tokenizers = dict(tokenizers)

    @classmethod
    def load(cls, directories: Mapping[str, Path]) -> TokenizerRegistry:
        """Loads one tokenizer directory per model.

        Raises:
            ConfigError: A directory holds no usable tokenizer.
        """
        tokenizers = {}
        for model, directory in directories.items():
            try:
                tokenizers[model] = PromptTokenizer.from_directory(directory)
            except TokenizerLoadError as error:
                raise ConfigError(f"--tokenizer {model}={directory}: {error}") from error
        return cls(tokenizers)

    def prompt_tokens(
        self, request: RouteRequest, base_model: str | None, context_tokens: int | None = None
    ) -> PromptTokens:
        """Tokenizes a request.

        Args:
            base_model: The base of the request's model, whose tokenizer its adapters share.
            context_tokens: Longest prompt that any pod takes; longer text is not encoded. None: unknown.

        Raises:
            RequestError: 400, when the prompt is not what the API allows.
        """
        if request.kind is RequestKind.PASSTHROUGH:
            return _unknown(request, "passthrough")
        if (given := _given_ids(request)) is not None:
            return _known(given)
        tokenizer = self._tokenizers.get(base_model or "")
        if tokenizer is None:
            return _unknown(request, "no_tokenizer")
        chars_max = None if context_tokens is None else context_tokens * tokenizer.token_chars_max
        try:
            if request.kind is RequestKind.CHAT:
                return _known((chat_prompt(request.body, tokenizer, chars_max=chars_max),))
            return _known(tuple(completion_prompts(request.body, tokenizer, chars_max=chars_max)))
        except PromptTooLongError:
            return _unknown(request, LONGER_THAN_CONTEXT)
        except UnsupportedPromptError:
            return _unknown(request, "unsupported_prompt")
        except PromptError as error:
            raise RequestError(400, str(error), error.param) from error
        except Exception:
            # Whatever a tokenizer trips over must cost this request its cache, not its answer.
            _log.debug("request %s cannot be tokenized", request.request_id, exc_info=True)
            return _unknown(request, "tokenize_error")


def _given_ids(request: RouteRequest) -> tuple[list[int], ...] | None:
    """The ids of a completions prompt that is given as ids, which needs no tokenizer."""
    prompt = request.body.get("prompt") if request.kind is RequestKind.COMPLETIONS else None
    if not isinstance(prompt, list) or not prompt:
        return None
    prompts = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    for ids in prompts:
        if not all(type(item) is int and 0 <= item <= _TOKEN_ID_MAX for item in ids):
            return None
    return tuple(cast("list[list[int]]", prompts))


def _known(prompts: tuple[list[int], ...]) -> PromptTokens:
    return PromptTokens(prompts, sum(map(len, prompts)))


def _unknown(request: RouteRequest, reason: str) -> PromptTokens:
    return PromptTokens((), request.body_bytes // _BYTES_PER_TOKEN, reason)
