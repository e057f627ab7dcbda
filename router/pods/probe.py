"""HTTP probe of a pod: health, served models, load and event ports.

One connection per address is kept open, with one request at a time. A request has a timeout from connecting
to the last byte, and a limit of its body's size.
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
from router.pods.pod_set import (
    DEFAULT_METRICS_PAGE,
    NOT_REPORTED,
    EventSources,
    MetricsPage,
    ServedModels,
    metrics_page,
)

_HEADER_BYTES_MAX = 64 << 10
_PAGE_BYTES_MAX = 4 << 20
_WAKE_TIMEOUT_S = 60.0  # loading weights from host memory or disk takes seconds
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_SOURCES_PATH = "/kv_event_sources"
_PORTS = 65_536
_ENDPOINT = re.compile(r"tcp://[^\s/]*:([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of probing one pod."""

    address: str
    healthy: bool  # whether GET /health returned 200, or 404 without such a page
    timed_out: bool = False  # whether the probe timed out, as may happen on a busy pod
    why: str = ""  # what is wrong; empty if healthy
    models: ServedModels | None = None  # None if not requested or not reported
    load: EngineLoad | None = None  # None if not reported
    reading: EngineReading | None = None  # counters of the engine process; None if not reported
    refused: bool = False  # whether the connection was refused
    unreachable: bool = False  # whether connecting timed out, or there is no route
    sources: EventSources | None = None  # reported event ports; None if not requested
    why_no_load: str = ""  # why the load is missing; empty if reported, or if the pod is not healthy
    asleep: bool | None = None  # whether its engines are in sleep mode; None if its metrics are unreadable


@dataclass(eq=False)
class Prober:
    """Prober of pods that keeps connections open between probes; for one asyncio loop."""

    timeout_s: float  # timeout of one HTTP request
    admin_token: str | None = None  # bearer token for pods' admin ports; None if they need none
    metrics_page: MetricsPage = DEFAULT_METRICS_PAGE  # of pods whose labels name no other

    def __post_init__(self) -> None:
        self._http = HttpGetter(self.timeout_s)

    async def probe(self, entry: PodEntry, *, models: bool, sources: bool) -> ProbeResult:
        """Probe one pod, on request with its models and event ports."""
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
        # 404 means an engine without a health page, which is alive.
        if status not in (200, 404):
            return ProbeResult(address, False, False, f"/health answered {status}")
        served, _ = await self._page(address, "/v1/models") if models else (None, "")
        reported = await self._sources(entry) if sources else None
        asked_s = time.monotonic()
        metrics_address, path = metrics_page(entry, self.metrics_page)
        metrics, why_no_load = await self._page(metrics_address, path)
        load, reading, asleep = None, None, None
        if metrics is not None:
            page = EnginePage(metrics)
            load, reading = page.load(time.monotonic(), asked_s), page.reading(asked_s)
            asleep = page.is_asleep
            if load is None:
                url = f"http://{metrics_address}{path}"
                why_no_load = f"{url} has no valid metrics of a known engine"
        return ProbeResult(
            address,
            True,
            models=served_models(served) if served is not None else None,
            load=load,
            reading=reading,
            sources=reported,
            why_no_load=why_no_load,
            asleep=asleep,
        )

    async def wake(self, entry: PodEntry) -> str:
        """Wake a sleeping engine by POST /wake_up; return what failed, or an empty text."""
        http = HttpGetter(_WAKE_TIMEOUT_S)
        address, token = (entry.admin, self.admin_token) if entry.admin else (entry.pod, None)
        try:
            status, _ = await http.get(address, "/wake_up", token, "POST")
        except (OSError, HttpGetError) as error:
            return f"/wake_up: {error!r}"
        finally:
            http.close()
        return "" if status == 200 else f"/wake_up answered {status}"

    def forget(self, address: str) -> None:
        """Close the connections to a removed pod, including its metrics port."""
        self._http.forget(address.rpartition(":")[0])

    def close(self) -> None:
        self._http.close()

    async def _sources(self, entry: PodEntry) -> EventSources:
        if entry.admin is None:
            page, _ = await self._page(entry.pod, _SOURCES_PATH)
        else:
            # The token is sent to the admin port only.
            page, _ = await self._page(entry.admin, _SOURCES_PATH, self.admin_token)
            # Rarely used, so do not keep the connection.
            self.forget(entry.admin)
        return NOT_REPORTED if page is None else event_sources(page, entry.events.rank)

    async def _page(self, address: str, path: str, bearer: str | None = None) -> tuple[bytes | None, str]:
        """Return a page's body, or None and the reason."""
        url = f"http://{address}{path}"
        try:
            status, body = await self._http.get(address, path, bearer)
        except TimeoutError:
            return None, f"{url} not answered within {self.timeout_s:g} s"
        except (OSError, HttpGetError) as error:
            return None, f"{url}: {error}"
        return (body, "") if status == 200 else (None, f"{url} answered {status}")


def served_models(page: bytes) -> ServedModels | None:
    """Parse a /v1/models page, where a card with a parent is a LoRA adapter; None without a base model."""
    try:
        cards = _CARDS.decode(page).data
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
        adapter_roots=frozenset((card.id, card.root) for card in cards if card.parent and card.root),
    )


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_CARDS = msgspec.json.Decoder(_Cards)


def event_sources(page: bytes, rank: int | None) -> EventSources:
    """Parse /kv_event_sources, vLLM's KVEventsConfig by rank, for one rank or (None) all on the page."""
    try:
        reported = _SOURCES.decode(page)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NOT_REPORTED
    ranks = sorted(reported)
    if not ranks or len(ranks) > RANKS_MAX:
        return NOT_REPORTED
    if not any(source.publishes for source in reported.values()):
        return EventSources(reported=True, off=True)
    # An engine that reports only itself may do so as rank 0.
    own = ranks if rank is None or len(ranks) == 1 else [rank]
    if not reported.keys() >= set(own):
        return NOT_REPORTED
    ports = [_port(reported[each].endpoint) for each in own]
    first = ports[0]
    if first is None:
        return NOT_REPORTED
    count = len(own) if ports == list(range(first, first + len(own))) else 1
    labels = {EVENTS_PORT_LABEL: str(first), RANKS_LABEL: str(count)}
    replay = _port(reported[own[0]].replay_endpoint)
    if max(first, replay or 0) + count > _PORTS:
        return NOT_REPORTED
    if replay is not None:
        labels[REPLAY_PORT_LABEL] = str(replay)
    if topic := reported[own[0]].topic:
        labels[TOPIC_LABEL] = topic
    if any(label_problem(name, value) for name, value in labels.items()):
        return NOT_REPORTED
    return EventSources(reported=True, labels=labels)


class _Source(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher in (None, "zmq")


_SOURCES = msgspec.json.Decoder(dict[int, _Source])


def _port(endpoint: str | None) -> int | None:
    found = _ENDPOINT.fullmatch(endpoint or "")
    return int(found[1]) if found is not None else None


class HttpGetError(Exception):
    """Invalid or oversized HTTP response."""


class ConnectTimeoutError(TimeoutError):
    """Timeout while connecting: the address neither accepts nor refuses the connection."""


@dataclass(eq=False)
class HttpGetter:
    """HTTP client that keeps connections open; for one asyncio loop."""

    timeout_s: float  # timeout of a request from connecting to the last byte
    _connections: dict[str, _Connection] = field(default_factory=dict, init=False)

    async def get(
        self, address: str, path: str, bearer: str | None = None, method: str = "GET"
    ) -> tuple[int, bytes]:
        """Send a request without a body and return status and body; cancellation closes the connection.

        Args:
            address: "ip:port".
            bearer: Bearer token; None for none.

        Raises:
            ConnectTimeoutError: Connecting timed out.
            TimeoutError: The response timed out.
            OSError: Connecting failed, or the connection broke.
            HttpGetError: The response is invalid or too large.
        """
        secret = "" if bearer is None else f"Authorization: Bearer {bearer}\r\n"
        length = "" if method == "GET" else "Content-Length: 0\r\n"
        request = f"{method} {path} HTTP/1.1\r\nHost: {address}\r\n{secret}{length}\r\n".encode("ascii")
        connection = None
        try:
            async with asyncio.timeout(self.timeout_s):
                connection = self._connections.pop(address, None)
                if connection is not None and connection.is_open:
                    # The server may have closed an idle connection; then try a new one.
                    with suppress(ConnectionError):
                        return await self._exchange(connection, address, request)
                connection = None
                host, _, port = address.rpartition(":")
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, host.strip("[]"), int(port))
                return await self._exchange(connection, address, request)
        except TimeoutError as error:
            if connection is None:
                raise ConnectTimeoutError(f"no connection to {address}") from error
            raise

    def forget(self, host: str) -> None:
        """Close all idle connections to a host."""
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
        # Another request to this address may have stored its connection meanwhile.
        if (other := self._connections.get(address)) is not None:
            other.abort()
        self._connections[address] = connection
        return answer


class _Connection(asyncio.Protocol):
    """HTTP connection, and the callbacks of its response parser."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: Any = None
        self._body = bytearray()
        self._header_bytes = 0
        self._has_length = False
        # Whether the body ends with the connection.
        self._may_end = False

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def get(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request and return a future of its response."""
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
            self.abort()  # unsolicited data
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
        if len(self._body) > _PAGE_BYTES_MAX:
            self._fail(HttpGetError(f"more than {_PAGE_BYTES_MAX} bytes"))

    def on_message_complete(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), bytes(self._body)))
            if not self._parser.should_keep_alive():
                self.abort()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self.abort()
