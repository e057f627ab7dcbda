"""A request's prompts as the engine's own token ids, or the reason why they are not known.

Knows which model has which tokenizer and how long a pick may wait for it; knows nothing of pods or keys.
Never fails a request for its own lack: routing then goes by load alone, and says why.

SOURCE of `--tokenizer MODEL=SOURCE` is one of

    DIR                       a directory that holds a tokenizer.json
    hf:OWNER/NAME@REVISION    the same, from the Hugging Face Hub (or its cache) at a pinned revision
    unix:PATH                 a `kvroute tokenizer` behind a Unix socket
    http://HOST:PORT          a server with vLLM's render endpoints
    pods                      the render endpoints of the model's own pods
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from router.errors import ConfigError, RequestError, TokenizerUnavailableError
from router.pods.pod_set import Pod
from router.prompts.prompt_tokens import (
    PromptTokens,
    given,
    known_prompts,
    refused,
    too_much,
    unknown,
)
from router.prompts.remote_tokenizers import RenderTokenizer, SidecarTokenizer
from router.prompts.request import RequestKind, RouteRequest
from tokenization import (
    ITEMS_AT_ONCE_MAX,
    ManyItemsError,
    PromptError,
    PromptLimits,
    PromptTokenizer,
    TokenizerLoadError,
    count_items,
    hub_directory,
)

_log = logging.getLogger(__name__)

_PODS = "pods"
_HUB = "hf:"
_SOCKET = "unix:"
_URLS = ("http://", "https://")

# Bodies that are read, rendered and encoded in a millisecond or two, by the library alone in three.
_INLINE_BODY_BYTES = 128 << 10
_INLINE_LIBRARY_BODY_BYTES = 8 << 10
# Token ids in prompts: only the engine knows its embeddings' padding, and refuses what is beyond it.
_ANY_ID = 1 << 31
# What is turned into a chat's messages.
_DECODED_ITEMS = {RequestKind.MESSAGES: "messages", RequestKind.RESPONSES: "input"}

_Tokenizer: TypeAlias = PromptTokenizer | SidecarTokenizer | RenderTokenizer


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How long a pick may wait for its tokens, and what goes on at once."""

    deadline_s: float = 0.05  # later than this the request is picked by load alone
    threads: int = 2  # prompts tokenized at once, beside those that are short
    waiting_max: int = 64  # prompts that may wait for one of these threads


class _QueueFullError(Exception):
    """As many prompts wait for a thread as may."""


class TokenizerRegistry:
    """Tokenizers by base model, in this process and elsewhere; safe to call from any thread."""

    def __init__(
        self,
        tokenizers: Mapping[str, _Tokenizer],
        options: TokenizeOptions | None = None,
    ) -> None:
        self._tokenizers = dict(tokenizers)
        self._options = options or TokenizeOptions()
        self._threads = ThreadPoolExecutor(self._options.threads, "tokenize")
        self._places = threading.BoundedSemaphore(self._options.threads + self._options.waiting_max)
        self._missed: set[str] = set()

    @classmethod
    def load(
        cls, sources: Mapping[str, Path | str], options: TokenizeOptions | None = None
    ) -> TokenizerRegistry:
        """Opens the tokenizer of every base model, see SOURCE above.

        Raises:
            ConfigError: A source is misspelled or cannot be used.
        """
        return cls({model: _open_source(model, str(source)) for model, source in sources.items()}, options)

    @property
    def asks_others(self) -> bool:
        """Whether a model's tokens come from another process."""
        return len(self.local) < len(self._tokenizers)

    @property
    def local(self) -> Mapping[str, PromptTokenizer]:
        """Those in this process, by base model."""
        tokenizers = self._tokenizers.items()
        return {model: one for model, one in tokenizers if isinstance(one, PromptTokenizer)}

    def close(self) -> None:
        # What waits is dropped, what runs ends by itself.
        self._threads.shutdown(wait=False, cancel_futures=True)
        for tokenizer in self._tokenizers.values():
            if not isinstance(tokenizer, PromptTokenizer):
                tokenizer.close()

    def prompt_tokens(
        self,
        request: RouteRequest,
        base_model: str | None,
        context_tokens: int | None = None,
        pods: Sequence[Pod] = (),
    ) -> PromptTokens:
        """Tokenizes a request, or tells within the deadline why not.

        Args:
            base_model: The base of the request's model, whose tokenizer its adapters share.
            context_tokens: Longest prompt that any pod takes; longer text is not encoded. None: unknown.

        Raises:
            RequestError: 400, when the prompt is not what the API allows.
        """
        if request.kind is RequestKind.PASSTHROUGH:
            return unknown(request, "passthrough")
        if (known := too_much(request, context_tokens) or given(request)) is not None:
            return known
        tokenizer = self._tokenizers.get(base_model or "")
        if tokenizer is None:
            return unknown(request, "no_tokenizer")
        try:
            if isinstance(tokenizer, PromptTokenizer):
                return self._local(request, tokenizer, context_tokens)
            timeout_s = self._options.deadline_s
            if isinstance(tokenizer, SidecarTokenizer):
                tokens = tokenizer.prompt_tokens(request, context_tokens, timeout_s)
            else:
                tokens = self._on_a_thread(partial(tokenizer.prompt_tokens, request, pods), timeout_s)
            self._missed.discard(base_model or "")
            return tokens
        except PromptError as error:
            return refused(request, error)
        except RequestError:
            raise
        except TimeoutError:
            return unknown(request, "tokenize_deadline")
        except _QueueFullError:
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
        return self._on_a_thread(partial(known_prompts, request, tokenizer, limits), max(0.0, left_s))

    def _on_a_thread(self, work: Callable[[], PromptTokens], timeout_s: float) -> PromptTokens:
        """Tokenizes on a thread.

        Raises:
            TimeoutError: It takes longer; it is not stopped.
            _QueueFullError: It has not begun, also where this is closed.
        """
        if not self._places.acquire(blocking=False):
            raise _QueueFullError
        try:
            future = self._threads.submit(work)
        except RuntimeError as error:
            self._places.release()
            raise _QueueFullError from error
        # Also called for what is cancelled before it ran.
        future.add_done_callback(lambda _: self._places.release())
        return future.result(timeout_s)

    def _miss(self, model: str, error: TokenizerUnavailableError) -> None:
        """Tells of the first of several requests that get no answer; all are counted by their reason."""
        if model not in self._missed:
            self._missed.add(model)
            _log.warning(
                "no tokens for the model %s, its requests are picked by load alone: %s", model, error
            )


def _open_source(model: str, source: str) -> _Tokenizer:
    """Opens a tokenizer; those in other processes are not asked yet.

    Raises:
        ConfigError: The source is misspelled, or a local one cannot be loaded; names the flag.
    """

    def checked(found: bool, form: str) -> None:
        if not found:
            raise ConfigError(f"--tokenizer {model}={source}: must have the form {form}")

    if source == _PODS:
        return RenderTokenizer(model, None)
    if source.startswith(_URLS):
        checked(len(source.partition("://")[2].strip("/")) > 0, "http://HOST:PORT")
        return RenderTokenizer(model, source.rstrip("/"))
    if source.startswith(_SOCKET):
        checked(len(source) > len(_SOCKET), "unix:PATH")
        return SidecarTokenizer(model, source.removeprefix(_SOCKET))
    if source.startswith(_HUB):
        repository, _, revision = source.removeprefix(_HUB).partition("@")
        checked(repository.count("/") == 1 and bool(revision), "hf:OWNER/NAME@REVISION")
        return _loaded(model, source, lambda: hub_directory(repository, revision))
    return _loaded(model, source, lambda: Path(source))


def _loaded(model: str, source: str, directory: Callable[[], Path]) -> PromptTokenizer:
    try:
        return PromptTokenizer.from_directory(directory())
    except TokenizerLoadError as error:
        raise ConfigError(f"--tokenizer {model}={source}: {error}") from error


def _is_large(request: RouteRequest, tokenizer: PromptTokenizer) -> bool:
    """Whether to tokenize a request may take long, as far as its size and number of items say."""
    is_fast = tokenizer.encoder.facts.is_fast
    if request.body_bytes > (_INLINE_BODY_BYTES if is_fast else _INLINE_LIBRARY_BODY_BYTES):
        return True
    return count_items(request.body.get(_DECODED_ITEMS.get(request.kind, ""))) > ITEMS_AT_ONCE_MAX
