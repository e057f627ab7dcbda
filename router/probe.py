"""One pod asked over HTTP how it is: an address in, health, served models and load out.

Every exchange has the deadline; called from pod_watch's small pool of threads. Decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError, TimeoutError

from router.pods import ServedModels
from router.scrape import EngineLoad, engine_load

_PAGE_BYTES_MAX = 4 << 20
_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a pod answered.

    Attributes:
        healthy: Whether GET /health was answered with 200.
        timed_out: Whether it was not answered in time, which a busy pod may do now and then.
        why: What is wrong, for a person; empty when healthy.
        models: None when not asked for, or not told.
        load: None when not told.
    """

    address: str
    healthy: bool
    timed_out: bool = False
    why: str = ""
    models: ServedModels | None = None
    load: EngineLoad | None = None


class Prober:
    """Keeps connections to pods alive between probes; safe to share between threads.

    Args:
        timeout_s: Deadline of one HTTP exchange.
        pods_max: Pods whose connections are kept.
    """

    def __init__(self, *, timeout_s: float, pods_max: int) -> None:
        self._timeout_s = timeout_s
        self._http = urllib3.PoolManager(num_pools=pods_max, maxsize=1, retries=False, timeout=timeout_s)

    def probe(self, address: str, *, with_models: bool) -> ProbeResult:
        """Asks one pod."""
        try:
            status, _ = self._get(address, "/health")
        except NewConnectionError as error:  # which urllib3 takes for a kind of timeout
            return ProbeResult(address, False, False, f"/health: {error}")
        except TimeoutError:
            return ProbeResult(address, False, True, f"/health not answered within {self._timeout_s:g} s")
        except HTTPError as error:
            return ProbeResult(address, False, False, f"/health: {error}")
        if status != 200:
            return ProbeResult(address, False, False, f"/health answered {status}")
        models = self._page(address, "/v1/models") if with_models else None
        metrics = self._page(address, "/metrics")
        return ProbeResult(
            address,
            True,
            models=served_models(models) if models is not None else None,
            load=engine_load(metrics, time.monotonic()) if metrics is not None else None,
        )

    def close(self) -> None:
        """Drops all connections."""
        self._http.clear()

    def _page(self, address: str, path: str) -> bytes | None:
        try:
            status, body = self._get(address, path)
        except HTTPError:
            return None
        return body if status == 200 else None

    def _get(self, address: str, path: str) -> tuple[int, bytes]:
        try:
            return self._exchange(address, path)
        except ProtocolError:
            # A kept connection that the pod has closed meanwhile says nothing about the pod.
            return self._exchange(address, path)

    def _exchange(self, address: str, path: str) -> tuple[int, bytes]:
        deadline_s = time.monotonic() + self._timeout_s
        response = self._http.request("GET", f"http://{address}{path}", preload_content=False, redirect=False)
        try:
            body = b""
            for chunk in response.stream(_CHUNK_BYTES):
                body += chunk
                if len(body) > _PAGE_BYTES_MAX:
                    raise HTTPError(f"more than {_PAGE_BYTES_MAX} bytes")
                if time.monotonic() > deadline_s:
                    raise TimeoutError("body too slow")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return response.status, body


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
