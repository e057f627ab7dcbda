"""Flow control: queues requests while the pods are saturated.

A request is dispatched at once if the queue is empty and the pods are not saturated. Otherwise its thread
sleeps until dispatch, the end of the request's time to live, a client disconnect or a shutdown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from itertools import count
from threading import Condition, Lock, Thread

from prometheus_client import CollectorRegistry, Gauge, Histogram

from router.config.picker_file import FlowSettings
from router.errors import RequestError
from router.picking.flow_queue import FlowQueue, QueuedRequest, SaturationDetector
from router.pods.pod_set import ROLE_LABEL, PodSet
from router.prompts.request import RouteRequest

_POLL_INTERVAL_S = 0.01
_FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
_SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_FLOW_CHARS_MAX = 256

# Stage by role, for roles that only execute one stage of a request; all other roles include decoding.
_STAGES = {"prefill": "prefill", "encode-prefill": "prefill", "encode": "encode"}

DISPATCHED = "Dispatched"

_METRICS = "llm_d_epp_flow_control_"
_WAIT_SECONDS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class EvictableRequests:
    """Registry of the requests in flight with negative priority, which may be evicted. Thread-safe.

    Its size is bounded by the number of ext_proc streams, which end an evicted request.
    """

    def __init__(self) -> None:
        # Priority and eviction callback by ticket; tickets ascend with arrival.
        self._requests: dict[int, tuple[int, Callable[[], None]]] = {}
        self._tickets = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, priority: int, evict: Callable[[], None]) -> int:
        """Register a request and return its ticket for `remove`. `evict` must not block."""
        ticket = next(self._tickets)
        with self._lock:
            self._requests[ticket] = priority, evict
        return ticket

    def remove(self, ticket: int) -> None:
        """Remove a request that has ended; idempotent."""
        with self._lock:
            self._requests.pop(ticket, None)

    def evict(self) -> bool:
        """Evict the newest request of the lowest priority; return False if there is none."""
        with self._lock:
            if not self._requests:
                return False
            victim = min(self._requests, key=lambda ticket: (self._requests[ticket][0], -ticket))
            _, evict = self._requests.pop(victim)
        evict()
        return True


@dataclass(eq=False)
class FlowControl:
    """Dispatches requests in queue order while the pods have capacity. Thread-safe."""

    settings: FlowSettings
    ceiling: float  # saturation from which on requests are queued
    detector: SaturationDetector
    pods: PodSet
    registry: InitVar[CollectorRegistry]
    priority_of: Callable[[Mapping[str, str]], int]
    # Returns the fairness id of a request without a fairness header; "" for none.
    fairness_id_of: Callable[[Mapping[str, str]], str] = lambda _headers: ""
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, registry: CollectorRegistry) -> None:
        # Requests in flight that may be evicted; None if eviction is off.
        self.evictable = EvictableRequests() if self.settings.evicts else None
        self._queue = FlowQueue(self.settings)
        self._pending = 0
        self._closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="flow-control", daemon=True)
        self._waits = Histogram(
            _METRICS + "request_queue_duration_seconds",
            "Time that requests spent in the queue, by outcome.",
            ("priority", "outcome"),
            buckets=_WAIT_SECONDS,
            registry=registry,
        )
        for name, text, read in (
            ("queue_size", "Queued requests.", lambda: len(self)),
            ("queue_bytes", "Total body size of queued requests.", lambda: self.size_bytes),
            ("pool_saturation", "Saturation of the pods; requests are queued from 1 on.", self.saturation),
        ):
            Gauge(_METRICS + name, text, registry=registry).set_function(read)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Reject all queued and all further requests; idempotent."""
        with self._changed:
            self._closing = True
            for queued in list(self._queue):
                self._drop(queued, "shutting-down")
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def __len__(self) -> int:
        with self._changed:
            return len(self._queue)

    @property
    def size_bytes(self) -> int:
        with self._changed:
            return self._queue.size_bytes

    def saturation(self) -> float:
        """Return the saturation of the fullest stage (encode, prefill or decode); 1 without ready pods."""
        stages: dict[str, list[str]] = {}
        for pod in self.pods.current.values():
            if pod.ready:
                stage = _STAGES.get(pod.entry.labels.get(ROLE_LABEL, ""), "decode")
                stages.setdefault(stage, []).append(pod.address)
        load_table, now_s = self.pods.load_table, self.clock()
        loads = [load_table.known(load_table.rows(addresses)) for addresses in stages.values()]
        return max((self.detector.saturation(one, self._pending, now_s) for one in loads), default=1.0)

    def state(self) -> dict[str, float]:
        return {"waiting": len(self), "waiting_bytes": self.size_bytes, "saturation": self.saturation()}

    @contextmanager
    def admit(self, request: RouteRequest, is_active: Callable[[], bool] | None = None) -> Iterator[None]:
        """Wait until the request is dispatched; within the context it counts as pending load.

        Args:
            is_active: See `Router.route`. Called often with the queue's lock taken, so it must not block.

        Raises:
            RequestError: 429 or 503: the request was rejected.
        """
        queued = self._queued(request, is_active)
        with self._changed:
            self._dispatch_or_queue(queued)
        queued.finished.wait()
        waited_s = self.clock() - queued.arrived_s
        self._waits.labels(str(queued.priority), queued.outcome).observe(waited_s)
        if queued.outcome != DISPATCHED:
            status, reason, message = REJECTIONS[queued.outcome]
            raise RequestError(status, message, dropped_reason=reason)
        try:
            yield
        finally:
            with self._changed:
                self._pending -= 1

    def _queued(self, request: RouteRequest, is_active: Callable[[], bool] | None) -> QueuedRequest:
        now_s, headers = self.clock(), request.headers
        flow = next((headers[name] for name in _FAIRNESS_HEADERS if headers.get(name)), "")
        return QueuedRequest(
            flow=(flow or self.fairness_id_of(headers))[:_FLOW_CHARS_MAX],
            priority=self.priority_of(headers),
            size_bytes=request.body_bytes,
            arrived_s=now_s,
            deadline_s=now_s + self.settings.ttl_s,
            due_s=now_s + _slo_s(headers),
            is_active=is_active,
        )

    def _dispatch_or_queue(self, queued: QueuedRequest) -> None:
        if self._closing:
            _finish(queued, "shutting-down")
        elif not self._queue and self.saturation() < self.ceiling:
            self._pending += 1
            _finish(queued, DISPATCHED)
        elif not self._queue.put(queued):
            _finish(queued, "capacity")
        else:
            self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                if not self._queue:
                    self._changed.wait()
                    continue
                self._drop_expired()
                self._dispatch_queued()
                if self.evictable is not None:
                    self._evict_for_queued(self.evictable)
                if self._queue:
                    self._changed.wait(_POLL_INTERVAL_S)

    def _drop_expired(self) -> None:
        """Reject queued requests that have expired or whose client has disconnected."""
        now_s, settings = self.clock(), self.settings
        empty_ttl_s = settings.ttl_s if settings.no_endpoint_ttl_s is None else settings.no_endpoint_ttl_s
        is_empty = not any(pod.ready for pod in self.pods.current.values())
        for queued in list(self._queue):
            if queued.is_active is not None and not queued.is_active():
                self._drop(queued, "cancelled")
            elif is_empty and now_s >= min(queued.deadline_s, queued.arrived_s + empty_ttl_s):
                self._drop(queued, "no-endpoints")
            elif now_s >= queued.deadline_s:
                self._drop(queued, "ttl")

    def _dispatch_queued(self) -> None:
        while self._queue and self.saturation() < self.ceiling:
            if (queued := self._queue.take()) is not None:
                self._pending += 1
                _finish(queued, DISPATCHED)

    def _evict_for_queued(self, evictable: EvictableRequests) -> None:
        """Evict one request for each queued one, and only once, as the end may be reported late."""
        for queued in self._queue:
            if not evictable:
                return
            if queued.priority >= 0 and not queued.has_evicted:
                queued.has_evicted = evictable.evict()

    def _drop(self, queued: QueuedRequest, outcome: str) -> None:
        self._queue.remove(queued)
        _finish(queued, outcome)


# HTTP status, dropped reason and message by outcome.
REJECTIONS = {
    "capacity": (429, "rejected-saturated", "the queue for the model servers is full"),
    "no-endpoints": (503, "rejected-no-endpoints", "no model server became ready while the request waited"),
    "ttl": (429, "rejected-ttl-expired", "the request was queued longer than its time to live"),
    "cancelled": (503, "rejected-context-cancelled", "the client disconnected while the request waited"),
    "shutting-down": (503, "rejected-shutting-down", "the endpoint picker is shutting down"),
}


def _finish(queued: QueuedRequest, outcome: str) -> None:
    queued.outcome = outcome
    queued.finished.set()


def _slo_s(headers: Mapping[str, str]) -> float:
    """Return the client's target for the time to first token in seconds; inf without one."""
    text = next((headers[name] for name in _SLO_HEADERS if headers.get(name)), "")
    try:
        slo_ms = float(text)
    except ValueError:
        return math.inf
    return slo_ms / 1000 if slo_ms >= 0.0 else math.inf
