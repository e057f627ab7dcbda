"""The metrics port: Prometheus' page and pages for people, from the live state, and who may read them."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from ssl import SSLContext
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
from cachetools import TLRUCache
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from common.page_server import Lane, PageServer, Request, Response
from common.repeated_log import RepeatedLog
from indexer import StreamState
from router.doors.health import Health
from router.errors import ClusterError
from router.h2.server import bound_socket
from router.observe.decision_log import Explain
from router.pods.pod_set import Pod, PodSet, PodsSource

if TYPE_CHECKING:
    from indexer import KvIndexer
    from router.pods.kube.client import KubeClient

_log = logging.getLogger(__name__)

_JSON = "application/json"
# Probes bring no token, and are answered while other pages take their time.
_OPEN_TO_ALL = ("/healthz", "/ready")
_UNKNOWN, _FORBIDDEN, _AWAY = 401, 403, 503
_TOKEN_CHARS_MAX = 16_384
_KEPT = 1024
_NOT_KEPT = 0
# As long as the reference's library keeps them.
_KEPT_IF_ALLOWED_S, _KEPT_IF_NOT_S = 60.0, 10.0
_DECISIONS_DEFAULT = 20
_SAMPLE_EVERY_S = 0.01
_PROFILE_S, _PROFILE_MAX_S = 30.0, 120.0
_STACK_DEPTH_MAX = 100
_STACKS_MAX = 20_000

Query = Mapping[str, str]
Page = Callable[[Query], tuple[int, Any]]


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _Status(msgspec.Struct):
    authenticated: bool = False
    allowed: bool = False
    user: _User = msgspec.field(default_factory=_User)


class _Review(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


@dataclass(eq=False)
class MetricsAuth:
    """Decides who may read a page: the cluster is asked, by the reader's bearer token.

    Two questions for each new token: whose is it (TokenReview), and may they get this path
    (SubjectAccessReview). Answers are kept for a while; while the API server is away nobody new is let in. To
    be used by one event loop.
    """

    reviewer: KubeClient
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        # By path and digest of the token.
        self._kept: TLRUCache[bytes, int | None] = TLRUCache(_KEPT, _kept_until_s, self.clock)
        self._reviews = Lane("metrics-reviews")
        self._repeated = RepeatedLog(_log)

    def close(self) -> None:
        self._reviews.close()

    async def refusal(self, path: str, authorization: str | None) -> int | None:
        """Return the status to refuse with; None: the page may be shown."""
        token = _token(authorization)
        if token is None:
            return _UNKNOWN
        key = hashlib.sha256(f"{path}\n{token}".encode("utf-8", "replace")).digest()
        known = self._kept.get(key, _NOT_KEPT)
        if known != _NOT_KEPT:
            return known
        try:
            answer = self._kept[key] = await self._reviews.run(lambda: self._ask(path, token))
        except (ClusterError, msgspec.MsgspecError) as error:
            self._repeated.event(
                "review_failed", "reviews", "the cluster cannot be asked who reads %s: %s", path[:100], error
            )
            return _AWAY
        return answer

    def _ask(self, path: str, token: str) -> int | None:
        known = self._status("TokenReview", {"token": token})
        if not known.authenticated:
            return _UNKNOWN
        user = known.user
        spec = {
            "user": user.username,
            "uid": user.uid,
            "groups": user.groups,
            "extra": user.extra,
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        return None if self._status("SubjectAccessReview", spec).allowed else _FORBIDDEN

    def _status(self, kind: str, spec: Mapping[str, Any]) -> _Status:
        return msgspec.json.decode(self.reviewer.review(kind, spec), type=_Review).status


def _kept_until_s(_key: bytes, answer: int | None, now_s: float) -> float:
    return now_s + (_KEPT_IF_ALLOWED_S if answer is None else _KEPT_IF_NOT_S)


def _token(authorization: str | None) -> str | None:
    """Return the bearer token; None if there is none, or it is too long."""
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= _TOKEN_CHARS_MAX else None


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
        self._probes, self._others = Lane("pages-probes"), Lane("pages-others")

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        self._server.close()
        for part in (self._probes, self._others, self._authorize):
            if part is not None:
                part.close()

    async def _answer(self, request: Request) -> Response:
        if request.path in _OPEN_TO_ALL:
            return await self._probes.run(lambda: self._page(request))
        if self._authorize is not None:
            refusal = await self._authorize.refusal(request.path, request.headers.get("authorization"))
            if refusal is not None:
                return _response(refusal, {"error": "not allowed"})
        return await self._others.run(lambda: self._page(request))

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


@dataclass(frozen=True, slots=True)
class DebugPages:
    """The pages by path."""

    source: PodsSource
    pods: PodSet
    index: KvIndexer
    explain: Explain
    health: Health
    plugins: Callable[[], Mapping[str, Any]]  # returns what configured plugins remember, by name
    routers: Callable[[float], Sequence[Mapping[str, Any]]]  # returns the others of the fleet, by the time

    def pages(self) -> dict[str, Page]:
        return {
            "/healthz": lambda _query: (200, {"status": "alive"}),
            "/ready": self._is_ready,
            "/debug/decisions": self._decisions,
            "/debug/pods": self._pod_list,
            "/debug/discovery": lambda _query: (200, self.source.shown(time.monotonic())),
            "/debug/plugins/state": lambda _query: (200, {"plugins": self.plugins()}),
        }

    def _is_ready(self, _query: Query) -> tuple[int, Any]:
        index = {
            "views_pending": sorted(self.index.pending()),
            "parity": self.index.mismatch_details(),
            "routers": list(self.routers(time.monotonic())),
            "pods_asleep": [pod.address for pod in self.pods.snapshot().values() if pod.asleep],
        }
        if self.health.ready:
            return 200, {"status": "ready", **index}
        waiting = [pod.address for pod in self.pods.snapshot().values() if not pod.probed]
        missing = {"waits_for": list(self.source.waits_for()), "pods_not_probed_yet": waiting}
        return 503, {"status": "not ready", **missing, **index}

    def _decisions(self, query: Query) -> tuple[int, Any]:
        if "request_id" in query:
            record = self.explain.one(query["request_id"])
            return 200, {"decisions": [record] if record is not None else []}
        count = query.get("n", str(_DECISIONS_DEFAULT))
        if not count.isdecimal() or len(count) > 9:
            return 400, {"error": f"n must be a whole number, not {count!r}"}
        return 200, {"decisions": self.explain.latest(int(count))}

    def _pod_list(self, _query: Query) -> tuple[int, Any]:
        views = self.index.states()
        return 200, {
            "pods": [self._pod(pod, views) for pod in self.pods.snapshot().values()],
            "parity": self.index.mismatch_details(),
        }

    def _pod(self, pod: Pod, views: Mapping[str, StreamState]) -> dict[str, Any]:
        models = pod.models
        return {
            "address": pod.address,
            "name": pod.name,
            "ready": pod.ready,
            "why_not": pod.why,
            "asleep": pod.asleep,
            "declared_ready": pod.entry.ready,
            "labels": dict(pod.entry.labels),
            "view": views[pod.address].value if pod.address in views else None,
            "base_model": models.base if models else None,
            "aliases": sorted(models.aliases) if models else [],
            "adapters": sorted(models.adapters) if models else [],
            "max_model_len": models.max_model_len if models else None,
            "scraped": asdict(pod.load) if pod.load else None,
            "in_flight": asdict(self.pods.board.work(pod.address)),
            "prefill_tokens_per_s": self.pods.board.prefill_tokens_per_s(pod.address),
        }


_profiling = threading.Lock()


def profile_pages() -> dict[str, Page]:
    """What the process does with its time: /debug/pprof/ as text.

    Sampled from outside the threads, so it costs nothing until asked; one profile at a time, bounded in time
    and size. A profile's lines are collapsed stacks ("outer;inner count"), which flame graph tools read.
    """
    index = (
        "profile?seconds=N  collapsed stacks of all threads, 100 samples a second (default 30)\n"
        "goroutine          where every thread stands now\n"
    )
    return {
        "/debug/pprof/": lambda _query: (200, index),
        "/debug/pprof/profile": _profile,
        "/debug/pprof/goroutine": lambda _query: (200, _threads()),
    }


def _profile(query: Query) -> tuple[int, str]:
    try:
        seconds = float(query.get("seconds", _PROFILE_S))
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= _PROFILE_MAX_S:
        return 400, f"seconds must be a number above 0, at most {_PROFILE_MAX_S:g}\n"
    if not _profiling.acquire(blocking=False):
        return 503, "another profile is being taken\n"
    try:
        stacks = _sampled(seconds)
    finally:
        _profiling.release()
    return 200, "".join(f"{stack} {count}\n" for stack, count in stacks.most_common())


def _threads() -> str:
    names = _thread_names()
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, _STACK_DEPTH_MAX))}"
        for number, frame in _frames().items()
    )


def _sampled(seconds: float) -> Counter[str]:
    stacks: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        names = _thread_names()
        for number, frame in _frames().items():
            stack = f"{names.get(number, number)};{_stack(frame)}"
            if stack in stacks or len(stacks) < _STACKS_MAX:
                stacks[stack] += 1
        time.sleep(_SAMPLE_EVERY_S)
    return stacks


def _frames() -> dict[int, FrameType]:
    """Return the stacks of all threads but this one."""
    own = threading.get_ident()
    # The only way to see other threads' stacks; documented for exactly this, whatever its underscore says.
    return {number: frame for number, frame in sys._current_frames().items() if number != own}


def _thread_names() -> dict[int | None, str]:
    return {thread.ident: thread.name for thread in threading.enumerate()}


def _stack(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < _STACK_DEPTH_MAX:
        code = frame.f_code
        places.append(f"{frame.f_globals.get('__name__', '?')}.{code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return ";".join(reversed(places))
