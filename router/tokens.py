"""A request's prompts as the engine's own token ids, or the reason why they are not known.

Knows which model has which tokenizer and how long a pick may wait for it; knows nothing of pods or keys.
Never fails a request for its own lack: routing then goes by load alone, and says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from router.errors import RequestError, TokenizerUnavailableError
from router.pods import Pod
from router.prompt_tokens import (
    LONGER_THAN_CONTEXT,
    PromptTokens,
    given,
    known_prompts,
    refused,
    too_much,
    unknown,
)
from router.request import RequestKind, RouteRequest
from router.tokenizer_pool import PoolFullError, TokenizerPool
from router.tokenizer_sources import RemoteTokenizer, open_source
from tokenization import PromptError, PromptTokenizer
from tokenization.chat_messages import ITEMS_AT_ONCE_MAX, ManyItemsError, items_of
from tokenization.openai_prompts import PromptLimits

__all__ = ["LONGER_THAN_CONTEXT", "PromptTokens", "TokenizeOptions", "TokenizerRegistry"]

_log = logging.getLogger(__name__)

# Bodies that are read, rendered and encoded in a millisecond or two, by the library alone in three.
_INLINE_BODY_BYTES = 128 << 10
_INLINE_LIBRARY_BODY_BYTES = 8 << 10
# Token ids in prompts: only the engine knows its embeddings' padding, and refuses what is beyond it.
_ANY_ID = 1 << 31
# What is turned into a chat's messages.
_DECODED_ITEMS = {RequestKind.MESSAGES: "messages", RequestKind.RESPONSES: "input"}


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How long a pick may wait for its tokens, and what goes on at once.

    Attributes:
        deadline_s: Later than this the request is picked by load alone.
        threads: Prompts tokenized at once, beside those that are short.
        waiting_max: Prompts that may wait for one of these threads.
    """

    deadline_s: float = 0.05
    threads: int = 2
    waiting_max: int = 64


class TokenizerRegistry:
    """Tokenizers by base model; safe to call from any thread.

    Args:
        tokenizers: Those in this process.
        remotes: Those elsewhere.
        options: Deadline and bounds.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, PromptTokenizer],
        remotes: Mapping[str, RemoteTokenizer] | None = None,
        options: TokenizeOptions | None = None,
    ) -> None:
        self._tokenizers = dict(tokenizers)
        self._remotes = dict(remotes or {})
        self._options = options or TokenizeOptions()
        self._pool = TokenizerPool(self._options.threads, self._options.waiting_max)
        self._missed: set[str] = set()

    @classmethod
    def load(
        cls, sources: Mapping[str, Path | str], options: TokenizeOptions | None = None
    ) -> TokenizerRegistry:
        """Opens the tokenizer of every base model; see `tokenizer_sources` for what may be named.

        Raises:
            ConfigError: A source is misspelled or cannot be used.
        """
        tokenizers: dict[str, PromptTokenizer] = {}
        remotes: dict[str, RemoteTokenizer] = {}
        for model, source in sources.items():
            opened = open_source(model, str(source))
            if isinstance(opened, PromptTokenizer):
                tokenizers[model] = opened
            else:
                remotes[model] = opened
        return cls(tokenizers, remotes, options)

    @property
    def asks_others(self) -> bool:
        """Whether a model's tokens come from another process."""
        return bool(self._remotes)

    @property
    def local(self) -> Mapping[str, PromptTokenizer]:
        """Those in this process, by base model."""
        return self._tokenizers

    def close(self) -> None:
        """Ends threads and connections."""
        self._pool.close()
        for remote in self._remotes.values():
            remote.close()

    def prompt_tokens(
        self,
        request: RouteRequest,
        base_model: str | None,
        context_tokens: int | None = None,
        pods: Sequence[Pod] = (),
    ) -> PromptTokens:
        """Tokenizes a request, or tells within the deadline why not.

        Args:
            request: The request.
            base_model: The base of the request's model, whose tokenizer its adapters share.
            context_tokens: Longest prompt that any pod takes; longer text is not encoded. None: unknown.
            pods: Pods that serve the model, which may be asked for its tokens.

        Raises:
            RequestError: 400, when the prompt is not what the API allows.
        """
        if request.kind is RequestKind.PASSTHROUGH:
            return unknown(request, "passthrough")
        if (known := too_much(request, context_tokens) or given(request)) is not None:
            return known
        tokenizer, remote = self._tokenizers.get(base_model or ""), self._remotes.get(base_model or "")
        if tokenizer is None and remote is None:
            return unknown(request, "no_tokenizer")
        try:
            if tokenizer is not None:
                return self._local(request, tokenizer, context_tokens)
            assert remote is not None
            tokens = self._remote(request, remote, context_tokens, pods)
            self._missed.discard(base_model or "")
            return tokens
        except PromptError as error:
            return refused(request, error)
        except RequestError:
            raise
        except TimeoutError:
            return unknown(request, "tokenize_deadline")
        except PoolFullError:
            return unknown(request, "tokenize_queue_full")
        except TokenizerUnavailableError as error:
            self._miss(base_model or "", error)
            return unknown(request, "tokenizer_unavailable")
        except Exception:
            # Whatever a tokenizer trips over must cost this request its cache, not its answer.
            _log.debug("request %s cannot be tokenized", request.request_id, exc_info=True)
            return unknown(request, "tokenize_error")

    def _local(
        self, request: RouteRequest, tokenizer: PromptTokenizer, context_tokens: int | None
    ) -> PromptTokens:
        """Encodes here what is short, and the rest on a thread that it waits for."""
        chars_max = None if context_tokens is None else context_tokens * tokenizer.token_chars_max
        limits = PromptLimits(chars_max, context_tokens, ids_below=_ANY_ID)
        started_s = time.monotonic()
        if not _is_large(request, tokenizer):
            try:
                return known_prompts(request, tokenizer, replace(limits, items_max=ITEMS_AT_ONCE_MAX))
            except ManyItemsError:
                pass  # a chat's messages are text still: how many they are is seen when they are read
        left_s = self._options.deadline_s - (time.monotonic() - started_s)
        return self._pool.run(partial(known_prompts, request, tokenizer, limits), max(0.0, left_s))

    def _remote(
        self,
        request: RouteRequest,
        remote: RemoteTokenizer,
        context_tokens: int | None,
        pods: Sequence[Pod],
    ) -> PromptTokens:
        timeout_s = self._options.deadline_s
        if remote.keeps_deadline:
            return remote.prompt_tokens(request, context_tokens, pods, timeout_s)
        return self._pool.run(
            lambda: remote.prompt_tokens(request, context_tokens, pods, timeout_s), timeout_s
        )

    def _miss(self, model: str, error: TokenizerUnavailableError) -> None:
        """Tells of the first of several requests that get no answer; all are counted by their reason."""
        if model not in self._missed:
            self._missed.add(model)
            _log.warning(
                "no tokens for the model %s, its requests are picked by load alone: %s", model, error
            )


def _is_large(request: RouteRequest, tokenizer: PromptTokenizer) -> bool:
    """Whether to tokenize a request may take long, as far as its size and number of items say."""
    is_fast = tokenizer.encoding_facts.is_fast
    if request.body_bytes > (_INLINE_BODY_BYTES if is_fast else _INLINE_LIBRARY_BODY_BYTES):
        return True
    return items_of(request.body.get(_DECODED_ITEMS.get(request.kind, ""))) > ITEMS_AT_ONCE_MAX
