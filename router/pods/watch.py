"""Thread that keeps the pod set up to date, from declared pods, probes and event-stream connections.

An asyncio loop on one thread runs a task per pod, so no locks are needed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from threading import Thread

from indexer import EVENTS_OFF, EngineFault, EngineReading, PodStream
from indexer import ConfigError as IndexerConfigError
from indexer.pod_entry import EVENTS_PORT_LABEL, MODEL_LABEL
from router.pods.pod_set import (
    NOT_READY_THERE,
    PROBES_WITHOUT_LOAD_MAX,
    Pod,
    PodSet,
    PodsSource,
    stall_checked,
    with_models,
)
from router.pods.probe import Prober, ProbeResult

_log = logging.getLogger(__name__)

_PROBES_AT_ONCE = 64
_BEGINNINGS_PER_S = 10
_TIMEOUTS_MAX = 3
_MODELS_EVERY_S = 5.0
_WAKE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Adds the predicted cache hits of a pod to the counters that its engine reports; for one thread."""

    answered_hit_tokens: Callable[[str], int]  # predicted hit tokens of a pod's answered requests
    predicted_hit_tokens: Callable[[str], int]  # those of its answered requests and of those in flight
    observe: Callable[[str, EngineReading], object]  # receives the completed reading, `KvIndexer.observe`
    faults: Callable[[str], Sequence[EngineFault]]  # `KvIndexer.faults`

    def after_scrape(self, pod: str, reading: EngineReading, answered_hit_tokens: int) -> None:
        """Complete the reading with the predictions before and after the scrape, and pass it on."""
        predicted = self.predicted_hit_tokens(pod)
        self.observe(
            pod, replace(reading, predicted_tokens=answered_hit_tokens, predicted_sent_tokens=predicted)
        )


@dataclass(slots=True)
class _Watched:
    """Probing state of one pod."""

    poke: asyncio.Event = field(default_factory=asyncio.Event)  # set to probe the pod at once
    models_due_s: float = 0.0  # time from which the next probe requests the models too
    running: bool = False  # whether a probe is in progress
    # Whether the probe in progress started before a failure and must not make the pod ready.
    void: bool = False
    task: asyncio.Task[None] | None = None  # task that probes the pod periodically
    wakes: bool = False  # whether to wake the pod before its next probe
    woken_s: float = -math.inf  # when that was last decided


@dataclass(eq=False)
class PodWatch:
    """Probes all declared pods periodically until closed."""

    source: PodsSource
    pods: PodSet  # written by this object only
    prober: Prober
    # Called with the full set of event streams whenever it changes, always on the same thread.
    follow: Callable[[Iterable[PodStream]], None]
    interval_s: float  # mean time between two probes of a pod
    engines: EngineCheck
    # Called with the addresses of all pods, and of replaced or restarted ones, after every declaration.
    declared: Callable[[Collection[str], Collection[str]], None] = lambda _pods, _anew: None
    listed: bool = False  # whether the source has declared its pods

    def __post_init__(self) -> None:
        self._random = Random()
        self._watched: dict[str, _Watched] = {}
        self._streams: frozenset[PodStream] = frozenset()
        self._known_streams: dict[str, tuple[Pod, PodStream | None]] = {}
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._probes = asyncio.Semaphore(_PROBES_AT_ONCE)
        self._thread = Thread(target=self._run, name="pod-watch", daemon=True)

    def start(self) -> None:
        """Declare the pods that are already known and start probing."""
        self._declare()
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self.look()
        if self._thread.is_alive():
            self._thread.join()
        self._loop.close()

    @property
    def synced(self) -> bool:
        """Return whether the pods are known and each has completed a probe."""
        return self.listed and all(pod.probed for pod in self.pods.current.values())

    def link(self, pod: str, up: bool) -> None:
        """Handle that a pod's event stream connected or disconnected; never blocks."""
        self.mark_not_ready(pod, "" if up else "its event stream's connection broke")

    def look(self) -> None:
        """Read the source again; never blocks."""
        self._soon(self._changed.set)

    def mark_not_ready(self, pod: str, why: str) -> None:
        """Probe a pod at once; with a reason `why`, mark it as not ready until then. Never blocks."""
        self._soon(self._apply, pod, why)

    def mark_failing(self, pod: str, why: str) -> None:
        """Give a pod no requests while others serve, or end that with an empty reason; never blocks."""
        self._soon(self._apply_failing, pod, why)

    def wake(self, pods: Iterable[Pod]) -> None:
        """Wake one of these sleeping pods, unless one of them is being woken; never blocks."""
        self._soon(self._apply_wake, *(pod.address for pod in pods))

    def _soon(self, work: Callable[..., object], *values: str) -> None:
        # A closed loop raises RuntimeError.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(work, *values)

    def _run(self) -> None:
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._watch_declared(())
        try:
            while not self._closing:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self.interval_s)
                self._changed.clear()
                if (anew := self._declare()) is not None:
                    self._watch_declared(anew)
        finally:
            tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.prober.close()

    def _declare(self) -> Collection[str] | None:
        """Apply the source's pods; return replaced or restarted ones, or None if nothing changed."""
        if (entries := self.source.changed()) is None:
            return None
        self.listed = True
        return self.pods.declare(entries)

    def _watch_declared(self, anew: Collection[str]) -> None:
        pods = self.pods.current
        gone, new = self._watched.keys() - pods.keys(), pods.keys() - self._watched.keys()
        if gone or new or not self._watched:
            _log.info("%d pods declared", len(pods))
        for address in anew:
            # A probe in progress was sent to the former pod.
            watched = self._watched[address]
            watched.void = watched.running
            watched.models_due_s = 0.0
            watched.poke.set()
            self.prober.forget(address)
        for address in gone:
            if (task := self._watched.pop(address).task) is not None:
                task.cancel()
            self.prober.forget(address)
        for address in new:
            watched = self._watched[address] = _Watched()
            watched.task = self._loop.create_task(self._watch(address, watched))
        self.declared(pods.keys(), anew)
        self._follow_streams()

    def _apply(self, address: str, why: str) -> None:
        if why and self.pods.suspect(address, why):
            _log.warning("pod not ready: pod=%s reason=%s", address, why)
        if watched := self._watched.get(address):
            if why:
                watched.void = watched.running
            watched.poke.set()

    def _apply_failing(self, address: str, why: str) -> None:
        if (pod := self.pods.current.get(address)) is not None and pod.failing != why:
            self.pods.put(replace(pod, failing=why))
            if why:
                _log.warning("pod failing, routing to others: pod=%s reason=%s", address, why)
            else:
                _log.info("pod no longer excluded as failing: pod=%s", address)

    def _apply_wake(self, *addresses: str) -> None:
        sleeping = [watched for each in addresses if (watched := self._watched.get(each)) is not None]
        # One at a time, since sleeping pods may share a device; another one if the last did not wake.
        sleeping.sort(key=lambda watched: watched.woken_s)
        if sleeping and sleeping[-1].woken_s <= self._loop.time() - _WAKE_EVERY_S:
            sleeping[0].woken_s, sleeping[0].wakes = self._loop.time(), True
            sleeping[0].poke.set()

    async def _wake(self, pod: Pod) -> None:
        _log.info("waking pod, all candidates of a request sleep: pod=%s", pod.address)
        if error := await self.prober.wake(pod.entry):
            _log.warning(
                "pod not woken: pod=%s error=%s; vLLM needs --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1",
                *(pod.address, error),
            )

    async def _watch(self, address: str, watched: _Watched) -> None:
        """Probe one pod periodically until cancelled."""
        while True:
            pod = self.pods.current[address]
            now_s = self._loop.time()
            asks_models = not pod.ready or pod.models is None or now_s >= watched.models_due_s
            if asks_models:
                watched.models_due_s = now_s + _MODELS_EVERY_S
            watched.poke.clear()
            if watched.wakes:
                watched.wakes = False
                await self._wake(pod)
            async with self._probes:
                watched.running = True
                answered = self.engines.answered_hit_tokens(address)
                result = await self._probe(pod, asks_models)
                watched.running = False
            # With several engines behind the pod, the page may come from any of them.
            stream = pod_stream(pod)
            one_engine = stream is None or stream.ranks == 1
            reading = result.reading
            if reading is not None and not one_engine:
                caching = replace(reading.caching, prompts=math.nan)
                reading = EngineReading(caching=caching, has_drafter=reading.has_drafter)
            if reading is not None:
                self.engines.after_scrape(pod.address, reading, answered)
            self._take(result, watched, self.engines.faults(address))
            # Probe a starting pod more often.
            interval_s = self.interval_s if self.pods.current[address].ready else self.interval_s / 4
            wake = self._loop.call_at(next_probe_s(now_s, interval_s, self._random), watched.poke.set)
            await watched.poke.wait()
            wake.cancel()

    async def _probe(self, pod: Pod, asks_models: bool) -> ProbeResult:
        asks_sources = pod.entry.events.asks_engine and pod.sources is None
        try:
            return await self.prober.probe(pod.entry, models=asks_models, sources=asks_sources)
        except Exception as error:  # an unexpected error must not end the pod's probing
            _log.exception("probe failed: pod=%s", pod.address)
            return ProbeResult(pod.address, False, why=f"probe failed: {error!r}")

    def _take(self, result: ProbeResult, watched: _Watched, faults: Sequence[EngineFault]) -> None:
        pod = self.pods.current[result.address]
        if watched.void and result.healthy:
            watched.void = False
            return
        watched.void = False
        judged = stall_checked(judge(pod, result), self.pods.current.values())
        off = judged.sources is not None and judged.sources.off
        judged = replace(judged, faults=(*faults, EVENTS_OFF) if off else tuple(faults))
        self.pods.put(judged)
        for fault in judged.faults:
            if fault.kind not in {known.kind for known in pod.faults}:
                _log.warning("engine fault: pod=%s fault=%s detail=%s", pod.address, fault.kind, fault.text)
        if pod.faults and not judged.faults:
            _log.info("engine faults ended: pod=%s", pod.address)
        if judged.ready and not pod.ready:
            _log.info("pod ready: pod=%s model=%s", pod.address, judged.models and judged.models.base)
        elif not judged.ready and (pod.ready or not pod.probed):
            _log.warning("pod not ready: pod=%s reason=%s", pod.address, judged.why)
        if judged.asleep and not pod.asleep:
            _log.warning("pod asleep, routing to awake pods first: pod=%s", pod.address)
        elif pod.asleep and not judged.asleep:
            _log.info("pod awake: pod=%s", pod.address)
        if result.why_no_load and judged.probes_without_load == PROBES_WITHOUT_LOAD_MAX:
            _log.warning(
                "pod load unknown, routing without it: pod=%s error=%s; set metrics-port and metrics-path by "
                "label or annotation",
                pod.address,
                result.why_no_load,
            )
        if again := judged.reloaded - pod.reloaded:
            _log.warning(
                "adapter loaded again under its old name, prefixes of the old weights may hit: pod=%s "
                "adapters=%s; reset the engine's prefix cache, or use a new name for new weights",
                *(pod.address, ", ".join(sorted(again))),
            )
        before, after = (one.load.missing_figures if one.load is not None else () for one in (pod, judged))
        if missing := ", ".join(figure for figure in after if figure not in before):
            _log.warning("pod metrics incomplete, using defaults: pod=%s missing=%s", pod.address, missing)
        if (judged.models, judged.sources) != (pod.models, pod.sources):
            self._follow_streams()

    def _known_stream(self, pod: Pod) -> tuple[Pod, PodStream | None]:
        """Return the pod and its event stream, cached while the pod's relevant fields are unchanged."""
        known = self._known_streams.get(pod.address)
        if known is not None and _same_stream(known[0], pod):
            return known
        stream = pod_stream(pod)
        try:
            if stream is not None:
                stream.by_rank()
        except IndexerConfigError as error:
            # Invalid ports reported by one engine must not affect other pods.
            _log.warning("event stream invalid, not followed: pod=%s error=%s", pod.address, error)
            stream = None
        return pod, stream

    def _follow_streams(self) -> None:
        pods = self.pods.current.values()
        self._known_streams = {pod.address: self._known_stream(pod) for pod in pods}
        streams = frozenset(stream for _, stream in self._known_streams.values() if stream is not None)
        if streams != self._streams:
            self._streams = streams
            try:
                self.follow(streams)
            except IndexerConfigError as error:
                _log.error("event streams invalid, keeping the last ones: error=%s", error)


def judge(pod: Pod, result: ProbeResult) -> Pod:
    """Return a pod's state after a probe: an error makes it not ready at once, timeouts only if repeated."""
    if result.healthy:
        return replace(
            pod if result.models is None else with_models(pod, result.models),
            ready=pod.entry.ready,
            why="" if pod.entry.ready else NOT_READY_THERE,
            silent=False,
            probed=True,
            failures=0,
            refused=False,
            unreachable=False,
            load=result.load or pod.load,
            probes_without_load=pod.probes_without_load + 1 if result.why_no_load else 0,
            sources=result.sources or pod.sources,
            asleep=pod.asleep if result.asleep is None else result.asleep,
        )
    failures = pod.failures + 1 if result.timed_out else 0
    if result.timed_out and pod.ready and failures < _TIMEOUTS_MAX:
        return replace(pod, failures=failures)
    if result.refused and pod.models is not None:
        # The process ended; the next one loads its adapters for the first time.
        models = replace(pod.models, adapters=frozenset(), adapter_roots=frozenset())
        pod = replace(pod, models=models, unloaded=frozenset(), reloaded=frozenset())
    return replace(
        pod,
        ready=False,
        why=result.why,
        silent=result.timed_out and (pod.ready or pod.silent),
        probed=True,
        failures=failures,
        # The kernel rate-limits refusals of a NetworkPolicy, so a timeout does not end a refused state.
        refused=result.refused or (pod.refused and result.unreachable),
        unreachable=result.unreachable,
    )


def next_probe_s(now_s: float, interval_s: float, random: Random) -> float:
    """Return when to probe a pod next: after `interval_s` with a jitter of 20 %, rounded up to 0.1 s.

    The jitter spreads the probes of many routers; rounding batches the probes of one router.
    """
    due_s = now_s + interval_s * random.uniform(0.8, 1.2)
    return math.ceil(due_s * _BEGINNINGS_PER_S) / _BEGINNINGS_PER_S


def pod_stream(pod: Pod) -> PodStream | None:
    """Return the pod's event stream, or None until its base model is known, which is an input of all keys.

    Declared ports override those reported by the engine, and both override the defaults.
    """
    entry, reported = pod.entry, pod.sources
    labels, events = dict(entry.labels), entry.events
    if reported is not None and reported.off and EVENTS_PORT_LABEL not in labels:
        return None
    if reported is not None and reported.reported:
        labels, events = {**reported.labels, **labels}, replace(events, replay_port=None)
    if pod.models is not None:
        labels[MODEL_LABEL] = pod.models.base
    return replace(entry, labels=labels, events=events).stream()


def _same_stream(one: Pod, other: Pod) -> bool:
    return one.entry is other.entry and one.models is other.models and one.sources is other.sources
