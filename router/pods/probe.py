"""One pod asked over HTTP how it is: its declaration in, health, served models, load and event sources out.

GETs go over kept connections, one for each address, with one exchange at a time on each. Every exchange has
the deadline, from connecting to the last byte; bodies are capped. Decides nothing.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

from indexer import EngineReading
from indexer.config import RANKS_MAX
from indexer.pod_entry import (
    EVENTS_PORT_LABEL,
    RANKS_LABEL,
    REPLAY_PORT_LABEL,
    TOPIC_LABEL,
    PodEntry,
    label_problem,
)
from router.pods.engine_load import EngineLoad, EnginePage
from router.pods.pod_set import DEFAULT_METRICS_PATH, NOT_TOLD, EventSources, ServedModels, metrics_page

_HEADER_BYTES_MAX = 64 << 10
_PAGE_BYTES_MAX = 4 << 20
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_SOURCES_PATH = "/kv_event_sources"
_PORTS = 65_536
_ENDPOINT = re.compile(r"tcp://[^\s/]*:([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Answer of a pod."""

    address: str
    healthy: bool  # whether GET /health was answered with 200
    timed_out: bool = False  # whether it was not answered in time, which a busy pod may do now and then
    why: str = ""  # what is wrong, for a person; empty when healthy
    models: ServedModels | None = None  # None when not asked for, or not told
    load: EngineLoad | None = None  # None when not told
    reading: EngineReading | None = None  # what the page tells of the engine's life; None when not told
    refused: bool = False  # whether the connection was refused
    unreachable: bool = False  # whether no connection came about in time, or there is no route
    sources: EventSources | None = None  # where it says that it publishes its events; None when not asked for
    why_no_load: str = ""  # for a person; empty where it was told, and for a pod that is not healthy
    asleep: bool | None = None  # whether its engines sleep; None when its metrics could not be read


@dataclass(eq=False)
class Prober:
    """Keeps connections to pods alive between probes; to be used by one asyncio loop."""

    timeout_s: float  # deadline of one HTTP exchange
    admin_token: str | None = None  # bearer secret for pods' administration ports; None: they ask for none
    metrics_path: str = DEFAULT_METRICS_PATH  # where pods tell their load, unless their labels say so

    def __post_init__(self) -> None:
        self._http = HttpGetter(body_bytes_max=_PAGE_BYTES_MAX, timeout_s=self.timeout_s)

    async def probe(self, entry: PodEntry, *, models: bool, sources: bool) -> ProbeResult:
        """Asks one pod, also for its models and where it publishes its events if so told."""
        address = entry.pod
        try:
            status, _ = await self._http.get(address, "/health")
        except ConnectTimeoutError:
            why = f"/health: no connection within {self.timeout_s:g} s"
            return ProbeResult(address, False, True, why, unreachable=True)
        except TimeoutError:
            return ProbeResult(address, False, True, f"/health not answered within {self.timeout_s:g} s")
        except (OSError, HttpGetError) as error:
            return ProbeResult(
                address,
                False,
                False,
                f"/health: {error}",
                refused=isinstance(error, ConnectionRefusedError),
                unreachable=isinstance(error, OSError) and error.errno in _NO_ROUTE,
            )
        # An engine without such a page is asked in vain, but it answers.
        if status not in (200, 404):
            return ProbeResult(address, False, False, f"/health answered {status}")
        served, _ = await self._page(address, "/v1/models") if models else (None, "")
        told = await self._sources(entry) if sources else None
        asked_s = time.monotonic()
        metrics_address, path = metrics_page(entry, self.metrics_path)
        metrics, why_no_load = await self._page(metrics_address, path)
        load, reading, asleep = None, None, None
        if metrics is not None:
            page = EnginePage(metrics)
            load, reading = page.load(time.monotonic(), asked_s), page.reading(asked_s)
            asleep = page.is_asleep
            if load is None:
                url = f"http://{metrics_address}{path}"
                why_no_load = f"{url} has no metrics of an engine that is known, or senseless ones"
        return ProbeResult(
            address,
            True,
            models=served_models(served) if served is not None else None,
            load=load,
            reading=reading,
            sources=told,
            why_no_load=why_no_load,
            asleep=asleep,
        )

    def forget(self, address: str) -> None:
        """The pod is gone: drops its connections, wherever its metrics are."""
        self._http.forget(address.rpartition(":")[0])

    def close(self) -> None:
        self._http.close()

    async def _sources(self, entry: PodEntry) -> EventSources:
        if entry.admin is None:
            page, _ = await self._page(entry.pod, _SOURCES_PATH)
        else:
            # Of all addresses this alone is sent the token.
            page, _ = await self._page(entry.admin, _SOURCES_PATH, self.admin_token)
            # Seldom asked: the connection is not worth keeping.
            self.forget(entry.admin)
        return NOT_TOLD if page is None else event_sources(page, entry.events.rank)

    async def _page(self, address: str, path: str, bearer: str | None = None) -> tuple[bytes | None, str]:
        """A page, or why there is none."""
        url = f"http://{address}{path}"
        try:
            status, body = await self._http.get(address, path, bearer)
        except TimeoutError:
            return None, f"{url} not answered within {self.timeout_s:g} s"
        except (OSError, HttpGetError) as error:
            return None, f"{url}: {error}"
        return (body, "") if status == 200 else (None, f"{url} answered {status}")


def served_models(page: bytes) -> ServedModels | None:
    """Reads a /v1/models page; a card with a parent is a LoRA adapter.

    Returns:
        None when it names no base model.
    """
    try:
        cards = msgspec.json.decode(page, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    bases = [card for card in cards if card.parent is None]
    if not bases:
        return None
    return ServedModels(
        base=bases[0].id,
        aliases=frozenset(card.id for card in bases),
        adapters=frozenset(card.id for card in cards if card.parent is not None),
        max_model_len=bases[0].max_model_len,
    )


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def event_sources(page: bytes, rank: int | None) -> EventSources:
    """Reads /kv_event_sources, which tells vLLM's KVEventsConfig by data-parallel rank.

    Args:
        rank: Which engine stands behind the port that was asked; None: all that it tells of.
    """
    try:
        told = msgspec.json.decode(page, type=dict[int, _Source])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOT_TOLD
    ranks = sorted(told)
    if not ranks or len(ranks) > RANKS_MAX:
        return NOT_TOLD
    if not any(source.publishes for source in told.values()):
        return EventSources(told=True, off=True)
    # An engine that tells of itself alone may count itself as 0.
    own = ranks if rank is None or len(ranks) == 1 else [rank]
    if not told.keys() >= set(own):
        return NOT_TOLD
    ports = [_port(told[each].endpoint) for each in own]
    first = ports[0]
    if first is None:
        return NOT_TOLD
    count = len(own) if ports == list(range(first, first + len(own))) else 1
    labels = {EVENTS_PORT_LABEL: str(first), RANKS_LABEL: str(count)}
    replay = _port(told[own[0]].replay_endpoint)
    if max(first, replay or 0) + count > _PORTS:
        return NOT_TOLD
    if replay is not None:
        labels[REPLAY_PORT_LABEL] = str(replay)
    if topic := told[own[0]].topic:
        labels[TOPIC_LABEL] = topic
    if any(label_problem(name, value) for name, value in labels.items()):
        return NOT_TOLD
    return EventSources(told=True, labels=labels)


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


def _port(endpoint: str | None) -> int | None:
    found = _ENDPOINT.fullmatch(endpoint or "")
    return int(found[1]) if found is not None else None


class HttpGetError(Exception):
    """The other side answered something that is no usable HTTP answer."""


class ConnectTimeoutError(TimeoutError):
    """No connection came about in time: nothing at the address takes or refuses it."""


@dataclass(eq=False)
class HttpGetter:
    """Keeps connections alive between exchanges; to be used by one loop."""

    body_bytes_max: int  # longer bodies are an error
    timeout_s: float  # deadline of an exchange from connecting to the last byte
    _connections: dict[str, _Connection] = field(default_factory=dict, init=False)

    async def get(self, address: str, path: str, bearer: str | None = None) -> tuple[int, bytes]:
        """Asks; when cancelled, the connection is dropped.

        Args:
            address: "ip:port".
            bearer: Secret to send along; None: no secret.

        Raises:
            ConnectTimeoutError: It could not be connected to within the deadline.
            TimeoutError: It did not answer within the deadline.
            OSError: It cannot be connected to, or the connection broke.
            HttpGetError: The answer is no HTTP, or too long.
        """
        secret = "" if bearer is None else f"Authorization: Bearer {bearer}\r\n"
        request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n{secret}\r\n".encode("ascii")
        connection = None
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = self._connections.pop(address, None)
                if connection is not None and connection.is_open:
                    # One that the other side has closed meanwhile says nothing.
                    with suppress(ConnectionError):
                        return await self._exchange(connection, address, request)
                connection = None
                host, _, port = address.rpartition(":")
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: _Connection(self.body_bytes_max), host.strip("[]"), int(port)
                )
                return await self._exchange(connection, address, request)
        except TimeoutError as error:
            if connection is None:
                raise ConnectTimeoutError(f"no connection to {address}") from error
            raise

    def forget(self, host: str) -> None:
        """Drops all connections to a host that nobody uses now."""
        for address in [known for known in self._connections if known.rpartition(":")[0] == host]:
            self._connections.pop(address).abort()

    def close(self) -> None:
        while self._connections:
            self._connections.popitem()[1].abort()

    async def _exchange(self, connection: _Connection, address: str, request: bytes) -> tuple[int, bytes]:
        try:
            answer = await connection.get(request)
        except BaseException:
            connection.abort()
            raise
        # Another exchange with this address may have left its connection meanwhile.
        if (other := self._connections.get(address)) is not None:
            other.abort()
        self._connections[address] = connection
        return answer


class _Connection(asyncio.Protocol):
    """One connection; also what the parser calls while it reads an answer."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._transport: Any = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: Any = None
        self._body = bytearray()
        self._header_bytes = 0
        self._has_length = False
        # Whether the end of the connection is the end of a body.
        self._may_end = False

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def get(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Sends a request; the answer is for the future."""
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._header_bytes, self._has_length, self._may_end = 0, False, False
        if self.is_open:
            self._transport.write(request)
        else:
            self._fail(ConnectionResetError("closed by the other side"))
        return self._answer

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.abort()  # nothing was asked
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(HttpGetError(f"no HTTP answer: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._may_end and error is None:
            self.on_message_complete()
        self._fail(ConnectionResetError(str(error or "closed by the other side")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _HEADER_BYTES_MAX:
            self._fail(HttpGetError("headers too long"))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._may_end = not self._has_length

    def on_body(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > self._body_bytes_max:
            self._fail(HttpGetError(f"more than {self._body_bytes_max} bytes"))

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), bytes(self._body)))
            if not self._parser.should_keep_alive():
                self.abort()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self.abort()
