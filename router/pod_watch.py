"""The edge that keeps the pod set true: the pods file, probes and link news in, changes of PodSet out.

One thread with an asyncio loop decides and probes, with a task for each pod, so nothing here needs an order
of locks. News from other threads is coalesced per pod, so what waits is never more than there are pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from threading import Lock, Thread

from indexer import PodStream
from indexer.pods_file import MODEL_LABEL, RANKS_LABEL, PodEntry
from router.engine_watch import EngineWatch
from router.pods import Pod, PodSet
from router.pods_source import PodsSource
from router.probe import Prober, ProbeResult

_log = logging.getLogger(__name__)

_PROBES_AT_ONCE = 64
_BEGINNINGS_PER_S = 10
_TIMEOUTS_MAX = 3
_MODELS_EVERY_S = 5.0


@dataclass(slots=True)
class _Watched:
    """One pod's probing.

    Attributes:
        poke: Set when the pod is to be probed at once.
        models_due_s: From when on the next probe asks for the models too.
        running: Whether a probe is out.
        void: Whether the probe that is out began before bad news and must not make the pod ready.
        task: Probes it again and again.
    """

    poke: asyncio.Event = field(default_factory=asyncio.Event)
    models_due_s: float = 0.0
    running: bool = False
    void: bool = False
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _News:
    suspects: dict[str, str] = field(default_factory=dict)
    urgent: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.suspects or self.urgent)


def _ignore(_pods: Collection[str]) -> None:
    """For those who do not care who is declared."""


class PodWatch:
    """Watches the pods until closed.

    Args:
        source: Where the declared pods come from.
        pods: The set to keep; only this object writes to it.
        prober: How a pod is asked.
        follow: Told the full set of event streams whenever it changes, always by the same thread.
        engines: Holds what pods tell against the views of their caches; None: nobody does.
        declared: Told the addresses of all pods whenever the pods were declared.
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
        engines: EngineWatch | None = None,
        declared: Callable[[Collection[str]], None] = _ignore,
    ) -> None:
        self._source = source
        self._pods = pods
        self._prober = prober
        self._follow = follow
        self._engines = engines
        self._declared = declared
        self._interval_s = interval_s
        self._watched: dict[str, _Watched] = {}
        self._streams: frozenset[PodStream] = frozenset()
        self._news = _News()
        self._lock = Lock()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._probes = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._thread = Thread(target=self._run, name="pod-watch", daemon=True)

    def start(self, entries: Iterable[PodEntry]) -> None:
        """Declares the first pods and begins to probe them."""
        self._pods.declare(entries)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; idempotent."""
        with self._lock:
            self._closing = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._changed.set)
        if self._thread.is_alive():
            self._thread.join()
        self._loop.close()

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
        with self._lock:
            if self._closing:
                return
            if not self._news:
                self._loop.call_soon_threadsafe(self._changed.set)
            change(self._news)

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._watch_declared()
        reload_s = self._loop.time() + self._interval_s
        try:
            while not self._closing:
                wake = self._loop.call_at(reload_s, self._changed.set)
                await self._changed.wait()
                wake.cancel()
                self._changed.clear()
                with self._lock:
                    news, self._news = self._news, _News()
                self._apply(news)
                if self._loop.time() >= reload_s:
                    reload_s = self._loop.time() + self._interval_s
                    if (entries := self._source.changed()) is not None:
                        self._pods.declare(entries)
                        self._watch_declared()
        finally:
            tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._prober.close()

    def _watch_declared(self) -> None:
        pods = self._pods.snapshot()
        for address in self._watched.keys() - pods.keys():
            if (task := self._watched.pop(address).task) is not None:
                task.cancel()
            self._prober.forget(address)
        for address in pods.keys() - self._watched.keys():
            watched = self._watched[address] = _Watched()
            watched.task = self._loop.create_task(self._watch(address, watched))
        _log.info("%d pods declared", len(pods))
        self._declared(pods.keys())
        self._follow_streams()

    def _apply(self, news: _News) -> None:
        for address, why in news.suspects.items():
            if self._pods.suspect(address, why):
                _log.warning("pod %s is not ready: %s", address, why)
            if watched := self._watched.get(address):
                watched.void = watched.running
                watched.poke.set()
        for address in news.urgent:
            if watched := self._watched.get(address):
                watched.poke.set()

    async def _watch(self, address: str, watched: _Watched) -> None:
        """Probes one pod until cancelled."""
        while True:
            pod = self._pods.snapshot()[address]
            now_s = self._loop.time()
            with_models = not pod.ready or pod.models is None or now_s >= watched.models_due_s
            if with_models:
                watched.models_due_s = now_s + _MODELS_EVERY_S
            watched.poke.clear()
            async with self._probes:
                watched.running = True
                answered_tokens = 0 if self._engines is None else self._engines.asked(address)
                result = await self._probe(address, with_models)
                watched.running = False
            self._hold_against(pod, result, answered_tokens)
            self._take(result, watched)
            # Jitter keeps many routers from asking in step; a pod that starts is waited for more eagerly.
            interval_s = self._interval_s if self._pods.snapshot()[address].ready else self._interval_s / 4
            wake = self._loop.call_at(_grid(now_s + interval_s * random.uniform(0.8, 1.2)), watched.poke.set)
            await watched.poke.wait()
            wake.cancel()

    def _hold_against(self, pod: Pod, result: ProbeResult, answered_tokens: int) -> None:
        # The page of a pod with several engines may be of any of them.
        one_engine = pod.entry.labels.get(RANKS_LABEL, "1") == "1"
        if self._engines is not None and result.reading is not None and one_engine:
            self._engines.told(pod.address, result.reading, answered_tokens)

    async def _probe(self, address: str, with_models: bool) -> ProbeResult:
        try:
            return await self._prober.probe(address, with_models=with_models)
        except Exception as error:  # a pod's answer may trip over anything; it must not end its probing
            _log.exception("probe of %s", address)
            return ProbeResult(address, False, why=f"probe failed: {error!r}")

    def _take(self, result: ProbeResult, watched: _Watched) -> None:
        pod = self._pods.snapshot()[result.address]
        if watched.void and result.healthy:
            watched.void = False
            return
        watched.void = False
        judged = judge(pod, result)
        self._pods.put(judged)
        if judged.ready and not pod.ready:
            _log.info(
                "pod %s is ready (%s)", pod.address, judged.models.base if judged.models else "no models"
            )
        elif not judged.ready and (pod.ready or not pod.probed):
            _log.warning("pod %s is not ready: %s", pod.address, judged.why)
        if judged.models != pod.models:
            self._follow_streams()

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


def _grid(due_s: float) -> float:
    """The next of the moments at which probes begin: a few together cost less than each on its own."""
    return math.ceil(due_s * _BEGINNINGS_PER_S) / _BEGINNINGS_PER_S
