"""Pages for people and Prometheus on the metrics port: a registry and callables by path in, a server out.

Knows nothing of what pages show, nor who may see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from indexer.page_server import Lane, PageServer, Request, Response
from router.tcp_listen import bound_socket

if TYPE_CHECKING:
    from router.kube.metrics_auth import MetricsAuth

_JSON = "application/json"
# Probes bring no token, and are answered while other pages take their time.
_OPEN_TO_ALL = ("/healthz", "/ready")

Query = Mapping[str, str]
Page = Callable[[Query], tuple[int, Any]]


class DebugServer:
    """The metrics port's server.

    Args:
        pages: By path: given the query, a status and a value that is answered as JSON, or as text if it is
            text. They run on threads, several at once.
        tls: Gives the context for a new connection; None: plaintext.
        authorize: None: everybody sees everything. /healthz and /ready are open to all in any case.

    Raises:
        ListenError: The address is in use.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        pages: Mapping[str, Page],
        *,
        tls: Callable[[], SSLContext] | None = None,
        authorize: MetricsAuth | None = None,
    ) -> None:
        self._registry, self._pages, self._authorize = registry, dict(pages), authorize
        self._server = PageServer(bound_socket("--metrics-port", host, port), self._answer, tls)
        self.port = self._server.port
        self._probes, self._others, self._reviews = (
            Lane(f"pages-{name}") for name in ("probes", "others", "reviews")
        )

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.close()
        for lane in (self._probes, self._others, self._reviews):
            lane.close()

    async def _answer(self, request: Request) -> Response:
        if request.path in _OPEN_TO_ALL:
            return await self._probes.run(lambda: self._page(request))
        refusal = await self._refusal(request.path, request.headers.get("authorization"))
        if refusal is not None:
            return _response(refusal, {"error": "not allowed"})
        return await self._others.run(lambda: self._page(request))

    async def _refusal(self, path: str, authorization: str | None) -> int | None:
        authorize = self._authorize
        if authorize is None:
            return None
        known = authorize.known(path, authorization)
        if known is not None:
            return known[0]
        return await self._reviews.run(lambda: authorize.refusal(path, authorization))

    def _page(self, request: Request) -> Response:
        if request.path == "/metrics":
            return Response(200, generate_latest(self._registry), CONTENT_TYPE_LATEST)
        page = self._pages.get(request.path)
        if page is None:
            return _response(404, {"error": f"no such page; there are /metrics, {', '.join(self._pages)}"})
        return _response(*page(request.query))


def _response(status: int, value: Any) -> Response:
    if isinstance(value, str):
        return Response(status, value.encode("utf-8", "replace"))
    return Response(status, msgspec.json.encode(value), _JSON)
