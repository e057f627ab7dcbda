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
from itertools import islice
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
from model_server.openai_types import Api, GenerationBody
from model_server.prepare import ServedModel, detokenize, prepare, render, tokenize
from model_server.snapshot import MEDIA_TYPE as SNAPSHOT_TYPE
from model_server.snapshot import Snapshot
from model_server.text import Delta, TextAssembler, joined

_PREPARE_THREADS = 2
# Each is a copy of the caches' books.
_SNAPSHOTS_AT_ONCE = 2
_PIECES_AT_ONCE = 16
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
        snapshot: Callable[[], Snapshot] | None,
        max_body_bytes: int,
        max_requests: int,
    ) -> None:
        self._model = model
        self._engine = engine
        self._async_engine = async_engine
        self._registry = registry
        self._healthy = healthy
        self._event_sources = event_sources
        self._snapshot = snapshot
        self._snapshots = 0
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
            Route("/v1/completions/render", self.render_completions, methods=["POST"]),
            Route("/v1/chat/completions/render", self.render_chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/kv_event_sources", self.kv_event_sources),
            Route("/kv_events/snapshot", self.kv_events_snapshot),
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

    async def render_completions(self, request: Request) -> Response:
        """POST /v1/completions/render: the ids of a completion's prompts, as vLLM tells them."""
        async with self._bodies.read(request) as raw:
            return _json(await self._in_thread(render, self._model, "completion", raw))

    async def render_chat(self, request: Request) -> Response:
        """POST /v1/chat/completions/render: the ids of a chat."""
        async with self._bodies.read(request) as raw:
            return _json(await self._in_thread(render, self._model, "chat", raw))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids, special tokens included."""
        async with self._bodies.read(request) as raw:
            return _json(await self._in_thread(detokenize, self._model, raw))

    async def kv_event_sources(self, _: Request) -> Response:
        """GET /kv_event_sources: where this server publishes its KV events."""
        return _json(self._event_sources)

    async def kv_events_snapshot(self, _: Request) -> Response:
        """GET /kv_events/snapshot: what the caches hold, see `snapshot`; 404 without KV events."""
        if self._snapshot is None:
            raise ApiError(404, "this server publishes no KV events")
        if self._snapshots >= _SNAPSHOTS_AT_ONCE:
            raise ApiError(503, f"{_SNAPSHOTS_AT_ONCE} snapshots are being sent already; try again later")
        self._snapshots += 1
        with ExitStack() as cleanup:
            cleanup.callback(self._snapshot_sent)
            pieces = (await self._in_thread(self._snapshot)).pieces()
            first = await self._in_thread(_joined, pieces)
            return EventStream(first, self._rest(pieces), cleanup.pop_all().close, SNAPSHOT_TYPE)

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
            responder = Responder(job, self._model.tokenizer)
            if not job.fields.stream:
                return _json(await unless_disconnected(request.receive, _whole(responder, generation)))
            pieces = _pieces(responder, generation)
            # Awaited before the status is sent: an early failure is a proper error, and the time to the first
            # byte is the time to the first token.
            first = await unless_disconnected(request.receive, anext(pieces))
            return EventStream(first, pieces, cleanup.pop_all().close)

    def _snapshot_sent(self) -> None:
        self._snapshots -= 1

    async def _rest(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
        while piece := await self._in_thread(_joined, pieces):
            yield piece

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _text(self, fields: GenerationBody) -> TextAssembler:
        return TextAssembler(
            self._model.tokenizer,
            stop_strings=fields.stop_strings,
            stop_token_ids=frozenset(fields.stop_token_ids or ()),
            min_tokens=fields.min_tokens or 0,
            show_stop=bool(fields.include_stop_str_in_output),
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


async def _whole(responder: Responder, generation: Generation) -> dict[str, Any]:
    """Collect the answer to a request that does not stream."""
    said: list[list[Delta]] = [[] for _ in generation.texts]
    async for deltas in generation:
        for index, delta in deltas:
            said[index].append(delta)
    return responder.whole([joined(deltas) for deltas in said], _usage(responder, generation))


async def _pieces(responder: Responder, generation: Generation) -> AsyncGenerator[bytes]:
    """Make the events of a stream; an error after the first piece is an event too."""
    begun = False
    try:
        async for deltas in generation:
            usage = _usage(responder, generation) if responder.usage_always else None
            chunks = [chunk for index, delta in deltas for chunk in responder.chunks(index, delta, usage)]
            if chunks:
                yield b"".join(map(_event, chunks))
                begun = True
        if responder.usage_last:
            yield _event(responder.usage_chunk(_usage(responder, generation)))
    except ApiError as error:
        if not begun:
            raise
        yield b"data: " + error.body() + b"\n\n"
    yield _DONE


def _usage(responder: Responder, generation: Generation) -> dict[str, Any]:
    return responder.usage(generation.completion_tokens, generation.cached_tokens)


def _joined(pieces: Iterator[bytes]) -> bytes:
    """The next pieces together: enough that a thread is worth its while."""
    return b"".join(islice(pieces, _PIECES_AT_ONCE))


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
