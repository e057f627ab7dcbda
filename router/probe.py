"""One pod asked over HTTP how it is: an address in, health, served models and load out.

Every exchange has the deadline, from connecting to the last byte. Decides nothing.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

import msgspec

from indexer.reconcile import EngineReading
from router.engine_page import engine_reading, is_asleep
from router.event_sources import NOT_TOLD, EventSources, event_sources
from router.http_get import ConnectTimeoutError, HttpGetError, HttpGetter
from router.metrics_page import MetricsPage
from router.pods import ServedModels
from router.scrape import EngineLoad, engine_load

_PAGE_BYTES_MAX = 4 << 20
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a pod answered.

    Attributes:
        healthy: Whether GET /health was answered with 200.
        timed_out: Whether it was not answered in time, which a busy pod may do now and then.
        refused: Whether the connection was refused.
        unreachable: Whether no connection came about in time, or there is no route.
        why: What is wrong, for a person; empty when healthy.
        models: None when not asked for, or not told.
        load: None when not told.
        why_no_load: Why it was not told, for a person; empty where it was, and for a pod that is not healthy.
        asleep: Whether its engines sleep; None when its metrics could not be read.
        reading: What the page tells of the engine's life; None when not told.
        sources: Where it says that it publishes its events; None when not asked for.
    """

    address: str
    healthy: bool
    timed_out: bool = False
    why: str = ""
    models: ServedModels | None = None
    load: EngineLoad | None = None
    reading: EngineReading | None = None
    refused: bool = False
    unreachable: bool = False
    sources: EventSources | None = None
    why_no_load: str = ""
    asleep: bool | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a pod is asked besides its health and load.

    Attributes:
        models: Whether for its models.
        sources: Whether for where it publishes its events.
        rank: Which engine stands behind the port; None: all that the pod has.
        metrics: Where its metrics are; None: at its own address.
        admin: "ip:port" of its administration, which alone is sent the token; None: its own address.
    """

    models: bool = False
    sources: bool = False
    rank: int | None = None
    metrics: MetricsPage | None = None
    admin: str | None = None


class Prober:
    """Keeps connections to pods alive between probes; to be used by one asyncio loop.

    Args:
        timeout_s: Deadline of one HTTP exchange.
        admin_token: Bearer secret for pods' administration ports; None: they ask for none.
    """

    def __init__(self, *, timeout_s: float, admin_token: str | None = None) -> None:
        self._timeout_s = timeout_s
        self._admin_token = admin_token
        # By pod, where they are not at its own address: whose connection ends with the pod.
        self._metrics_addresses: dict[str, str] = {}
        self._http = HttpGetter(body_bytes_max=_PAGE_BYTES_MAX)

    async def probe(self, address: str, asked: Asked) -> ProbeResult:
        """Asks one pod."""
        try:
            status, _ = await self._get(address, "/health")
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
        models = await self._page(address, "/v1/models") if asked.models else None
        sources = await self._admin_page(address, asked, "/kv_event_sources") if asked.sources else None
        asked_s = time.monotonic()
        metrics, problem = await self._metrics(address, asked.metrics or MetricsPage(address))
        load = engine_load(metrics, time.monotonic(), asked_s) if metrics is not None else None
        return ProbeResult(
            address,
            True,
            models=served_models(models) if models is not None else None,
            load=load,
            reading=engine_reading(metrics, asked_s) if metrics is not None else None,
            sources=_sources(sources, asked),
            why_no_load=problem if load is None else "",
            asleep=is_asleep(metrics) if metrics is not None else None,
        )

    def forget(self, address: str) -> None:
        """The pod is gone: drops its connections."""
        self._http.forget(address)
        if (metrics_address := self._metrics_addresses.pop(address, None)) is not None:
            self._http.forget(metrics_address)

    def close(self) -> None:
        """Drops all connections."""
        self._http.close()

    async def _metrics(self, pod: str, page: MetricsPage) -> tuple[bytes | None, str]:
        """The page, and what is wrong with it if it tells no load."""
        if (former := self._metrics_addresses.get(pod, pod)) != page.address:
            if former != pod:
                self._http.forget(former)
            self._metrics_addresses[pod] = page.address
        url = f"http://{page.address}{page.path}"
        try:
            status, body = await self._get(page.address, page.path)
        except TimeoutError:
            return None, f"{url} not answered within {self._timeout_s:g} s"
        except (OSError, HttpGetError) as error:
            return None, f"{url}: {error}"
        if status != 200:
            return None, f"{url} answered {status}"
        return body, f"{url} has no metrics of an engine that is known, or senseless ones"

    async def _admin_page(self, address: str, asked: Asked, path: str) -> bytes | None:
        if asked.admin is None:
            return await self._page(address, path)
        try:
            return await self._page(asked.admin, path, self._admin_token)
        finally:
            # Seldom asked: the connection is not worth keeping.
            self._http.forget(asked.admin)

    async def _page(self, address: str, path: str, bearer: str | None = None) -> bytes | None:
        try:
            status, body = await self._get(address, path, bearer)
        except (OSError, HttpGetError):
            return None
        return body if status == 200 else None

    async def _get(self, address: str, path: str, bearer: str | None = None) -> tuple[int, bytes]:
        return await self._http.get(address, path, bearer, timeout_s=self._timeout_s)


def _sources(page: bytes | None, asked: Asked) -> EventSources | None:
    if not asked.sources:
        return None
    return NOT_TOLD if page is None else event_sources(page, asked.rank)


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
