"""Flow control: requests come in on threads of their own and go on, or wait here, or are refused.

A request goes on at once while nobody waits and the pods have room; else its thread sleeps until the queue's
order and the pods let it go, its time is over, its client is gone, or the router ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from threading import Condition, Lock, Thread

from prometheus_client import CollectorRegistry, Gauge, Histogram

from router.config.picker_file import FlowSettings
from router.errors import FlowError
from router.picking.admission import Detector
from router.picking.flow_queue import FlowQueue, Waiting
from router.pods.pod_set import ROLE_LABEL, PodSet
from router.prompts.request import RouteRequest

_LOOK_S = 0.01
_FAIRNESS_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
_SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
_FLOW_CHARS_MAX = 256

# Roles of pods that do only one stage of a request; all others can decode.
_STAGES = {"prefill": "prefill", "encode-prefill": "prefill", "encode": "encode"}

DISPATCHED = "Dispatched"

_METRICS = "llm_d_epp_flow_control_"
_WAIT_SECONDS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Evictions:
    """The requests in flight whose priority is below 0; as many as doors have streams. Thread-safe.

    How a request is ended is its door's.
    """

    def __init__(self) -> None:
        # By number, in the order of their coming: priority, and what ends it.
        self._inside: dict[int, tuple[int, Callable[[], None]]] = {}
        self._numbers = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, priority: int, evict: Callable[[], None]) -> int:
        """Return the number by which the request leaves again; `evict` must not block."""
        number = next(self._numbers)
        with self._lock:
            self._inside[number] = priority, evict
        return number

    def leave(self, number: int) -> None:
        """It is over; idempotent."""
        with self._lock:
            self._inside.pop(number, None)

    def evict(self) -> bool:
        """Takes back the least important, of several the latest, which loses least; False: there is none."""
        with self._lock:
            if not self._inside:
                return False
            victim = min(self._inside, key=lambda number: (self._inside[number][0], -number))
            _, evict = self._inside.pop(victim)
        evict()
        return True


class FlowControl:
    """Lets requests go on, in order; safe to call from any number of threads.

    Args:
        ceiling: Requests wait from this saturation on.
        fairness_of: A flow's id that no header names; "" for none.
    """

    def __init__(
        self,
        settings: FlowSettings,
        ceiling: float,
        detector: Detector,
        pods: PodSet,
        registry: CollectorRegistry,
        *,
        priority_of: Callable[[Mapping[str, str]], int],
        fairness_of: Callable[[Mapping[str, str]], str] = lambda _headers: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._ceiling = ceiling
        self._detector = detector
        self._pods = pods
        self._priority_of = priority_of
        self._fairness_of = fairness_of
        self._clock = clock
        # Registry of requests that their doors can end in flight; None: nobody is taken back.
        self.evictions = Evictions() if settings.evicts else None
        self._queue = FlowQueue(settings)
        self._pending = 0
        self._closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="flow-control", daemon=True)
        self._waits = Histogram(
            _METRICS + "request_queue_duration_seconds",
            "Time in the queue, by how it ended.",
            ("priority", "outcome"),
            buckets=_WAIT_SECONDS,
            registry=registry,
        )
        for name, text, read in (
            ("queue_size", "Requests that wait.", lambda: len(self)),
            ("queue_bytes", "Bytes of their bodies.", lambda: self.size_bytes),
            ("pool_saturation", "How full the pods are; from 1 on requests wait.", self.saturation),
        ):
            Gauge(_METRICS + name, text, registry=registry).set_function(read)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Refuses whoever waits, and whoever still comes; idempotent."""
        with self._changed:
            self._closing = True
            for waiting in list(self._queue):
                self._leave(waiting, "shutting-down")
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
        """How full the pods are, those of the fullest stage where stages are apart; 1 without any."""
        stages: dict[str, list[str]] = {}
        for pod in self._pods.snapshot().values():
            if pod.ready:
                stage = _STAGES.get(pod.entry.labels.get(ROLE_LABEL, ""), "decode")
                stages.setdefault(stage, []).append(pod.address)
        board, now_s = self._pods.board, self._clock()
        known = [board.known(board.rows(addresses)) for addresses in stages.values()]
        return max((self._detector.saturation(one, self._pending, now_s) for one in known), default=1.0)

    def state(self) -> dict[str, float]:
        return {"waiting": len(self), "waiting_bytes": self.size_bytes, "saturation": self.saturation()}

    @contextmanager
    def turn(self, request: RouteRequest, is_active: Callable[[], bool] | None = None) -> Iterator[None]:
        """Waits until the request may go on; inside, it is on its way to the board.

        Args:
            is_active: See `Router.route`; asked often, with all others' requests held up.

        Raises:
            FlowError: It may not.
        """
        waiting = self._waiting(request, is_active)
        with self._changed:
            self._enter(waiting)
        waiting.called.wait()
        waited_s = self._clock() - waiting.arrived_s
        self._waits.labels(str(waiting.priority), waiting.outcome).observe(waited_s)
        if waiting.outcome != DISPATCHED:
            raise FlowError(*REFUSALS[waiting.outcome])
        try:
            yield
        finally:
            with self._changed:
                self._pending -= 1

    def _waiting(self, request: RouteRequest, is_active: Callable[[], bool] | None) -> Waiting:
        now_s, headers = self._clock(), request.headers
        flow = next((headers[name] for name in _FAIRNESS_HEADERS if headers.get(name)), "")
        return Waiting(
            flow=(flow or self._fairness_of(headers))[:_FLOW_CHARS_MAX],
            priority=self._priority_of(headers),
            size_bytes=request.body_bytes,
            arrived_s=now_s,
            deadline_s=now_s + self._settings.ttl_s,
            due_s=now_s + _slo_s(headers),
            is_active=is_active,
        )

    def _enter(self, waiting: Waiting) -> None:
        if self._closing:
            _answer(waiting, "shutting-down")
        elif not self._queue and self.saturation() < self._ceiling:
            self._pending += 1
            _answer(waiting, DISPATCHED)
        elif not self._queue.put(waiting):
            _answer(waiting, "capacity")
        else:
            self._changed.notify_all()

    def _run(self) -> None:
        with self._changed:
            while not self._closing:
                if not self._queue:
                    self._changed.wait()
                    continue
                self._sweep()
                self._dispatch()
                if self.evictions is not None:
                    self._make_room(self.evictions)
                if self._queue:
                    self._changed.wait(_LOOK_S)

    def _sweep(self) -> None:
        """Refuses whose time is over or whose client is gone."""
        now_s, known = self._clock(), self._settings
        empty_ttl_s = known.ttl_s if known.no_endpoint_ttl_s is None else known.no_endpoint_ttl_s
        is_empty = not any(pod.ready for pod in self._pods.snapshot().values())
        for waiting in list(self._queue):
            if waiting.is_active is not None and not waiting.is_active():
                self._leave(waiting, "cancelled")
            elif is_empty and now_s >= min(waiting.deadline_s, waiting.arrived_s + empty_ttl_s):
                self._leave(waiting, "no-endpoints")
            elif now_s >= waiting.deadline_s:
                self._leave(waiting, "ttl")

    def _dispatch(self) -> None:
        while self._queue and self.saturation() < self._ceiling:
            if (waiting := self._queue.take()) is not None:
                self._pending += 1
                _answer(waiting, DISPATCHED)

    def _make_room(self, evictions: Evictions) -> None:
        """Takes back one request for each that waits; once, as its end may be told late."""
        for waiting in self._queue:
            if not evictions:
                return
            if waiting.priority >= 0 and not waiting.has_evicted:
                waiting.has_evicted = evictions.evict()

    def _leave(self, waiting: Waiting, outcome: str) -> None:
        self._queue.remove(waiting)
        _answer(waiting, outcome)


# By outcome: status, reason and message.
REFUSALS = {
    "capacity": (429, "rejected-saturated", "too many requests wait for the model servers"),
    "no-endpoints": (503, "rejected-no-endpoints", "no model server became ready while the request waited"),
    "ttl": (429, "rejected-ttl-expired", "the request waited too long for the model servers"),
    "cancelled": (503, "rejected-context-cancelled", "the client went away while the request waited"),
    "shutting-down": (503, "rejected-shutting-down", "the endpoint picker is shutting down"),
}


def _answer(waiting: Waiting, outcome: str) -> None:
    waiting.outcome = outcome
    waiting.called.set()


def _slo_s(headers: Mapping[str, str]) -> float:
    """Within how many seconds the client wants its first token; inf where it did not say."""
    text = next((headers[name] for name in _SLO_HEADERS if headers.get(name)), "")
    try:
        slo_ms = float(text)
    except ValueError:
        return math.inf
    return slo_ms / 1000 if slo_ms >= 0.0 else math.inf
