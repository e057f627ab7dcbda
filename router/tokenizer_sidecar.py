"""A tokenizer in a process beside this one: `kvroute tokenizer` behind a Unix socket, asked over gRPC.

Keeps the tokenizer's work and memory out of the router. A restart of the process costs the requests meanwhile
their tokens, no more.
"""

from __future__ import annotations

from typing import Any

import grpc
import msgspec
import numpy as np

from indexer.keys import MultimodalItem
from router._pb import tokenizer_pb2, tokenizer_pb2_grpc
from router.errors import RequestError, TokenizerUnavailableError
from router.prompt_tokens import PromptTokens, unknown
from router.request import RequestKind, RouteRequest

# The API of a request, as `Tokenize` is told it.
APIS = {
    RequestKind.CHAT: tokenizer_pb2.API_CHAT,
    RequestKind.COMPLETIONS: tokenizer_pb2.API_COMPLETIONS,
    RequestKind.RESPONSES: tokenizer_pb2.API_RESPONSES,
    RequestKind.MESSAGES: tokenizer_pb2.API_MESSAGES,
}

# 4 bytes each of 16 million tokens.
_ANSWER_BYTES_MAX = 64 << 20


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
