"""The HTTP API: OpenAI's completions and chat completions, and what operators and routers ask a model server.

In: HTTP requests. Out: answers, whole or streamed. Knows the routes and the order of the steps; each step
(reading, preparing, generating, shaping) is a module of its own.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from model_server.api_errors import ApiError
from model_server.generation import AsyncEngine, Generation
from model_server.http_io import BodyReader, EventStream, QuietEnd, unless_disconnected
from model_server.openai_responses import Responder
from model_server.openai_types import GenerationBody
from model_server.prepare import Api, Job, ServedModel, detokenize, prepare, tokenize
from model_server.text import Delta, TextAssembler

_PREPARE_THREADS = 2
_BODIES_AT_ONCE = 16
_HEADER_ID_CHARS_MAX = 256
_DONE = b"data: [DONE]\n\n"

_T = TypeVar("_T")


class ResettableEngine(Protocol):
    """The part of the engine that the API itself needs."""

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while some are in use."""


class HttpApi:
    """All routes of one model server.

    Args:
        model: The served model.
        engine: For /reset_prefix_cache.
        async_engine: Runs the requests.
        registry: Shown at /metrics.
        healthy: Answers /health.
        event_sources: Resolved event settings by data-parallel rank, for /kv_event_sources.
        max_body_bytes: Larger bodies are refused.
        max_requests: Most requests handled at once; one more is refused.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        engine: ResettableEngine,
        async_engine: AsyncEngine,
        registry: CollectorRegistry,
        healthy: Callable[[], bool],
        event_sources: Mapping[str, object],
        max_body_bytes: int,
        max_requests: int,
    ) -> None:
        self._model = model
        self._engine = engine
        self._async_engine = async_engine
        self._registry = registry
        self._healthy = healthy
        self._event_sources = event_sources
        self._bodies = BodyReader(max_body_bytes, max_body_bytes * _BODIES_AT_ONCE)
        self._max_requests = max_requests
        self._requests = 0
        self._started_s = int(time.time())
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, "prepare")

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/kv_event_sources", self.kv_event_sources),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
        ]
        handlers = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug}
        return QuietEnd(Starlette(routes=routes, exception_handlers=handlers))

    def close(self) -> None:
        """Let the worker threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, "completion")

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, "chat")

    async def models(self, _: Request) -> Response:
        """GET /v1/models."""
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started_s,
                "owned_by": "kvroute",
                "root": self._model.root,
                "parent": None,
                "max_model_len": self._model.max_model_len,
            }
            for name in self._model.names
        ]
        return _json({"object": "list", "data": cards})

    async def health(self, _: Request) -> Response:
        """GET /health and /ping: 200 while the engine's loop runs, else 503; no body."""
        return Response(status_code=200 if self._healthy() else 503)

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return _json({"version": version("kvroute")})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics in Prometheus' text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: the ids that a prompt or messages would become."""
        async with self._bodies.read(request) as raw:
            return _json(await self._in_thread(tokenize, self._model, raw))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens included."""
        async with self._bodies.read(request) as raw:
            return _json(await self._in_thread(detokenize, self._model, raw))

    async def kv_event_sources(self, _: Request) -> Response:
        """GET /kv_event_sources: where this server publishes its KV events."""
        return _json(self._event_sources)

    async def reset_prefix_cache(self, _: Request) -> Response:
        """POST /reset_prefix_cache."""
        return _json({"success": await self._in_thread(self._engine.reset_prefix_cache)})

    async def _generate(self, request: Request, api: Api) -> Response:
        arrived_s = self._async_engine.now_s()
        header_id = _header_id(request)
        with ExitStack() as cleanup:
            cleanup.enter_context(self._admitted())
            async with self._bodies.read(request) as raw:
                job = await self._in_thread(prepare, self._model, api, raw, header_id)
            texts = tuple(self._text(job.fields) for _ in job.requests)
            generation = self._async_engine.generate(job.requests, texts, arrived_s)
            cleanup.callback(generation.close)
            if not job.fields.stream:
                return _json(await unless_disconnected(request.receive, _whole(job, generation)))
            pieces = _pieces(job, generation)
            # Awaited before the status is sent: an early failure is a proper error, and the time to the first
            # byte is the time to the first token.
            first = await unless_disconnected(request.receive, anext(pieces))
            return EventStream(first, pieces, cleanup.pop_all().close)

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _text(self, fields: GenerationBody) -> TextAssembler:
        return TextAssembler(
            self._model.tokenizer,
            stop_strings=fields.stop_strings,
            stop_token_ids=frozenset(fields.stop_token_ids or ()),
            min_tokens=fields.min_tokens or 0,
            skip_special_tokens=fields.skip_special_tokens is not False,
        )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._requests >= self._max_requests:
            raise ApiError(503, f"{self._max_requests} requests are being handled already; try again later")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1


async def _whole(job: Job, generation: Generation) -> dict[str, Any]:
    """Collect the answer to a request that does not stream."""
    texts = [""] * len(job.requests)
    ends: dict[int, Delta] = {}
    async for deltas in generation:
        for index, delta in deltas:
            texts[index] += delta.text
            if delta.finish_reason is not None:
                ends[index] = delta
    responder = Responder(job)
    usage = _usage(job, generation, responder)
    return responder.whole(texts, [ends[index] for index in range(len(texts))], usage)


async def _pieces(job: Job, generation: Generation) -> AsyncGenerator[bytes]:
    """Make the events of a stream; an error after the first piece is an event too."""
    responder = Responder(job)
    begun = False
    try:
        async for deltas in generation:
            usage = _usage(job, generation, responder) if responder.usage_always else None
            chunks = [chunk for index, delta in deltas for chunk in responder.chunks(index, delta, usage)]
            if chunks:
                yield b"".join(map(_event, chunks))
                begun = True
        if responder.usage_last:
            yield _event(responder.usage_chunk(_usage(job, generation, responder)))
    except ApiError as error:
        if not begun:
            raise
        yield b"data: " + error.body() + b"\n\n"
    yield _DONE


def _usage(job: Job, generation: Generation, responder: Responder) -> dict[str, Any]:
    # The copies of one prompt share its cached prefix: it counts once, as its tokens do.
    cached = sum(generation.cached_tokens[:: job.fields.n or 1])
    return responder.usage(generation.completion_tokens, cached)


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _header_id(request: Request) -> str | None:
    header_id = request.headers.get("x-request-id")
    if header_id is not None and len(header_id) > _HEADER_ID_CHARS_MAX:
        raise ApiError(400, f"x-request-id is longer than {_HEADER_ID_CHARS_MAX} characters", "x-request-id")
    return header_id or None


def _error(error: ApiError) -> Response:
    # The rest of a body that was not read to its end must not be taken for the next request.
    headers = {"connection": "close"} if error.status in (408, 413) else None
    return Response(error.body(), error.status, headers, media_type="application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _error(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(_: Request, __: Exception) -> Response:
    return _error(ApiError(500, "internal error; the server's log has the details"))
