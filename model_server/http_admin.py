"""What operators, probes, scrapers and routers ask a model server beside answers.

In: HTTP requests. Out: the server's state, and changes of it: adapters, the prefix cache, sleep. Knows the
engine's switches; knows nothing of prompts and answers.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from model_server.api_errors import ApiError
from model_server.engine import Engine
from model_server.errors import AdapterError, EngineClosedError
from model_server.http_io import BodyReader, EventStream, json_response
from model_server.lora_registry import LoraRegistry
from model_server.openai_types import convert, decode_body
from model_server.prepare import ServedModel
from model_server.publish import KVEventPublisher
from model_server.snapshot import MEDIA_TYPE as SNAPSHOT_TYPE

# Each is a copy of the caches' books.
_SNAPSHOTS_AT_ONCE = 2
_PIECES_AT_ONCE = 16

_Text = Annotated[str, Meta(min_length=1, max_length=4096)]
_T = TypeVar("_T")


class LoadAdapterBody(msgspec.Struct):
    """/v1/load_lora_adapter."""

    lora_name: _Text
    lora_path: _Text


class UnloadAdapterBody(msgspec.Struct):
    """/v1/unload_lora_adapter."""

    lora_name: _Text


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server tells of itself."""

    registry: CollectorRegistry  # shown at /metrics
    healthy: Callable[[], bool]  # answers /health
    publisher: KVEventPublisher | None  # publishes KV events; None where there are none
    load: Callable[[], int]  # how many requests are handled now
    runtime_loras: bool  # whether operators may load adapters from the server's own directories


class AdminApi:
    """The routes beside those that answer prompts.

    Args:
        model: The served model.
        engine: What operators switch.
        state: What is told.
        bodies: Reads request bodies.
        threads: For work that would hold the event loop up.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        state: ServerState,
        bodies: BodyReader,
        threads: ThreadPoolExecutor,
    ) -> None:
        self._model = model
        self._engine = engine
        self._state = state
        self._bodies = bodies
        self._threads = threads
        self._snapshots = 0
        self._adapter_paths: dict[str, str] = {}
        self._started_s = int(time.time())

    def model_routes(self) -> list[Route]:
        """Routes of the serving port alone."""
        return [Route("/v1/models", self.models)]

    def open_routes(self) -> list[Route]:
        """Routes of both ports, which tell nothing of prompts: for probes and scrapers."""
        return [
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
        ]

    def admin_routes(self) -> list[Route]:
        """Routes of the administration port alone."""
        return [
            Route("/v1/load_lora_adapter", self.load_lora_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_lora_adapter, methods=["POST"]),
            Route("/kv_event_sources", self.kv_event_sources),
            Route("/kv_events/snapshot", self.kv_events_snapshot),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
            Route("/is_sleeping", self.is_sleeping),
        ]

    async def models(self, _: Request) -> Response:
        """GET /v1/models: the model's names, then its adapters with the model as their parent."""
        cards = [self._card(name, self._model.root, None) for name in self._model.names]
        for name in self._model.adapters.names() if self._model.adapters is not None else ():
            cards.append(self._card(name, self._adapter_paths.get(name, name), self._model.names[0]))
        return json_response({"object": "list", "data": cards})

    async def load_lora_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: read an adapter from a directory of the server's."""
        loras = self._changeable_loras()
        async with self._bodies.read(request) as raw:
            body = convert(decode_body(raw), LoadAdapterBody)
        if body.lora_name in self._model.names:
            raise ApiError(400, f"{body.lora_name!r} is the model's own name", "lora_name")
        try:
            await self._in_thread(loras.load, body.lora_name, Path(body.lora_path))
        except AdapterError as error:
            raise ApiError(400, str(error), "lora_path") from error
        self._adapter_paths[body.lora_name] = body.lora_path
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: requests that use it already go on."""
        loras = self._changeable_loras()
        async with self._bodies.read(request) as raw:
            body = convert(decode_body(raw), UnloadAdapterBody)
        try:
            await self._in_thread(loras.unload, body.lora_name)
        except AdapterError as error:
            raise ApiError(404, str(error), "lora_name") from error
        self._adapter_paths.pop(body.lora_name, None)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def health(self, _: Request) -> Response:
        """GET /health and /ping: 200 while the engine's loop turns, else 503; no body."""
        return Response(status_code=200 if self._state.healthy() else 503)

    async def version(self, _: Request) -> Response:
        """GET /version."""
        return json_response({"version": version("kvroute")})

    async def load(self, _: Request) -> Response:
        """GET /load: how many requests are handled now."""
        return json_response({"server_load": self._state.load()})

    async def metrics(self, _: Request) -> Response:
        """GET /metrics in Prometheus' text format."""
        return Response(generate_latest(self._state.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def kv_event_sources(self, _: Request) -> Response:
        """GET /kv_event_sources: where this server publishes its KV events."""
        publisher = self._state.publisher
        return json_response({} if publisher is None else {"0": publisher.config.announced()})

    async def kv_events_snapshot(self, _: Request) -> Response:
        """GET /kv_events/snapshot: what the caches hold, see `snapshot`; 404 without KV events."""
        publisher = self._state.publisher
        if publisher is None:
            raise ApiError(404, "this server publishes no KV events")
        if self._snapshots >= _SNAPSHOTS_AT_ONCE:
            raise ApiError(503, f"{_SNAPSHOTS_AT_ONCE} snapshots are being sent already; try again later")
        self._snapshots += 1
        with ExitStack() as cleanup:
            cleanup.callback(self._snapshot_sent)
            take = partial(publisher.snapshot, self._engine.cache)
            try:
                pieces = (await self._in_thread(self._engine.between_steps, take)).pieces()
            except EngineClosedError as error:
                raise ApiError(503, str(error)) from error
            first = await self._in_thread(_joined, pieces)
            return EventStream(first, self._rest(pieces), cleanup.pop_all().close, SNAPSHOT_TYPE)

    async def reset_prefix_cache(self, _: Request) -> Response:
        """POST /reset_prefix_cache: `success` is false, and nothing is done, while requests run."""
        return json_response({"success": await self._in_thread(self._engine.reset_prefix_cache)})

    async def sleep(self, _: Request) -> Response:
        """POST /sleep: give the KV pool's memory back; 409, and nothing is done, while requests run."""
        if not await self._in_thread(self._engine.sleep):
            raise ApiError(409, "requests are running; the engine sleeps only when it is idle")
        return Response()

    async def wake_up(self, _: Request) -> Response:
        """POST /wake_up: take the memory again, with an empty cache; no harm to an engine that is awake."""
        await self._in_thread(self._engine.wake_up)
        return Response()

    async def is_sleeping(self, _: Request) -> Response:
        """GET /is_sleeping."""
        return json_response({"is_sleeping": self._engine.is_sleeping})

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
        if not self._state.runtime_loras or self._engine.loras is None:
            raise ApiError(403, "adapters cannot be changed here; start with --allow-runtime-lora-updating")
        return self._engine.loras

    def _snapshot_sent(self) -> None:
        self._snapshots -= 1

    async def _rest(self, pieces: Iterator[bytes]) -> AsyncGenerator[bytes]:
        while piece := await self._in_thread(_joined, pieces):
            yield piece

    async def _in_thread(self, work: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _joined(pieces: Iterator[bytes]) -> bytes:
    """The next pieces together: enough that a thread is worth its while."""
    return b"".join(islice(pieces, _PIECES_AT_ONCE))
