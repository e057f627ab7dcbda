"""Tokenizers in other processes: vLLM's render endpoints, and `kvroute tokenizer` behind a Unix socket.

vLLM's `/v1/.../render` endpoints return the engine's own tokens, so they are correct for every model and for
images, at the cost of an HTTP request. Responses are cached for a minute, for a client's retry; later the
template may render another date, or the pods may have another template.

Where the router chooses by itself to let a model's pods render, a circuit breaker limits its attempts.

`kvroute tokenizer` keeps the tokenizer's CPU time and memory out of the router. While it restarts, requests
are routed without tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Annotated, Any

import grpc
import msgspec
import numpy as np
import urllib3
from cachetools import TTLCache

from indexer.keys import MultimodalItem
from router._pb import tokenizer_pb2
from router.errors import RequestError, TokenizerUnavailableError
from router.pods.pod_set import Pod
from router.prompts.prompt_tokens import MediaFeatures, with_features
from router.prompts.request import PromptTokens, RequestKind, RouteRequest, unknown

_PATHS = {
    RequestKind.CHAT: "/v1/chat/completions/render",
    RequestKind.COMPLETIONS: "/v1/completions/render",
    RequestKind.RESPONSES: "/v1/responses/render",
    RequestKind.MESSAGES: "/v1/messages/render",
}
SERVICE = "kvroute.v1.Tokenizer"
# Value of the field `api` of TokenizeRequest, by kind of request.
APIS = {
    RequestKind.CHAT: tokenizer_pb2.API_CHAT,
    RequestKind.COMPLETIONS: tokenizer_pb2.API_COMPLETIONS,
    RequestKind.RESPONSES: tokenizer_pb2.API_RESPONSES,
    RequestKind.MESSAGES: tokenizer_pb2.API_MESSAGES,
}
# A pick has a shorter deadline; a response after it is cached for the retry.
_CONNECT_S = 1.0
_READ_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20  # 16 million tokens of 4 bytes
_CHUNK_BYTES = 64 << 10
_CACHE_BYTES = 32 << 20
_CACHE_TTL_S = 60.0
_ITEM_BYTES = 200

FAILURES_MAX = 5  # consecutive failed or late answers after which requests are routed by load
PAUSE_S, PAUSE_MAX_S = 2.0, 300.0
_ATTEMPT_S = 10.0  # longer than an attempt takes


@dataclass(eq=False)
class RenderTokenizer:
    """Tokenizer of one base model over vLLM's render endpoints. Thread-safe."""

    model: str
    url: str | None  # server with render endpoints; None to use the model's pods in rotation
    clock: InitVar[Callable[[], float]] = time.monotonic

    def __post_init__(self, clock: Callable[[], float]) -> None:
        self._rotation = itertools.count()
        self._http = urllib3.PoolManager(
            num_pools=256,
            maxsize=8,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
        )
        self._lock = threading.Lock()
        self._cache: TTLCache[bytes, PromptTokens] = TTLCache(_CACHE_BYTES, _CACHE_TTL_S, clock, _size_bytes)

    def prompt_tokens(self, request: RouteRequest, pods: Sequence[Pod]) -> PromptTokens:
        """Return a request's tokens from the cache or a server; may exceed the deadline of a pick.

        Raises:
            TokenizerUnavailableError: There is no pod, or no valid response.
        """
        body = msgspec.json.encode({**request.body, "stream": False, "return_mm_kwargs": False})
        key = hashlib.blake2b(request.kind.encode() + body, digest_size=16).digest()
        with self._lock:
            tokens = self._cache.get(key)
        if tokens is None:
            tokens = self._render(request, body, pods)
            if tokens.degraded is None and _size_bytes(tokens) <= _CACHE_BYTES:
                with self._lock:
                    self._cache[key] = tokens
        return tokens

    def close(self) -> None:
        self._http.clear()

    def _render(self, request: RouteRequest, body: bytes, pods: Sequence[Pod]) -> PromptTokens:
        url = f"{self._server(pods)}{_PATHS[request.kind]}"
        headers = {"content-type": "application/json"}
        try:
            answer = self._http.request("POST", url, body=body, headers=headers, preload_content=False)
            data = _body(answer)
        except urllib3.exceptions.HTTPError as error:
            raise TokenizerUnavailableError(f"{url}: {error}") from error
        if answer.status in (400, 422):
            # The engine will reject the request with a better error.
            return unknown(request, "unsupported_prompt")
        if answer.status in (403, 404, 405):
            text = f"{url}: status {answer.status}; start vLLM with --enable-scale-out"
            raise TokenizerUnavailableError(text, is_final=True)
        if answer.status != 200:
            raise TokenizerUnavailableError(f"{url}: status {answer.status}")
        try:
            tokens = read_rendered(request.kind, data)
        except (ValueError, OverflowError, RecursionError) as error:
            raise TokenizerUnavailableError(f"{url}: not a rendered prompt: {error}") from error
        if len(tokens.prompts) != (asked := _prompts_of(request)):
            raise TokenizerUnavailableError(f"{url}: rendered {len(tokens.prompts)} of {asked} prompts")
        return tokens

    def _server(self, pods: Sequence[Pod]) -> str:
        if self.url is not None:
            return self.url
        if not pods:
            raise TokenizerUnavailableError(f"no pod of model {self.model} is available")
        return f"http://{pods[next(self._rotation) % len(pods)].address}"


class _Rendered(msgspec.Struct):
    """Rendered prompt, as far as it is read; it must have token ids."""

    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    features: MediaFeatures | None = None


_PROMPT, _PROMPTS = msgspec.json.Decoder(_Rendered), msgspec.json.Decoder(list[_Rendered])


def read_rendered(kind: RequestKind, data: bytes) -> PromptTokens:
    """Parse the response of a render endpoint, vLLM's GenerateRequest: a list for completions, else one.

    Raises:
        ValueError: The response is invalid, or its media items are inconsistent.
        OverflowError: A token id is out of range.
        RecursionError: The response is nested too deeply.
    """
    several = kind is RequestKind.COMPLETIONS
    rendered = _PROMPTS.decode(data) if several else [_PROMPT.decode(data)]
    prompts = [np.frombuffer(array("I", prompt.token_ids), np.uint32) for prompt in rendered]
    return with_features(prompts, [prompt.features for prompt in rendered])


def _prompts_of(request: RouteRequest) -> int:
    """Return the number of prompts of a request; completions may have several texts or lists of ids."""
    prompt = request.body.get("prompt") if request.kind is RequestKind.COMPLETIONS else None
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) is int:
        return 1
    return len(prompt)


def _body(answer: urllib3.BaseHTTPResponse) -> bytes:
    """Read a response body within limits of time and size."""
    deadline_s = time.monotonic() + _READ_S
    data = bytearray()
    try:
        while chunk := answer.read1(_CHUNK_BYTES):
            data += chunk
            if len(data) > _ANSWER_BYTES_MAX or time.monotonic() > deadline_s:
                raise urllib3.exceptions.HTTPError(f"too slow or too large: {len(data)} bytes read")
    except BaseException:
        # Unread bytes would corrupt the connection's next response.
        answer.close()
        raise
    answer.release_conn()
    return bytes(data)


def _size_bytes(tokens: PromptTokens) -> int:
    items = sum(_ITEM_BYTES + 4 * len(item.identifier) for media in tokens.media for item in media)
    return 500 + sum(ids.nbytes for ids in tokens.prompts) + items


@dataclass(eq=False)
class SidecarTokenizer:
    """Tokenizer of one model in a `kvroute tokenizer` process, which need not run yet. Thread-safe."""

    model: str
    socket: str  # path

    def __post_init__(self) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{self.socket}",
            options=[
                ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
                ("grpc.enable_retries", 0),
                # Reconnect quickly to a restarted process; attempts are cheap on the same machine.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # Do not share a connection, and its failure state, with other channels to this address.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        # Without types in grpcio.
        unary: Any = self._channel.unary_unary
        self._tokenize = unary(
            f"/{SERVICE}/Tokenize",
            tokenizer_pb2.TokenizeRequest.SerializeToString,
            tokenizer_pb2.TokenizeResponse.FromString,
        )

    def prompt_tokens(
        self, request: RouteRequest, context_tokens: int | None, timeout_s: float
    ) -> PromptTokens:
        """Tokenize a request in the other process.

        Raises:
            RequestError: 400: the prompt is invalid for its API.
            TokenizerUnavailableError: The process cannot be reached, or does not serve the model.
            TimeoutError: The deadline passed.
        """
        message = tokenizer_pb2.TokenizeRequest(
            model=self.model,
            api=APIS[request.kind],
            body=msgspec.json.encode(request.body),
            context_tokens=context_tokens or 0,
            reads_media=True,
        )
        try:
            answer = self._tokenize(message, timeout=timeout_s)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                return unknown(request, "tokenize_queue_full")
            reason = f"unix:{self.socket}: {code.name}: {error.details()}"
            raise TokenizerUnavailableError(reason) from error
        if answer.HasField("refusal"):
            raise RequestError(400, answer.refusal.message, answer.refusal.param)
        if answer.degraded:
            return unknown(request, answer.degraded)
        prompts = tuple(np.frombuffer(prompt, "<u4") for prompt in answer.prompts)
        media = tuple(
            tuple(MultimodalItem(item.identifier, item.offset, item.length) for item in prompt.items)
            for prompt in answer.media
        )
        return PromptTokens(prompts, answer.total, partial=answer.partial or None, media=media)

    def close(self) -> None:
        self._channel.close()


class RenderBreaker:
    """State of one model's rendering: one request tries it; once it works, all use it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works = self._is_tried = False
        self._failures = 0  # consecutive
        self._pause_s, self._resumes_s = PAUSE_S, 0.0  # length and end of the next pause
        self._error = ""  # reason of the pause; empty if there is none

    def allows(self, now_s: float) -> bool:
        """Return whether a request may ask the pods; during an attempt no other may."""
        with self._lock:
            if not self._works and now_s >= self._resumes_s:
                self._is_tried, self._resumes_s = True, now_s + _ATTEMPT_S
                return True
            return self._works

    def report(self, error: str, now_s: float, *, is_final: bool = False) -> bool:
        """Record an answer; return whether rendering begins to work, or the first of several pauses begins.

        Args:
            error: Why the answer is of no use; empty if it is in time.
            is_final: Whether the next request would fail as well, because the pods have no such endpoint.
        """
        with self._lock:
            if not error:
                begins = not self._works
                self._works, self._failures, self._pause_s, self._error = True, 0, PAUSE_S, ""
                return begins
            self._failures += 1
            is_rare = self._works and self._failures < FAILURES_MAX and not is_final
            if is_rare or not (self._works or self._is_tried):  # or asked before the pause
                return False
            begins = not self._error
            self._works = self._is_tried = False
            self._error, self._resumes_s = error, now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            return begins

    def state(self, now_s: float) -> dict[str, Any]:
        """Return the state for /ready."""
        seconds = 0.0 if self._works else round(max(0.0, self._resumes_s - now_s), 1)
        name = "rendering" if self._works else "paused" if self._error else "not tried"
        return {"state": name, "seconds_left": seconds, "error": self._error}
