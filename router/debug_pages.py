"""What the debug pages show: the live state in, JSON-ready values out; of HTTP only a status and a query."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from indexer import StreamState
from router.debug_http import Page, Query
from router.explain import Explain
from router.health import Health
from router.ledger import Ledger
from router.pods import Pod, PodSet
from router.pods_source import PodsSource
from router.rates import PrefillRates

if TYPE_CHECKING:
    from indexer import KvIndexer

_DECISIONS_DEFAULT = 20
_SAMPLE_EVERY_S = 0.01
_PROFILE_S, _PROFILE_MAX_S = 30.0, 120.0
_STACK_DEPTH_MAX = 100
_STACKS_MAX = 20_000


@dataclass(frozen=True, slots=True)
class DebugPages:
    """The pages by path."""

    source: PodsSource
    pods: PodSet
    index: KvIndexer
    ledger: Ledger
    rates: PrefillRates
    explain: Explain
    health: Health
    plugins: Callable[[], Mapping[str, Any]]  # returns what configured plugins remember, by name
    routers: Callable[[float], Sequence[Mapping[str, Any]]]  # returns the others of the fleet, by the time

    def pages(self) -> dict[str, Page]:
        return {
            "/healthz": self._alive,
            "/ready": self._is_ready,
            "/debug/decisions": self._decisions,
            "/debug/pods": self._pod_list,
            "/debug/discovery": self._discovery,
            "/debug/plugins/state": self._plugin_states,
        }

    def _alive(self, _query: Query) -> tuple[int, Any]:
        return 200, {"status": "alive"}

    def _is_ready(self, _query: Query) -> tuple[int, Any]:
        index = {
            "views_pending": sorted(self.index.pending()),
            "parity": self.index.parity_details(),
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
            "parity": self.index.parity_details(),
        }

    def _discovery(self, _query: Query) -> tuple[int, Any]:
        return 200, self.source.shown(time.monotonic())

    def _plugin_states(self, _query: Query) -> tuple[int, Any]:
        return 200, {"plugins": self.plugins()}

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
            "in_flight": asdict(self.ledger.work(pod.address)),
            "prefill_tokens_per_s": self.rates.tokens_per_s(pod.address),
        }


class Profiling:
    """What the process does with its time: /debug/pprof/ as text.

    Sampled from outside the threads, so it costs nothing until asked; one profile at a time, bounded in time
    and size. A profile's lines are collapsed stacks ("outer;inner count"), which flame graph tools read.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()

    def pages(self) -> Mapping[str, Page]:
        return {
            "/debug/pprof/": self._index,
            "/debug/pprof/profile": self._profile,
            "/debug/pprof/goroutine": self._threads,
        }

    def _index(self, _query: Query) -> tuple[int, str]:
        return 200, (
            "profile?seconds=N  collapsed stacks of all threads, 100 samples a second (default 30)\n"
            "goroutine          where every thread stands now\n"
        )

    def _profile(self, query: Query) -> tuple[int, str]:
        try:
            seconds = float(query.get("seconds", _PROFILE_S))
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds <= _PROFILE_MAX_S:
            return 400, f"seconds must be a number above 0, at most {_PROFILE_MAX_S:g}\n"
        if not self._running.acquire(blocking=False):
            return 503, "another profile is being taken\n"
        try:
            return 200, _collapsed(_sampled(seconds))
        finally:
            self._running.release()

    def _threads(self, _query: Query) -> tuple[int, str]:
        names = _thread_names()
        stacks = [
            f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, _STACK_DEPTH_MAX))}"
            for number, frame in _frames().items()
        ]
        return 200, "\n".join(stacks)


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
    """Of all threads but this one."""
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


def _collapsed(stacks: Counter[str]) -> str:
    return "".join(f"{stack} {count}\n" for stack, count in stacks.most_common())
