"""Routes and handlers of the serving port (OpenAI API, health, metrics) and of the administration port."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from model_server.config import ServeOptions
from model_server.engine.core import EngineCore
from model_server.errors import AdapterError, EngineClosedError
from model_server.kv_events.publisher import SNAPSHOT_TYPE, Snapshot, ZmqEventPublisher
from model_server.model.lora import LoraRegistry
from model_server.openai.answers import Answer
from model_server.openai.generation import AsyncEngine, Generation, TextAssembler
from model_server.openai.http_server import (
    GRACE_S,
    BodyReader,
    EventStream,
    HttpServer,
    bearer_gate,
    by_port,
    error_response,
    json_response,
    quiet_end,
    stop_by_signals,
    unless_disconnected,
)
from model_server.openai.metrics import EngineCollector, LoraCollector, RequestMetrics, new_registry
from model_server.openai.prompts import ServedModel, detokenize, prepare, render, tokenize
from model_server.openai.types import Api, ApiError, LoadAdapterBody, UnloadAdapterBody, convert, decode_body
from tokenization import PromptTokenizer

_PREPARE_THREADS = 2
_BODIES_AT_ONCE = 16
_HEADER_ID_CHARS_MAX = 256
# A step that takes longer is a hang: no reasonable token budget needs this long.
STUCK_S = 60.0
# A snapshot copies the metadata of all caches.
_SNAPSHOTS_AT_ONCE = 2

_T = TypeVar("_T")


@dataclass(slots=True)
class _Limit:
    """Limit of concurrent operations; exceeding it raises an ApiError 503."""

    most: int
    what: str
    now: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        if self.now >= self.most:
            raise ApiError(503, f"{self.most} {self.what}, which is the limit; try again later")
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


@dataclass(eq=False)
class Server:
    """HTTP server of a started engine."""

    options: ServeOptions
    engine: EngineCore
    publisher: ZmqEventPublisher | None  # None: no KV events
    tokenizer: PromptTokenizer

    def __post_init__(self) -> None:
        options, engine, name = self.options, self.engine, self.options.served_names[0]
        self._registry = new_registry()
        self._metrics = RequestMetrics(name, self._registry)
        publisher_stats = None if self.publisher is None else self.publisher.stats
        counters = EngineCollector(name, engine.stats, publisher_stats, self._cache_config())
        self._registry.register(counters)
        self._model = ServedModel(
            names=options.served_names,
            root=options.engine.model,
            tokenizer=self.tokenizer,
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            adapters=engine.loras,
        )
        self._bodies = BodyReader(options.max_body_bytes, options.max_body_bytes * _BODIES_AT_ONCE)
        most = options.engine.max_num_seqs + options.engine.max_waiting
        self._requests = _Limit(most, "requests are being handled")
        self._snapshots = _Limit(_SNAPSHOTS_AT_ONCE, "snapshots are being made")
        self._running: dict[Generation, str] = {}  # with their request ids
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, "prepare")
        self._started_s = int(time.time())

    async def serve(
        self, listener: socket.socket, on_ready: Callable[[], None], admin: socket.socket | None = None
    ) -> None:
        """Serve requests, and administration if `admin` is given, until `stop` or an engine failure."""
        self._async_engine = AsyncEngine(self.engine, asyncio.get_running_loop(), self._metrics)
        in_use = self._async_engine.adapters_in_use
        self._registry.register(LoraCollector(self.options.engine.max_loras, in_use, time.time))
        app = self._app(None if admin is None else admin.getsockname()[1])
        self._http = HttpServer(app, on_ready, lambda: self.engine.stats().healthy)
        stop_by_signals(self.stop)
        try:
            await self._http.serve(sockets=[listener] if admin is None else [listener, admin])
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Stop accepting, and abort running requests after `GRACE_S`. A second call aborts at once."""
        if self._http.should_exit:
            self._async_engine.abort_all()
            return
        self._http.stop()
        asyncio.get_running_loop().call_later(GRACE_S, self._async_engine.abort_all)

    def _app(self, admin_port: int | None) -> ASGIApp:
        """Return the ASGI application of both ports. Without `admin_port` there is no administration."""
        options, model, post = self.options, self._model, partial(Route, methods=["POST"])
        sources = {} if self.publisher is None else {"0": self.publisher.config.as_vllm()}
        # Served on both ports without a secret, because they reveal no prompts.
        for_all = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", _answering(lambda: {"version": version("kvroute")})),
            Route("/load", _answering(lambda: {"server_load": self._requests.now})),  # requests handled
            Route("/metrics", self._metrics_page),
        ]
        serving = [
            post("/v1/completions", partial(self._generate, api="completion")),
            post("/v1/chat/completions", partial(self._generate, api="chat")),
            # Token ids of a completion's prompts or of a chat, in vLLM's format.
            post(
                "/v1/completions/render", partial(self._computed, work=partial(render, model, "completion"))
            ),
            post("/v1/chat/completions/render", partial(self._computed, work=partial(render, model, "chat"))),
            post("/tokenize", partial(self._computed, work=partial(tokenize, model))),
            post("/detokenize", partial(self._computed, work=partial(detokenize, model))),
            Route("/v1/requests/{request_id}", self._abort, methods=["DELETE"]),
            Route("/v1/models", self._models),
        ]
        admin = [
            post("/v1/load_lora_adapter", self._load_lora_adapter),
            post("/v1/unload_lora_adapter", self._unload_lora_adapter),
            Route("/kv_event_sources", _answering(lambda: sources)),
            Route("/kv_events/snapshot", self._kv_events_snapshot),
            post("/reset_prefix_cache", self._reset_prefix_cache),
            post("/sleep", self._sleep),
            post("/wake_up", self._wake_up),
            Route("/is_sleeping", _answering(lambda: {"is_sleeping": self.engine.is_sleeping})),
        ]
        handlers = dict.fromkeys((ApiError, HTTPException, Exception), _on_error)

        def guarded(routes: list[Route], secret: str | None, name: str) -> ASGIApp:
            app = Starlette(routes=[*for_all, *routes], exception_handlers=handlers)
            open_paths = frozenset(route.path for route in for_all)
            return app if secret is None else bearer_gate(app, secret, name, open_paths)

        app = guarded(serving, options.api_key, "the API key")
        if admin_port is not None:
            app = by_port(admin_port, guarded(admin, options.admin_token, "the administration token"), app)
        return quiet_end(app)

    async def _generate(self, request: Request, api: Api) -> Response:
        arrived_s = time.monotonic()
        header_id = _header_id(request)
        with ExitStack() as cleanup:
            cleanup.enter_context(self._requests.one())
            async with self._bodies.read(request) as raw:
                job = await self._in_thread(prepare, self._model, api, raw, header_id)
            texts = tuple(TextAssembler(self.tokenizer, job.fields) for _ in job.requests)
            generation = self._async_engine.generate(job.requests, texts, arrived_s)
            observe = self._metrics.observe
            observe("request_params_n", job.fields.n or 1)
            observe("request_params_max_tokens", job.requests[0].sampling.max_tokens)
            cleanup.callback(generation.close)
            self._running[generation] = job.request_id
            cleanup.callback(self._running.pop, generation)
            answer = Answer(job, self.tokenizer, generation)
            if not job.fields.stream:
                return json_response(await unless_disconnected(request.receive, answer.whole()))
            pieces = answer.pieces()
            # Await the first piece before sending the status: an early failure gets an error status, and the
            # time to first byte is the time to first token.
            first = await unless_disconnected(request.receive, anext(pieces))
            return EventStream(first, pieces, cleanup.pop_all().close, write_to=answer.write_to)

    async def _computed(self, request: Request, work: Callable[[bytes], object]) -> Response:
        """Answer with the result of `work` on the body, computed in a thread."""
        async with self._bodies.read(request) as raw:
            return json_response(await self._in_thread(work, raw))

    async def _abort(self, request: Request) -> Response:
        """End a running request; its client receives an error."""
        request_id = request.path_params["request_id"]
        generations = [generation for generation, name in self._running.items() if name == request_id]
        if not generations:
            raise ApiError(404, f"no request {request_id!r} is running", "request_id")
        for generation in generations:
            generation.fail(ApiError(409, "the request was ended by DELETE /v1/requests"))
        return json_response({"id": request_id, "object": "request", "deleted": True})

    async def _models(self, _: Request) -> Response:
        """List the model's names, then its adapters with the model as their parent."""
        cards = [self._card(name, self._model.root, None) for name in self._model.names]
        for name, adapter in self._model.adapters.loaded().items():
            cards.append(self._card(name, str(adapter.directory), self._model.names[0]))
        return json_response({"object": "list", "data": cards})

    async def _health(self, _: Request) -> Response:
        """Answer 200 while engine and publisher are healthy, else 503, without a body."""
        stats = self.engine.stats()
        has_work = stats.running + stats.waiting > 0 and not self.engine.is_sleeping
        stuck = has_work and time.monotonic() - stats.last_step_monotonic_s > STUCK_S
        healthy = stats.healthy and not stuck and (self.publisher is None or self.publisher.healthy)
        return Response(status_code=200 if healthy else 503)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _load_lora_adapter(self, request: Request) -> Response:
        """Load an adapter from a directory of this machine."""
        loras = self._changeable_loras()
        async with self._bodies.read(request) as raw:
            body = convert(decode_body(raw), LoadAdapterBody)
        if body.lora_name in self._model.names:
            raise ApiError(400, f"{body.lora_name!r} is the model's own name", "lora_name")
        try:
            await self._in_thread(loras.load, body.lora_name, Path(body.lora_path))
        except AdapterError as error:
            raise ApiError(400, str(error), "lora_path") from error
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_lora_adapter(self, request: Request) -> Response:
        """Unload an adapter. Running requests keep it."""
        loras = self._changeable_loras()
        async with self._bodies.read(request) as raw:
            body = convert(decode_body(raw), UnloadAdapterBody)
        try:
            await self._in_thread(loras.unload, body.lora_name)
        except AdapterError as error:
            raise ApiError(404, str(error), "lora_name") from error
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _kv_events_snapshot(self, _: Request) -> Response:
        """Send a snapshot of the caches; see `ZmqEventPublisher.snapshot`."""
        if self.publisher is None:
            raise ApiError(404, "this server publishes no KV events")
        publisher, cache = self.publisher, self.engine.kv_cache

        def take() -> Snapshot:
            return publisher.snapshot(cache.event_builder, cache.contents())

        with self._snapshots.one():
            try:
                snapshot = await self._in_thread(self.engine.between_steps, take)
            except EngineClosedError as error:
                raise ApiError(503, str(error)) from error
            return Response(await self._in_thread(snapshot.body), media_type=SNAPSHOT_TYPE)

    async def _reset_prefix_cache(self, _: Request) -> Response:
        """Reset the prefix cache. While requests run, nothing changes and `success` is false."""
        return json_response({"success": await self._in_thread(self.engine.reset_prefix_cache)})

    async def _sleep(self, _: Request) -> Response:
        """Free the memory of the KV cache and return its bytes; the weights stay."""
        if not await self._in_thread(self.engine.sleep):
            raise ApiError(409, "requests are running; the engine sleeps only when it is idle")
        return json_response({"freed_bytes": self.engine.freed_bytes})

    async def _wake_up(self, _: Request) -> Response:
        """Allocate the KV pool again, empty. Does nothing while the engine is awake."""
        await self._in_thread(self.engine.wake_up)
        return Response()

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "kvroute",
            "root": root,
            "parent": parent,
            "max_model_len": self._model.max_model_len,
        }

    def _changeable_loras(self) -> LoraRegistry:
        if not self.options.runtime_loras:
            raise ApiError(
                403, "adapters cannot be changed; start the server with --allow-runtime-lora-updating"
            )
        return self.engine.loras

    def _cache_config(self) -> dict[str, str]:
        config, stats = self.options.engine, self.engine.stats()
        return {
            "block_size": str(self.engine.block_tokens),
            "num_gpu_blocks": str(stats.total_blocks),
            "num_cpu_blocks": str(stats.host_blocks),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "max_model_len": str(self.engine.max_model_len),
        }

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _answering(value: Callable[[], object]) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that answers with a value as JSON."""

    async def answer(_: Request) -> Response:
        return json_response(value())

    return answer


def _header_id(request: Request) -> str | None:
    header_id = request.headers.get("x-request-id")
    if header_id is not None and len(header_id) > _HEADER_ID_CHARS_MAX:
        raise ApiError(400, f"x-request-id is longer than {_HEADER_ID_CHARS_MAX} characters", "x-request-id")
    return header_id or None


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer with any exception in the API's error format."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error; the server's log has the details")
    if error.status in (408, 413):
        # The unread rest of the body must not be parsed as the next request.
        headers["connection"] = "close"
    return error_response(error, headers)
