"""A model's tokens from other processes: servers that render, and `kvroute tokenizer` behind a Unix socket.

vLLM's `/v1/.../render` endpoints, asked over HTTP, are the pod's own word, so right for every model, images
included, at the price of a request. Answers are kept for a minute, since a client's next try is the same
request; later the template may show another date, or the pods may have another template.

`kvroute tokenizer` keeps the tokenizer's work and memory out of the router. A restart of it costs the
requests meanwhile their tokens, no more.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import grpc
import msgspec
import numpy as np
import urllib3
from cachetools import TTLCache

from indexer.keys import MultimodalItem
from router._pb import tokenizer_pb2, tokenizer_pb2_grpc
from router.errors import RequestError, TokenizerUnavailableError
from router.pods.pod_set import Pod
from router.prompts.prompt_tokens import MediaFeatures, PromptTokens, unknown, with_features
from router.prompts.request import RequestKind, RouteRequest

_PATHS = {
    RequestKind.CHAT: "/v1/chat/completions/render",
    RequestKind.COMPLETIONS: "/v1/completions/render",
    RequestKind.RESPONSES: "/v1/responses/render",
    RequestKind.MESSAGES: "/v1/messages/render",
}
# The API of a request, as `Tokenize` is told it.
APIS = {
    RequestKind.CHAT: tokenizer_pb2.API_CHAT,
    RequestKind.COMPLETIONS: tokenizer_pb2.API_COMPLETIONS,
    RequestKind.RESPONSES: tokenizer_pb2.API_RESPONSES,
    RequestKind.MESSAGES: tokenizer_pb2.API_MESSAGES,
}
# The pick has its own, shorter deadline; an answer that comes after it is kept for the next try.
_CONNECT_S = 1.0
_READ_S = 5.0
_ANSWER_BYTES_MAX = 64 << 20  # 4 bytes each of 16 million tokens
_CHUNK_BYTES = 64 << 10
_KEPT_BYTES = 32 << 20
_KEPT_S = 60.0
_ITEM_BYTES = 200
_CONNECTIONS = 8
_POOLS = 256


class RenderTokenizer:
    """Asks for one base model's tokens; safe to share between threads.

    Args:
        url: Of a server that renders; None asks the model's pods in turn.
    """

    def __init__(self, model: str, url: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._url = url
        self._turn = itertools.count()
        self._http = urllib3.PoolManager(
            num_pools=_POOLS,
            maxsize=_CONNECTIONS,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=_READ_S),
        )
        self._lock = threading.Lock()
        self._kept: TTLCache[bytes, PromptTokens] = TTLCache(_KEPT_BYTES, _KEPT_S, clock, _size_bytes)

    def prompt_tokens(self, request: RouteRequest, pods: Sequence[Pod]) -> PromptTokens:
        """Has a request rendered; may take far longer than a pick may wait.

        Raises:
            TokenizerUnavailableError: No pod, no answer, or none that can be read.
        """
        body = msgspec.json.encode({**request.body, "stream": False, "return_mm_kwargs": False})
        key = hashlib.blake2b(request.kind.encode() + body, digest_size=16).digest()
        with self._lock:
            kept = self._kept.get(key)
        if kept is None:
            kept = self._ask(request, body, pods)
            if kept.degraded is None and _size_bytes(kept) <= _KEPT_BYTES:
                with self._lock:
                    self._kept[key] = kept
        return kept

    def close(self) -> None:
        self._http.clear()

    def _ask(self, request: RouteRequest, body: bytes, pods: Sequence[Pod]) -> PromptTokens:
        url = f"{self._server(pods)}{_PATHS[request.kind]}"
        headers = {"content-type": "application/json"}
        try:
            answer = self._http.request("POST", url, body=body, headers=headers, preload_content=False)
            data = _body(answer)
        except urllib3.exceptions.HTTPError as error:
            raise TokenizerUnavailableError(f"{url}: {error}") from error
        if answer.status in (400, 422):
            # The engine will say so itself, better than anyone.
            return unknown(request, "unsupported_prompt")
        if answer.status == 403:
            raise TokenizerUnavailableError(f"{url}: 403; vLLM renders if started with --enable-scale-out")
        if answer.status != 200:
            raise TokenizerUnavailableError(f"{url}: answered {answer.status}")
        try:
            tokens = read_rendered(request.kind, data)
        except (ValueError, OverflowError, RecursionError) as error:
            raise TokenizerUnavailableError(f"{url}: not a rendered prompt: {error}") from error
        if len(tokens.prompts) != (asked := _prompts_of(request)):
            raise TokenizerUnavailableError(f"{url}: rendered {len(tokens.prompts)} of {asked} prompts")
        return tokens

    def _server(self, pods: Sequence[Pod]) -> str:
        if self._url is not None:
            return self._url
        if not pods:
            raise TokenizerUnavailableError(f"no pod of {self._model} can be asked")
        return f"http://{pods[next(self._turn) % len(pods)].address}"


class _Rendered(msgspec.Struct):
    """What is read of a rendered prompt; one without ids is none."""

    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    features: MediaFeatures | None = None


def read_rendered(kind: RequestKind, data: bytes) -> PromptTokens:
    """Reads a render endpoint's answer, vLLM's GenerateRequest: a list for completions, else one prompt.

    Raises:
        ValueError: It is no such answer, or what it tells of media items cannot be.
        OverflowError: A token id is out of range.
        RecursionError: It is nested too deeply.
    """
    several = kind is RequestKind.COMPLETIONS
    form: Any = list[_Rendered] if several else _Rendered
    answer = msgspec.json.decode(data, type=form)
    rendered: list[_Rendered] = answer if several else [answer]
    prompts = [np.frombuffer(array("I", prompt.token_ids), np.uint32) for prompt in rendered]
    return with_features(prompts, [prompt.features for prompt in rendered])


def _prompts_of(request: RouteRequest) -> int:
    """How many prompts a request holds: a completion's may be several texts, or lists of ids."""
    prompt = request.body.get("prompt") if request.kind is RequestKind.COMPLETIONS else None
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) is int:
        return 1
    return len(prompt)


def _body(answer: urllib3.BaseHTTPResponse) -> bytes:
    """Reads an answer, however slowly it comes, in bounded time and space."""
    deadline_s = time.monotonic() + _READ_S
    data = bytearray()
    whole = False
    try:
        while chunk := answer.read1(_CHUNK_BYTES):
            data += chunk
            if len(data) > _ANSWER_BYTES_MAX or time.monotonic() > deadline_s:
                raise urllib3.exceptions.HTTPError(f"too slow or too large, given up at {len(data)} bytes")
        whole = True
    finally:
        # What is left unread would be taken for the next answer.
        if whole:
            answer.release_conn()
        else:
            answer.close()
    return bytes(data)


def _size_bytes(tokens: PromptTokens) -> int:
    items = sum(_ITEM_BYTES + 4 * len(item.identifier) for media in tokens.media for item in media)
    return 500 + sum(ids.nbytes for ids in tokens.prompts) + items


class SidecarTokenizer:
    """Asks for one model's tokens; safe to share between threads.

    Args:
        socket: Path of its socket, which need not exist yet.
    """

    def __init__(self, model: str, socket: str) -> None:
        self._model = model
        self._socket = socket
        self._channel = grpc.insecure_channel(
            f"unix:{socket}",
            options=[
                ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
                ("grpc.enable_retries", 0),
                # A process that comes back is found at once: trying costs nothing on the same machine.
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # Channels to one address share a connection, and with it the state of a failed one.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        # The generated class has no types.
        stub: Any = tokenizer_pb2_grpc.TokenizerStub
        self._tokenize = stub(self._channel).Tokenize

    def prompt_tokens(
        self, request: RouteRequest, context_tokens: int | None, timeout_s: float
    ) -> PromptTokens:
        """Tokenizes a request there.

        Raises:
            RequestError: 400, when the prompt is not what the API allows.
            TokenizerUnavailableError: The process is not there, or does not serve the model.
            TimeoutError: No answer in time.
        """
        message = tokenizer_pb2.TokenizeRequest(
            model=self._model,
            api=APIS[request.kind],
            body=msgspec.json.encode(request.body),
            context_tokens=context_tokens or 0,
            reads_media=True,
        )
        try:
            answer = self._tokenize(message, timeout=timeout_s)
        except grpc.RpcError as error:
            return self._no_answer(request, error)
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

    def _no_answer(self, request: RouteRequest, error: grpc.RpcError) -> PromptTokens:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise TimeoutError from error
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return unknown(request, "tokenize_queue_full")
        raise TokenizerUnavailableError(f"unix:{self._socket}: {code.name}: {error.details()}") from error
