"""Metrics port: /metrics, health and debug pages from the live state, and their authorization."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

import msgspec
from cachetools import TLRUCache, TTLCache, cached
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.page_server import BoundedExecutor, PageServer, Request, Response
from common.repeated_log import RepeatedLog
from indexer import StreamState
from router.app.admin import RESET, WORKERS, Admin
from router.app.dashboard import DASHBOARD, STREAM_S_MAX, TICK_S, Watch, dashboard_page
from router.doors.health import Health
from router.errors import ClusterError
from router.h2.server import bound_socket
from router.observe.decision_log import DecisionLog
from router.pods.pod_set import Pod, PodSet, PodsSource
from router.pods.watch import pod_stream

if TYPE_CHECKING:
    from indexer import KvIndexer
    from router.pods.kube.client import KubeClient

_log = logging.getLogger(__name__)

_JSON = "application/json"
# Pages without authorization, since probes send no token; served on a thread of their own. The dashboard's
# page is public, too: a browser sends no token with an address. What it shows comes from the other pages.
_PUBLIC_PATHS = ("/healthz", "/ready")
_UNAUTHORIZED, _FORBIDDEN, _UNAVAILABLE = 401, 403, 503
_TOKEN_CHARS_MAX = 16_384
_CACHE_SIZE = 1024
_NOT_CACHED = 0
# Cache times of the reference picker's library.
_ALLOWED_TTL_S, _DENIED_TTL_S = 60.0, 10.0
_DECISIONS_DEFAULT = 20
_STREAM = "/debug/stream"
_COUNT_EVERY_S = 5.0

Query = Mapping[str, str]
Page = Callable[[Query], tuple[int, Any]]
PostPage = Callable[[bytes], tuple[int, Any]]


class _Status(msgspec.Struct):
    authenticated: bool = False
    allowed: bool = False
    user: dict[str, Any] = {}  # with the fields of a SubjectAccessReview, except for the name


class _Review(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


_REVIEW = msgspec.json.Decoder(_Review)


@dataclass(eq=False)
class MetricsAuth:
    """Authorizer of page requests by bearer token, through the cluster's API server.

    Sends a TokenReview and a SubjectAccessReview for each new token and path, and caches the results. While
    the API server is unavailable, uncached requests are rejected. Use it from one event loop only.
    """

    reviewer: KubeClient
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # Status by digest of path and token; None: allowed.
        self._cache: TLRUCache[bytes, int | None] = TLRUCache(_CACHE_SIZE, _expires_s, self.clock)
        self._reviews = BoundedExecutor("metrics-reviews")
        self._repeated = RepeatedLog(_log)

    def close(self) -> None:
        self._reviews.close()

    async def denial(self, path: str, authorization: str | None) -> int | None:
        """Return the HTTP status that rejects the request; None: it is allowed."""
        token = _token(authorization)
        if token is None:
            return _UNAUTHORIZED
        key = hashlib.sha256(f"{path}\n{token}".encode("utf-8", "replace")).digest()
        known = self._cache.get(key, _NOT_CACHED)
        if known != _NOT_CACHED:
            return known
        try:
            answer = self._cache[key] = await self._reviews.run(lambda: self._ask(path, token))
        except (ClusterError, msgspec.MsgspecError) as error:
            text = "metrics authorization failed: path=%s error=%s"
            self._repeated.event("review_failed", "reviews", text, path[:100], error)
            return _UNAVAILABLE
        return answer

    def _ask(self, path: str, token: str) -> int | None:
        known = self._status("TokenReview", {"token": token})
        if not known.authenticated:
            return _UNAUTHORIZED
        spec = {**known.user, "nonResourceAttributes": {"path": path, "verb": "get"}}
        spec["user"] = spec.pop("username", "")
        return None if self._status("SubjectAccessReview", spec).allowed else _FORBIDDEN

    def _status(self, kind: str, spec: Mapping[str, Any]) -> _Status:
        return _REVIEW.decode(self.reviewer.review(kind, spec)).status


def _expires_s(_key: bytes, answer: int | None, now_s: float) -> float:
    return now_s + (_ALLOWED_TTL_S if answer is None else _DENIED_TTL_S)


def _token(authorization: str | None) -> str | None:
    """Return the bearer token of the header; None if it is missing or too long."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= _TOKEN_CHARS_MAX else None


@dataclass(eq=False)
class DebugServer:
    """HTTP server of the metrics port.

    Raises:
        ListenError: The address is in use.
    """

    host: str
    port: int
    registry: CollectorRegistry
    # Pages by path. A page receives the query and returns a status and a value, which is sent as text if it
    # is a str, else as JSON. Pages run concurrently on threads.
    pages: Mapping[str, Page]
    tls: Callable[[], SSLContext] | None = None  # factory of SSL contexts for new connections
    authorize: MetricsAuth | None = None  # of requests other than /healthz and /ready; None: all are allowed
    admin: Admin | None = None  # handler of administration, which has a token of its own
    # Pages that read a posted body and change nothing, by path; authorized like the others, as a "get".
    posts: Mapping[str, PostPage] = field(default_factory=dict)
    watch: Callable[[], Watch] | None = None  # source of a viewer's /debug/stream; None: no dashboard

    def __post_init__(self) -> None:
        listener = bound_socket("--metrics-port", self.host, self.port)
        methods = ("POST", "DELETE") if self.admin else ("POST",) if self.posts else ()
        self._server = PageServer(listener, self._answer, self.tls, methods)
        self.port = self._server.port
        self._probes, self._others = BoundedExecutor("pages-probes"), BoundedExecutor("pages-others")
        self._dashboard = dashboard_page() if self.watch is not None else None

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.close()
        for part in (self._probes, self._others, self.authorize):
            if part is not None:
                part.close()

    async def _answer(self, request: Request) -> Response:
        if request.path in _PUBLIC_PATHS:
            return await self._probes.run(lambda: self._page(request))
        if (admin := self.admin) is not None and request.path in (RESET, WORKERS):
            return await self._others.run(lambda: _response(*admin.answer(request)))
        post = self.posts.get(request.path)
        if request.method not in (("GET", "HEAD") if post is None else ("POST",)):
            return _response(405, {"error": "only GET and HEAD" if post is None else "only POST"})
        if self._dashboard is not None and request.path == DASHBOARD:
            return self._dashboard
        if self.authorize is not None:
            status = await self.authorize.denial(request.path, request.headers.get("authorization"))
            if status is not None:
                return _response(status, {"error": "not allowed"})
        if post is not None:
            return await self._others.run(lambda: _response(*post(request.body)))
        if self.watch is not None and request.path == _STREAM:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return Response(200, self._stream(self.watch()), "text/event-stream", headers)
        return await self._others.run(lambda: self._page(request))

    async def _stream(self, watch: Watch) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; ends in time for the viewer's token to be checked again."""
        ends_s = time.monotonic() + STREAM_S_MAX
        while time.monotonic() < ends_s:
            yield await self._others.run(watch.next_part)
            await asyncio.sleep(TICK_S)

    def _page(self, request: Request) -> Response:
        if request.path == "/metrics":
            return Response(200, generate_latest(self.registry), CONTENT_TYPE_LATEST)
        page = self.pages.get(request.path)
        if page is None:
            pages = ", ".join(("/metrics", *self.pages))
            return _response(404, {"error": f"page not found; pages: {pages}"})
        return _response(*page(request.query))


def _response(status: int, value: Any) -> Response:
    if isinstance(value, str):
        return Response(status, value.encode("utf-8", "replace"))
    return Response(status, msgspec.json.encode(value), _JSON)


@dataclass(eq=False)
class DebugPages:
    """Health and debug pages, from the live state of the router."""

    source: PodsSource
    pods: PodSet
    index: KvIndexer
    decision_log: DecisionLog
    health: Health
    plugins: Callable[[], Mapping[str, Any]]  # returns the state of configured plugins by name
    routers: Callable[[float], Sequence[Mapping[str, Any]]]  # returns the peer routers' state at a time
    picks_ignored: Callable[[], str | None]  # returns the finding that the gateway ignores picks
    renderings: Callable[[], Mapping[str, Any]]  # returns the models whose pods render without being told to
    more: Mapping[str, Page]  # further pages
    queued_s: Callable[[Sequence[str], float], Sequence[float]]  # returns the queues of pods at a time

    def __post_init__(self) -> None:
        # Both read all blocks or decisions, which is too much for every viewer and second.
        recent: TTLCache[Any, Any] = TTLCache(1, _COUNT_EVERY_S)
        self._counts = cached(recent, condition=threading.Condition())(
            lambda: (self.index.tokens_by_tier(), self.decision_log.cached_shares())
        )

    def watch(self) -> Watch:
        """Return the source of one viewer's stream."""
        return Watch(self.decision_log, lambda: msgspec.json.encode(self._pod_list({})[1]))

    def pages(self) -> dict[str, Page]:
        return {
            "/healthz": lambda _query: (200, {"status": "alive"}),
            "/ready": self._is_ready,
            "/debug/decisions": self._decisions,
            "/debug/pods": self._pod_list,
            "/debug/discovery": lambda _query: (200, self.source.status(time.monotonic())),
            "/debug/plugins/state": lambda _query: (200, {"plugins": self.plugins()}),
            **self.more,
        }

    def _is_ready(self, _query: Query) -> tuple[int, Any]:
        index = {
            "views_pending": sorted(self.index.pending()),
            "parity": self.index.mismatch_details(),
            "drafters": self.index.drafter_details(),
            "routers": list(self.routers(time.monotonic())),
            "engines": [
                f"{pod.name} ({pod.address}): {fault.text}"
                for pod in self.pods.current.values()
                for fault in pod.faults
            ],
            "rendered_by_pods": self.renderings(),
            "pods_asleep": [pod.address for pod in self.pods.current.values() if pod.asleep],
            "pods_failing": {pod.address: pod.failing for pod in self.pods.current.values() if pod.failing},
            "picks_ignored": self.picks_ignored(),
            "prefixes_of_old_weights_may_hit": {
                pod.address: sorted(pod.reloaded) for pod in self.pods.current.values() if pod.reloaded
            },
        }
        if self.health.ready:
            return 200, {"status": "ready", **index}
        waiting = [pod.address for pod in self.pods.current.values() if not pod.probed]
        missing = {"waits_for": list(self.source.waits_for()), "pods_not_probed_yet": waiting}
        return 503, {"status": "not ready", **missing, **index}

    def _decisions(self, query: Query) -> tuple[int, Any]:
        if "request_id" in query:
            record = self.decision_log.find(query["request_id"])
            return 200, {"decisions": [record] if record is not None else []}
        count = query.get("n", str(_DECISIONS_DEFAULT))
        if not count.isdecimal() or len(count) > 9:
            return 400, {"error": f"n: expected a whole number, got {count!r}"}
        return 200, {"decisions": self.decision_log.latest(int(count))}

    def _pod_list(self, _query: Query) -> tuple[int, Any]:
        views, pods = self.index.states(), self.pods.current
        taking = [address for address, pod in pods.items() if pod.takes_requests]
        queued_s = dict(zip(taking, self.queued_s(taking, time.monotonic()), strict=True))
        tokens, shares = self._counts()
        shown = [
            {
                **self._pod(pod, views),
                "queued_s": queued_s.get(address),
                "tokens_by_tier": tokens.get(address, {}),
                "cached_share": shares.get(address),
            }
            for address, pod in pods.items()
        ]
        parity, block_tokens = self.index.mismatch_details(), self.index.block_tokens
        return 200, {"pods": shown, "parity": parity, "block_tokens": block_tokens}

    def _pod(self, pod: Pod, views: Mapping[str, StreamState]) -> dict[str, Any]:
        models, stream = pod.models, pod_stream(pod)
        return {
            "address": pod.address,
            "name": pod.name,
            "ready": pod.ready,
            "why_not": pod.why,
            "asleep": pod.asleep,
            "failing": pod.failing,
            "faults": [fault.kind for fault in pod.faults],
            "declared_ready": pod.entry.ready,
            "labels": dict(pod.entry.labels),
            "view": views[pod.address].value if pod.address in views else None,
            "stream": asdict(stream) if stream else None,
            "base_model": models.base if models else None,
            "aliases": sorted(models.aliases) if models else [],
            "adapters": sorted(models.adapters) if models else [],
            "max_model_len": models.max_model_len if models else None,
            "scraped": asdict(pod.load) if pod.load else None,
            "in_flight": asdict(self.pods.load_table.work(pod.address)),
            "prefill_tokens_per_s": self.pods.load_table.prefill_tokens_per_s(pod.address),
        }
