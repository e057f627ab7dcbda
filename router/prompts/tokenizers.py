"""Tokenizers by model, with a deadline per pick.

If a tokenizer fails or is too slow, the request is routed by load alone, and the reason is recorded.

Where a model has no tokenizer here that reads a request, its pods render the prompt if they can.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from common.repeated_log import RepeatedLog
from router.errors import RequestError, TokenizerUnavailableError
from router.pods.pod_set import Pod
from router.prompts.prompt_tokens import MEDIA_TOKENS, given_token_ids, rejected_early, with_images
from router.prompts.remote_tokenizers import RenderBreaker, RenderTokenizer, SidecarTokenizer
from router.prompts.request import (
    LONGER_THAN_CONTEXT,
    MEDIA,
    PromptTokens,
    RequestKind,
    RouteRequest,
    known,
    unknown,
)
from tokenization import (
    ITEMS_AT_ONCE_MAX,
    ManyItemsError,
    MediaPromptError,
    PromptError,
    PromptLimits,
    PromptTokenizer,
    PromptTooLongError,
    UnsupportedPromptError,
    chat_prefix,
    chat_prompt,
    completion_prompts,
    count_items,
    image_chat,
    messages_as_chat,
    responses_as_chat,
)

_log = logging.getLogger(__name__)

# Bodies that are tokenized inline, in 1-2 ms by the fast encoder and 3 ms by the tokenizers library.
_INLINE_BODY_BYTES = 128 << 10
_INLINE_LIBRARY_BODY_BYTES = 8 << 10
# Accept any token id in prompts: only the engine knows its padded vocabulary, and checks against it.
_ANY_ID = 1 << 31
_RENDER_THREADS = 8  # threads that wait for render endpoints
# Fields that are converted to a chat's messages.
_AS_CHAT = (RequestKind.MESSAGES, RequestKind.RESPONSES)
_DECODED_ITEMS = {RequestKind.MESSAGES: "messages", RequestKind.RESPONSES: "input"}

Tokenizer: TypeAlias = PromptTokenizer | SidecarTokenizer | RenderTokenizer


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """Deadline and concurrency of tokenization."""

    deadline_s: float = 0.05  # after this time a request is routed by load alone
    threads: int = 2  # threads for large prompts; small ones are tokenized inline
    waiting_max: int = 64  # prompts queued for these threads


class _QueueFullError(Exception):
    """Raised when the queue of the tokenizer threads is full."""


class _Threads(NamedTuple):
    executor: ThreadPoolExecutor
    slots: threading.BoundedSemaphore

    @classmethod
    def start(cls, threads: int, waiting_max: int) -> _Threads:
        return cls(ThreadPoolExecutor(threads, "tokenize"), threading.BoundedSemaphore(threads + waiting_max))


@dataclass(eq=False)
class TokenizerRegistry:
    """Tokenizers by base model, in this process and in others. Thread-safe."""

    tokenizers: Mapping[str, Tokenizer | None]  # by base model; None: its requests are routed by load
    options: TokenizeOptions = field(default_factory=TokenizeOptions)
    # Called with the seconds and the outcome of each prompt that a server renders.
    observe: Callable[[float, str], None] = lambda _seconds, _outcome: None

    def __post_init__(self) -> None:
        self._threads = _Threads.start(self.options.threads, self.options.waiting_max)
        self._render_threads = _Threads.start(_RENDER_THREADS, self.options.waiting_max)
        # Models whose pods render without being told to.
        self._automatic: dict[str, tuple[RenderTokenizer, RenderBreaker]] = {}
        self._repeated = RepeatedLog(_log)
        self.waits: Callable[[], None] = lambda: None  # called when picks may begin to wait for pods

    @property
    def asks_others(self) -> bool:
        """Return whether any model's tokenizer is in another process."""
        return any(isinstance(one, SidecarTokenizer | RenderTokenizer) for one in self.tokenizers.values())

    @property
    def local(self) -> Mapping[str, PromptTokenizer]:
        """Tokenizers in this process, by base model."""
        tokenizers = self.tokenizers.items()
        return {model: one for model, one in tokenizers if isinstance(one, PromptTokenizer)}

    def renderings(self) -> dict[str, dict[str, Any]]:
        """Return the state of models whose pods render without being told to, by model."""
        now_s = time.monotonic()
        states = {model: breaker.state(now_s) for model, (_, breaker) in list(self._automatic.items())}
        return {model: {**state, "instead": _instead(model)} for model, state in states.items()}

    def close(self) -> None:
        # Drop queued work; running work ends by itself.
        for threads in (self._threads, self._render_threads):
            threads.executor.shutdown(wait=False, cancel_futures=True)
        automatic = (tokenizer for tokenizer, _ in self._automatic.values())
        for tokenizer in (*self.tokenizers.values(), *automatic):
            if isinstance(tokenizer, SidecarTokenizer | RenderTokenizer):
                tokenizer.close()

    def prompt_tokens(
        self,
        request: RouteRequest,
        base_model: str | None,
        context_tokens: int | None = None,
        pods: Sequence[Pod] = (),
    ) -> PromptTokens:
        """Tokenize a request within the deadline, or return the reason why it is degraded.

        Args:
            base_model: Base model of the request's model; its adapters share the tokenizer.
            context_tokens: Longest prompt that any pod accepts; longer text is not encoded. None if unknown.
            pods: Pods whose render endpoints may be used.

        Raises:
            RequestError: 400: the prompt is invalid for its API.
        """
        if request.kind is RequestKind.PASSTHROUGH:
            return unknown(request, "passthrough")
        if request.kind is RequestKind.COMPLETIONS:
            given = rejected_early(request, context_tokens) or given_token_ids(request)
            if given is not None:
                return given
        tokenizer = self.tokenizers.get(base_model or "")
        try:
            if tokenizer is None:
                return self._by_pods(request, base_model, pods) or unknown(request, "no_tokenizer")
            if isinstance(tokenizer, PromptTokenizer):
                if not reads_kind(request.kind, tokenizer):
                    rendered = self._by_pods(request, base_model, pods)
                    return rendered or unknown(request, "unsupported_prompt")
                return self._local(request, tokenizer, context_tokens)
            if isinstance(tokenizer, SidecarTokenizer):
                return tokenizer.prompt_tokens(request, context_tokens, self.options.deadline_s)
            return self._rendered(request, tokenizer, None, pods)
        except PromptTooLongError:
            return unknown(request, LONGER_THAN_CONTEXT)
        except UnsupportedPromptError:
            return unknown(request, "unsupported_prompt")
        except PromptError as error:
            if request.kind in _AS_CHAT:
                # The engine implements this API and returns a better error.
                return unknown(request, "unsupported_prompt")
            raise RequestError(400, str(error), error.param) from error
        except RequestError:
            raise
        except TimeoutError:
            return unknown(request, "tokenize_deadline")
        except _QueueFullError:
            return unknown(request, "tokenize_queue_full")
        except TokenizerUnavailableError as error:
            text = "tokenizer unavailable, routing by load alone: model=%s error=%s"
            self._repeated.event("tokenizer_unavailable", base_model or "", text, base_model, error)
            return unknown(request, "tokenizer_unavailable")
        except Exception:
            # An unexpected error of a tokenizer must not fail the request.
            _log.debug("tokenization failed: request=%s", request.request_id, exc_info=True)
            return unknown(request, "tokenize_error")

    def _local(
        self, request: RouteRequest, tokenizer: PromptTokenizer, context_tokens: int | None
    ) -> PromptTokens:
        """Tokenize a small request inline, and a large one on a thread within the deadline."""
        chars_max = None if context_tokens is None else context_tokens * tokenizer.token_chars_max
        limits = PromptLimits(chars_max, context_tokens, ids_below=_ANY_ID)
        started_s = time.monotonic()
        if not _is_large(request, tokenizer):
            try:
                return tokenize_prompts(request, tokenizer, replace(limits, items_max=ITEMS_AT_ONCE_MAX))
            except ManyItemsError:
                pass  # a chat's messages are unparsed, so their number is known only now
        left_s = self.options.deadline_s - (time.monotonic() - started_s)
        return self._run(self._threads, partial(tokenize_prompts, request, tokenizer, limits), left_s)

    def _by_pods(self, request: RouteRequest, model: str | None, pods: Sequence[Pod]) -> PromptTokens | None:
        """Let the model's pods render a prompt; None if they do not, or not at present."""
        if not model or not pods or (model in self.tokenizers and self.tokenizers[model] is None):
            return None
        if model not in self._automatic:
            self._automatic.setdefault(model, (RenderTokenizer(model, None), RenderBreaker()))
            self.waits()
        tokenizer, breaker = self._automatic[model]
        if not breaker.allows(time.monotonic()):
            return None
        try:
            return self._rendered(request, tokenizer, breaker, pods)
        except TokenizerUnavailableError:
            return None

    def _rendered(
        self,
        request: RouteRequest,
        tokenizer: RenderTokenizer,
        breaker: RenderBreaker | None,
        pods: Sequence[Pod],
    ) -> PromptTokens:
        """Let a server render a prompt, and record how long it took and whether it was in time."""
        deadline_s = self.options.deadline_s
        started_s = time.monotonic()

        def work() -> PromptTokens:
            outcome, error, is_final = "failed", "not a rendered prompt", False
            try:
                tokens = tokenizer.prompt_tokens(request, pods)
                is_late = time.monotonic() - started_s > deadline_s
                outcome, error = ("late", "later than --tokenize-deadline-ms") if is_late else ("ok", "")
                return tokens
            except TokenizerUnavailableError as unavailable:
                error, is_final = str(unavailable), unavailable.is_final
                raise
            finally:
                now_s = time.monotonic()
                self.observe(now_s - started_s, outcome)
                if breaker is not None and breaker.report(error, now_s, is_final=is_final):
                    _log_rendering(tokenizer.model, error)

        return self._run(self._render_threads, work, deadline_s)

    def _run(self, threads: _Threads, work: Callable[[], PromptTokens], timeout_s: float) -> PromptTokens:
        """Run tokenization on a thread; after `timeout_s` it raises TimeoutError and goes on by itself."""
        if not threads.slots.acquire(blocking=False):
            raise _QueueFullError
        try:
            future = threads.executor.submit(work)
        except RuntimeError as error:
            threads.slots.release()
            raise _QueueFullError from error
        # Also runs for work that is cancelled before it starts.
        future.add_done_callback(lambda _: threads.slots.release())
        return future.result(max(0.0, timeout_s))


def _instead(model: str) -> str:
    return f"--tokenizer {model}=DIR, or {model}=none for load alone; vLLM renders with --enable-scale-out"


def _log_rendering(model: str, error: str) -> None:
    if error:
        message = "pods do not render prompts, routing by load alone: model=%s error=%s; set %s"
        _log.warning(message, model, error, _instead(model))
    else:
        _log.info(
            "prompts rendered by the model's pods: model=%s; to encode here, set %s", model, _instead(model)
        )


def tokenize_prompts(request: RouteRequest, tokenizer: PromptTokenizer, limits: PromptLimits) -> PromptTokens:
    """Tokenize a request.

    Raises:
        PromptError: The prompt is invalid for its API, too long, or cannot be tokenized here.
        ManyItemsError: A chat has more messages and parts than `limits.items_max`.
    """
    body, template = request.body, tokenizer.coded or tokenizer.chat_template
    if request.kind is RequestKind.COMPLETIONS:
        return known(tuple(completion_prompts(body, tokenizer, limits)))
    # Engines convert the other APIs to chats; the result depends on the template.
    if template is not None and request.kind is RequestKind.MESSAGES:
        body = messages_as_chat(body, template.effort_without_thinking)
    elif template is not None and request.kind is RequestKind.RESPONSES:
        body = responses_as_chat(body)
    try:
        return known((chat_prompt(body, tokenizer, limits),))
    except MediaPromptError:
        if (images := image_chat(body, tokenizer, limits)) is not None:
            return with_images(images)
    ids = chat_prefix(body, tokenizer)
    return PromptTokens((ids,), len(ids) + MEDIA_TOKENS, partial=MEDIA)


def reads_kind(kind: RequestKind, tokenizer: PromptTokenizer) -> bool:
    """Return whether prompts of this API can be built: by the model's template, its library, or as text."""
    if tokenizer.chat_template is not None or kind is RequestKind.COMPLETIONS:
        return True
    return tokenizer.coded is not None and kind is not RequestKind.RESPONSES


def _is_large(request: RouteRequest, tokenizer: PromptTokenizer) -> bool:
    """Return whether tokenizing a request may take long, by its size and number of items."""
    is_fast = tokenizer.coded is None and tokenizer.encoder.facts.is_fast
    if request.body_bytes > (_INLINE_BODY_BYTES if is_fast else _INLINE_LIBRARY_BODY_BYTES):
        return True
    items = _DECODED_ITEMS.get(request.kind)
    return items is not None and count_items(request.body.get(items)) > ITEMS_AT_ONCE_MAX
