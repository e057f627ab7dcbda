"""The HTTP API: OpenAI's completions and chat completions, and the ids that prompts become.

In: HTTP requests. Out: answers, whole or streamed. Knows the routes and the order of the steps; each step
(reading, preparing, generating, shaping) is a module of its own, and so are the routes for operators.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from model_server.api_errors import ApiError
from model_server.engine import Engine
from model_server.generation import AsyncEngine, Generation
from model_server.http_admin import AdminApi, ServerState
from model_server.http_io import BodyReader, EventStream, QuietEnd, json_response, unless_disconnected
from model_server.http_server import AdminPort, BearerGate, by_port
from model_server.openai_responses import AnswerStream, Responder, usage
from model_server.openai_types import Api, GenerationBody
from model_server.prepare import ServedModel, detokenize, prepare, render, tokenize
from model_server.text import Delta, TextAssembler, joined

_PREPARE_THREADS = 2
_BODIES_AT_ONCE = 16
_HEADER_ID_CHARS_MAX = 256

_T = TypeVar("_T")


class HttpApi:
    """All routes of one model server.

    Args:
        model: The served model.
        async_engine: Runs the requests.
        max_body_bytes: Larger bodies are refused.
        max_requests: Most requests handled at once; one more is refused.
        api_key: What clients must send; None lets everybody in.
    """

    def __init__(
        self,
        model: ServedModel,
        async_engine: AsyncEngine,
        *,
        max_body_bytes: int,
        max_requests: int,
        api_key: str | None = None,
    ) -> None:
        self._model = model
        self._async_engine = async_engine
        self._bodies = BodyReader(max_body_bytes, max_body_bytes * _BODIES_AT_ONCE)
        self._max_requests = max_requests
        self._api_key = api_key
        self._requests = 0
        self._running: dict[str, set[Generation]] = {}
        self._threads = ThreadPoolExecutor(_PREPARE_THREADS, "prepare")

    @property
    def load(self) -> int:
        """How many requests are handled now."""
        return self._requests

    def app(self, engine: Engine, state: ServerState, admin_port: AdminPort | None = None) -> ASGIApp:
        """The ASGI application.

        Args:
            engine: What operators switch.
            state: What they are told.
            admin_port: The port that serves administration; None: it is not served.
        """
        admin = AdminApi(self._model, engine, state, self._bodies, self._threads)
        serving = _routed([*self._routes(), *admin.open_routes(), *admin.model_routes()])
        if self._api_key is not None:
            serving = BearerGate(serving, self._api_key, "the API key")
        if admin_port is None:
            return QuietEnd(serving)
        switches = _routed([*admin.open_routes(), *admin.admin_routes()])
        if admin_port.token is not None:
            switches = BearerGate(switches, admin_port.token, "the administration's token")
        return QuietEnd(by_port(admin_port.number, switches, serving))

    def _routes(self) -> list[Route]:
        model = self._model
        posted: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/v1/completions": partial(self._generate, api="completion"),
            "/v1/chat/completions": partial(self._generate, api="chat"),
            # The ids of a completion's prompts or of a chat, as vLLM tells them.
            "/v1/completions/render": partial(self._computed, work=partial(render, model, "completion")),
            "/v1/chat/completions/render": partial(self._computed, work=partial(render, model, "chat")),
            # The ids that a prompt or messages would become; the text of ids, special tokens included.
            "/tokenize": partial(self._computed, work=partial(tokenize, model)),
            "/detokenize": partial(self._computed, work=partial(detokenize, model)),
        }
        return [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()),
            Route("/v1/requests/{request_id}", self.abort, methods=["DELETE"]),
        ]

    def close(self) -> None:
        """Let the worker threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def abort(self, request: Request) -> Response:
        """DELETE /v1/requests/{id}: end a running request; its own client is told so."""
        request_id = request.path_params["request_id"]
        generations = self._running.get(request_id)
        if not generations:
            raise ApiError(404, f"no request {request_id!r} is running", "request_id")
        for generation in generations:
            generation.fail(ApiError(409, "the request was ended by DELETE /v1/requests"))
        return json_response({"id": request_id, "object": "request", "deleted": True})

    async def _computed(self, request: Request, work: Callable[[bytes], object]) -> Response:
        """Answer with what a thread makes of the body."""
        async with self._bodies.read(request) as raw:
            return json_response(await self._in_thread(work, raw))

    async def _generate(self, request: Request, api: Api) -> Response:
        arrived_s = self._async_engine.now_s()
        header_id = _header_id(request)
        with ExitStack() as cleanup:
            cleanup.enter_context(self._admitted())
            async with self._bodies.read(request) as raw:
                job = await self._in_thread(prepare, self._model, api, raw, header_id)
            texts = tuple(self._text(job.fields) for _ in job.requests)
            generation = self._async_engine.generate(job.requests, texts, arrived_s)
            self._async_engine.metrics.params(job.fields.n or 1, job.requests[0].sampling.max_tokens)
            cleanup.callback(generation.close)
            cleanup.enter_context(self._named(job.request_id, generation))
            responder = Responder(job, self._model.tokenizer)
            if not job.fields.stream:
                whole = await unless_disconnected(request.receive, _whole(responder, generation))
                return json_response(whole)
            answer = AnswerStream(responder, generation)
            pieces = answer.pieces()
            # Awaited before the status is sent: an early failure is a proper error, and the time to the first
            # byte is the time to the first token.
            first = await unless_disconnected(request.receive, anext(pieces))
            return EventStream(first, pieces, cleanup.pop_all().close, write_to=answer.write_to)

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
            tells_ids=bool(fields.return_token_ids),
        )

    @contextmanager
    def _named(self, request_id: str, generation: Generation) -> Iterator[None]:
        named = self._running.setdefault(request_id, set())
        named.add(generation)
        try:
            yield
        finally:
            named.discard(generation)
            if not named and self._running.get(request_id) is named:
                del self._running[request_id]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._requests >= self._max_requests:
            raise ApiError(503, f"{self._max_requests} requests are being handled already; try again later")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1


def _routed(routes: list[Route]) -> ASGIApp:
    handlers = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _whole(responder: Responder, generation: Generation) -> dict[str, Any]:
    """Collect the answer to a request that does not stream."""
    said: list[list[Delta]] = [[] for _ in generation.texts]
    async for deltas in generation:
        for index, delta in deltas:
            said[index].append(delta)
    return responder.whole([joined(deltas) for deltas in said], usage(responder, generation))


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
