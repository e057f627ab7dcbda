"""Observability around the routing core: metrics, traces and error log of each pick."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import msgspec

from common.repeated_log import RepeatedLog
from indexer import DispatchKey
from router.errors import RequestError
from router.observe.metrics import RouterMetrics
from router.observe.tracing import Traces
from router.picking.candidates import StatePods
from router.picking.decision import Decision
from router.picking.route import Router
from router.picking.scheduler import TokenizedRequest
from router.prompts.request import RequestKind, RouteRequest

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)
_STATEFUL = (RequestKind.PASSTHROUGH, RequestKind.RESPONSES)

_QUEUED_MAX, _QUEUED_BYTES_MAX = 2048, 32 << 20
_BODY_BYTES_MAX = 4 << 20  # reading the messages of a larger one would delay picks

Pick: TypeAlias = tuple[TokenizedRequest, Decision]
Ended: TypeAlias = tuple[DispatchKey, int | None, int | None]  # with cached and output tokens, if reported


class PickQueue:
    """Picks and ends that wait to be analysed; thread-safe, and never blocks a pick.

    Args:
        dropped: Called with the reason why a pick is not analysed: the queue is full, or the body too large.
    """

    def __init__(self, dropped: Callable[[str], None]) -> None:
        self._dropped, self._items, self._bytes = dropped, deque[Pick | Ended](), 0
        self._lock = Lock()

    def picked(self, tokenized: TokenizedRequest, decision: Decision) -> None:
        """Add a pick, unless its tokens are unknown or it has several prompts."""
        if decision.degraded is not None or len(tokenized.keys) != 1:
            return
        size = tokenized.request.body_bytes
        with self._lock:
            is_full = len(self._items) >= _QUEUED_MAX or self._bytes + size > _QUEUED_BYTES_MAX
            if not is_full and size <= _BODY_BYTES_MAX:
                self._bytes += size
                self._items.append((tokenized, decision))
                return
        self._dropped("busy" if is_full else "large")

    def ended(self, key: DispatchKey, cached_tokens: int | None, output_tokens: int | None) -> None:
        """Add the end of a request."""
        if len(self._items) < 2 * _QUEUED_MAX:
            self._items.append((key, cached_tokens, output_tokens))

    def take(self) -> Pick | Ended | None:
        """Remove and return the oldest; None if there is none."""
        with self._lock:
            item = self._items.popleft() if self._items else None
            if item is not None and len(item) == 2:
                self._bytes -= item[0].request.body_bytes
            return item


@dataclass(frozen=True, slots=True)
class ObservedRouter:
    """Router whose picks and failures are timed, traced and logged. Thread-safe."""

    router: Router
    metrics: RouterMetrics
    traces: Traces | None = None
    states: StatePods | None = None  # pods of stored responses, conversations and files
    pool: str = ""  # InferencePool of all requests, where the router has several

    def route(
        self, request: RouteRequest, now_s: float, is_active: Callable[[], bool] | None = None
    ) -> Decision:
        """Route the request, see `Router.route`.

        Raises:
            RequestError: The request cannot be routed. Status 500: routing failed; the traceback is logged.
        """
        started_s = time.perf_counter()
        traces, decision = self.traces, None
        # Unix times in nanoseconds: the request's arrival, then the end of each step.
        steps_ns = [time.time_ns()]
        try:
            request = self._bound(request)
            steps = {} if traces is None else {"step_done": lambda: steps_ns.append(time.time_ns())}
            decision = self.router.route(request, now_s, is_active, **steps)
        except Exception as error:
            if traces is not None:
                traces.routed(request, steps_ns, error)
            if isinstance(error, RequestError):
                raise
            text = "pick failed: request_id=%s"
            _repeated.event(
                "pick_failed", "picks", text, request.request_id, level=logging.ERROR, error=error
            )
            raise RequestError(500, "the router failed to route this request") from error
        finally:
            self.metrics.picked(time.perf_counter() - started_s, decision)
        if traces is not None:
            traces.routed(request, steps_ns, decision)
        return decision

    def explain(self, request: RouteRequest, now_s: float) -> Decision:
        """Return the decision that `route` would make now, without any trace of it."""
        return self.router.route(self._bound(msgspec.structs.replace(request, dry=True)), now_s)

    def _bound(self, request: RouteRequest) -> RouteRequest:
        """Return the request with its pool and the pod of its state."""
        if self.pool:
            request = msgspec.structs.replace(request, pool=self.pool)
        if self.states is not None and request.kind in _STATEFUL:
            request = self.states.bound(request)
        return request
