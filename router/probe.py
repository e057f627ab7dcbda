"""One pod asked over HTTP how it is: its declaration in, health, served models, load and event sources out.

Every exchange has the deadline, from connecting to the last byte. Decides nothing.
"""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass

import msgspec

from indexer.config import RANKS_MAX
from indexer.pod_entry import (
    EVENTS_PORT_LABEL,
    RANKS_LABEL,
    REPLAY_PORT_LABEL,
    TOPIC_LABEL,
    PodEntry,
    label_problem,
)
from indexer.reconcile import EngineReading
from router.http_get import ConnectTimeoutError, HttpGetError, HttpGetter
from router.pods import DEFAULT_METRICS_PATH, NOT_TOLD, EventSources, ServedModels, metrics_page
from router.scrape import EngineLoad, EnginePage

_PAGE_BYTES_MAX = 4 << 20
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_SOURCES_PATH = "/kv_event_sources"
_PORTS = 65_536
_ENDPOINT = re.compile(r"tcp://[^\s/]*:([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a pod answered."""

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


class Prober:
    """Keeps connections to pods alive between probes; to be used by one asyncio loop.

    Args:
        timeout_s: Deadline of one HTTP exchange.
        admin_token: Bearer secret for pods' administration ports; None: they ask for none.
        metrics_path: Where pods tell their load, unless their labels say so.
    """

    def __init__(
        self, *, timeout_s: float, admin_token: str | None = None, metrics_path: str = DEFAULT_METRICS_PATH
    ) -> None:
        self._timeout_s = timeout_s
        self._admin_token = admin_token
        self._metrics_path = metrics_path
        self._http = HttpGetter(body_bytes_max=_PAGE_BYTES_MAX, timeout_s=timeout_s)

    async def probe(self, entry: PodEntry, *, models: bool, sources: bool) -> ProbeResult:
        """Asks one pod, also for its models and where it publishes its events if so told."""
        address = entry.pod
        try:
            status, _ = await self._http.get(address, "/health")
        except ConnectTimeoutError:
            why = f"/health: no connection within {self._timeout_s:g} s"
            return ProbeResult(address, False, True, why, unreachable=True)
        except TimeoutError:
            return ProbeResult(address, False, True, f"/health not answered within {self._timeout_s:g} s")
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
        metrics_address, path = metrics_page(entry, self._metrics_path)
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
            page, _ = await self._page(entry.admin, _SOURCES_PATH, self._admin_token)
            # Seldom asked: the connection is not worth keeping.
            self.forget(entry.admin)
        return NOT_TOLD if page is None else event_sources(page, entry.events.rank)

    async def _page(self, address: str, path: str, bearer: str | None = None) -> tuple[bytes | None, str]:
        """A page, or why there is none."""
        url = f"http://{address}{path}"
        try:
            status, body = await self._http.get(address, path, bearer)
        except TimeoutError:
            return None, f"{url} not answered within {self._timeout_s:g} s"
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
