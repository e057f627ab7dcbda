"""The edge that keeps the pod set true: the pods file, probes and link news in, changes of PodSet out.

One thread decides, so nothing here needs an order of locks; a small pool of threads waits for HTTP answers.
News from other threads is coalesced per pod, so what waits is never more than there are pods.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Condition, Thread

from indexer import PodStream
from indexer.pods_file import MODEL_LABEL, PodEntry
from router.pods import Pod, PodSet
from router.pods_source import PodsSource
from router.probe import Prober, ProbeResult

_log = logging.getLogger(__name__)

_PROBE_THREADS = 8
_TIMEOUTS_MAX = 3
_MODELS_EVERY_S = 5.0


@dataclass(slots=True)
class _Schedule:
    """When one pod is probed.

    Attributes:
        due_s: Next probe.
        models_due_s: From when on the next probe asks for the models too.
        running: Whether a probe is out.
        void: Whether the probe that is out began before bad news and must not make the pod ready.
    """

    due_s: float
    models_due_s: float
    running: bool = False
    void: bool = False


@dataclass(slots=True)
class _News:
    suspects: dict[str, str] = field(default_factory=dict)
    urgent: set[str] = field(default_factory=set)
    results: list[ProbeResult] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.suspects or self.urgent or self.results)


class PodWatch:
    """Watches the pods until closed.

    Args:
        source: Where the declared pods come from.
        pods: The set to keep; only this object writes to it.
        prober: How a pod is asked.
        follow: Told the full set of event streams whenever it changes, always by the same thread.
        interval_s: Mean time between two probes of a pod.
    """

    def __init__(
        self,
        source: PodsSource,
        pods: PodSet,
        prober: Prober,
        follow: Callable[[Iterable[PodStream]], None],
        *,
        interval_s: float,
    ) -> None:
        self._source = source
        self._pods = pods
        self._prober = prober
        self._follow = follow
        self._interval_s = interval_s
        self._schedules: dict[str, _Schedule] = {}
        self._streams: frozenset[PodStream] = frozenset()
        self._news = _News()
        self._wake = Condition()
        self._closing = False
        self._pool = ThreadPoolExecutor(_PROBE_THREADS, thread_name_prefix="probe")
        self._thread = Thread(target=self._run, name="pod-watch", daemon=True)

    def start(self, entries: Iterable[PodEntry]) -> None:
        """Declares the first pods and begins to probe them."""
        self._declare(entries)
        self._thread.start()

    def close(self) -> None:
        """Ends the threads; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._prober.close()

    @property
    def synced(self) -> bool:
        """Whether every declared pod was probed to an end."""
        return all(pod.probed for pod in self._pods.snapshot().values())

    def link(self, pod: str, up: bool) -> None:
        """The pod's event stream connected or broke; never blocks."""
        if up:
            self._tell(lambda news: news.urgent.add(pod))
        else:
            self.distrust(pod, "its event stream's connection broke")

    def distrust(self, pod: str, why: str) -> None:
        """Takes a pod out until a probe succeeds, and probes it at once; never blocks."""
        self._tell(lambda news: news.suspects.update({pod: why}))

    def _tell(self, change: Callable[[_News], object]) -> None:
        with self._wake:
            if not self._closing:
                change(self._news)
                self._wake.notify()

    def _run(self) -> None:
        reload_s = time.monotonic() + self._interval_s
        while True:
            with self._wake:
                if not self._news and not self._closing:
                    self._wake.wait(max(0.0, self._next_s(reload_s) - time.monotonic()))
                news, self._news = self._news, _News()
                if self._closing:
                    return
            self._apply(news)
            if time.monotonic() >= reload_s:
                reload_s = time.monotonic() + self._interval_s
                if (entries := self._source.changed()) is not None:
                    self._declare(entries)
            self._probe_due(time.monotonic())

    def _next_s(self, reload_s: float) -> float:
        return min([reload_s, *(known.due_s for known in self._schedules.values() if not known.running)])

    def _declare(self, entries: Iterable[PodEntry]) -> None:
        self._pods.declare(entries)
        pods = self._pods.snapshot()
        self._schedules = {
            address: self._schedules.get(address) or _Schedule(due_s=0.0, models_due_s=0.0)
            for address in pods
        }
        _log.info("%d pods declared", len(pods))
        self._follow_streams()

    def _apply(self, news: _News) -> None:
        for address, why in news.suspects.items():
            if self._pods.suspect(address, why):
                _log.warning("pod %s is not ready: %s", address, why)
            if schedule := self._schedules.get(address):
                schedule.due_s, schedule.void = 0.0, schedule.running
        for address in news.urgent:
            if schedule := self._schedules.get(address):
                schedule.due_s = 0.0
        for result in news.results:
            self._take(result)
        if news.results:
            self._follow_streams()

    def _take(self, result: ProbeResult) -> None:
        pod, schedule = self._pods.snapshot().get(result.address), self._schedules.get(result.address)
        if pod is None or schedule is None:
            return
        schedule.running = False
        if schedule.void and result.healthy:
            schedule.void = False
            return
        schedule.void = False
        judged = judge(pod, result)
        self._pods.put(judged)
        if judged.ready and not pod.ready:
            _log.info(
                "pod %s is ready (%s)", pod.address, judged.models.base if judged.models else "no models"
            )
        elif not judged.ready and (pod.ready or not pod.probed):
            _log.warning("pod %s is not ready: %s", pod.address, judged.why)

    def _probe_due(self, now_s: float) -> None:
        for address, schedule in self._schedules.items():
            if schedule.running or schedule.due_s > now_s:
                continue
            pod = self._pods.snapshot()[address]
            with_models = not pod.ready or pod.models is None or now_s >= schedule.models_due_s
            if with_models:
                schedule.models_due_s = now_s + _MODELS_EVERY_S
            schedule.running = True
            # Jitter keeps many routers from asking in step; a pod that starts is waited for more eagerly.
            interval_s = self._interval_s if pod.ready else self._interval_s / 4
            schedule.due_s = now_s + interval_s * random.uniform(0.8, 1.2)
            self._pool.submit(self._probe, address, with_models)

    def _probe(self, address: str, with_models: bool) -> None:
        try:
            result = self._prober.probe(address, with_models=with_models)
        except Exception as error:  # a pod's answer may trip over anything; it must not end its probing
            _log.exception("probe of %s", address)
            result = ProbeResult(address, False, why=f"probe failed: {error!r}")
        self._tell(lambda news: news.results.append(result))

    def _follow_streams(self) -> None:
        streams = frozenset(
            stream for pod in self._pods.snapshot().values() if (stream := pod_stream(pod)) is not None
        )
        if streams != self._streams:
            self._streams = streams
            self._follow(streams)


def judge(pod: Pod, result: ProbeResult) -> Pod:
    """What is known of a pod after a probe: a refusal takes it out at once, slowness only when repeated."""
    if result.healthy:
        return replace(
            pod,
            ready=True,
            why="",
            probed=True,
            failures=0,
            models=result.models or pod.models,
            load=result.load or pod.load,
        )
    failures = pod.failures + 1 if result.timed_out else 0
    if result.timed_out and pod.ready and failures < _TIMEOUTS_MAX:
        return replace(pod, failures=failures)
    return replace(pod, ready=False, why=result.why, probed=True, failures=failures)


def pod_stream(pod: Pod) -> PodStream | None:
    """The pod's event stream, as soon as its base model, which roots all its keys, is told or declared."""
    if pod.models is None:
        return pod.entry.stream()
    return replace(pod.entry, labels={**pod.entry.labels, MODEL_LABEL: pod.models.base}).stream()
