"""The pods and what is known of each: declarations and probe results in, immutable snapshots out.

One writer (pod_watch) changes it; readers take `snapshot()` at any time from any thread. What engines tell of
their load goes on to the board. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from indexer.pod_entry import METRICS_PATH_LABEL, METRICS_PORT_LABEL, PodEntry, pod_address
from router.board import PodBoard
from router.scrape import EngineLoad

DEFAULT_METRICS_PATH = "/metrics"

# The first that a pod has counts.
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
# trtllm-serve's /metrics is JSON, and whoever reads it takes it away from others.
_ENGINE_PATHS = {"trtllm-serve": "/prometheus/metrics"}


@dataclass(frozen=True, slots=True)
class ServedModels:
    """What a pod serves, as its /v1/models says."""

    base: str
    aliases: frozenset[str]  # all names of the base model, `base` included
    adapters: frozenset[str] = frozenset()  # names of the loaded LoRA adapters
    max_model_len: int | None = None  # longest prompt plus answer in tokens; None if not told

    def serves(self, model: str) -> bool:
        return model in self.aliases or model in self.adapters


@dataclass(frozen=True, slots=True)
class EventSources:
    """Where an engine says that it publishes its KV events."""

    told: bool = False  # whether it has such a page
    off: bool = False  # whether it says that it publishes nothing
    # As labels of a pods file say it; without a replay port it answers no replays.
    labels: Mapping[str, str] = field(default_factory=dict)


NOT_TOLD = EventSources()
"""Of an engine without such a page, or with one that cannot be read."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod."""

    address: str  # "ip:port", its identity
    name: str
    entry: PodEntry
    ready: bool = False  # whether it may be given requests
    why: str = "not probed yet"  # why it is not ready, for a person; empty when it is
    silent: bool = False  # whether only silence took it out (late, or cut off); it may answer yet
    probed: bool = False  # whether it was ever probed to an end
    failures: int = 0  # probes in a row that ran out of time
    models: ServedModels | None = None  # None until it has told
    load: EngineLoad | None = None  # what its metrics said last; None if they never could be read
    refused: bool = False  # whether its port refused the last connection that was taken or refused at all
    unreachable: bool = False  # whether the last connection neither came about nor was refused
    sources: EventSources | None = None  # where it says that it publishes its events; None until it was asked
    loadless: int = 0  # probes in a row that it answered without telling its load
    asleep: bool = False  # whether its engine sleeps: it answers probes, but no request

    @property
    def takes_requests(self) -> bool:
        """Whether it may be given requests, others being there."""
        return self.ready and not self.asleep

    @property
    def hides_load(self) -> bool:
        """Whether it answers, but cannot be priced by its engine's load."""
        return self.ready and self.loadless >= LOADLESS_MAX


PodSnapshot = Mapping[str, Pod]

LOADLESS_MAX = 3
"""So many probes without a load in a row are no accident."""

NOT_READY_THERE = "declared as not ready"
"""Why a pod is not ready that answers, but is not Ready in Kubernetes."""


@dataclass(slots=True)
class PodSet:
    """The current pods by address."""

    board: PodBoard = field(default_factory=PodBoard)  # where their loads are kept for pricing
    generation: int = 0  # grows whenever something changed that decides who may take a request
    _pods: dict[str, Pod] = field(default_factory=dict)

    def snapshot(self) -> PodSnapshot:
        """The pods now; never changes afterwards."""
        return self._pods

    def declare(self, entries: Iterable[PodEntry]) -> Collection[str]:
        """Takes the full list: pods not in it are gone at once, new ones begin not ready.

        Returns:
            The pods that were there and begin anew, being another pod or another life of it.
        """
        pods, anew = {}, []
        for entry in entries:
            known = self._pods.get(entry.pod)
            if known is not None and _life(known.entry) == _life(entry):
                pods[entry.pod] = redeclared(known, entry)
            else:
                pods[entry.pod] = Pod(address=entry.pod, name=entry.name, entry=entry)
                if known is not None:
                    anew.append(entry.pod)
        self._pods = pods
        self.board.declare(pods, anew)
        self.generation += 1
        return anew

    def put(self, pod: Pod) -> None:
        """Replaces what is known of one pod, unless it is gone by now."""
        known = self._pods.get(pod.address)
        if known is None:
            return
        self._pods = {**self._pods, pod.address: pod}
        if pod.load is not None and pod.load is not known.load:
            self.board.scraped(pod.address, pod.load)
        if _standing(pod) != _standing(known):
            self.generation += 1

    def suspect(self, address: str, why: str) -> Pod | None:
        """Takes a pod out until a probe succeeds; returns it if that changed anything."""
        pod = self._pods.get(address)
        if pod is None or not pod.ready:
            return None
        self.put(replace(pod, ready=False, why=why, silent=True))
        return pod


def redeclared(pod: Pod, entry: PodEntry) -> Pod:
    """The same pod, declared again: out if its declarer takes it out, in if only that kept it out."""
    if entry == pod.entry:
        return pod
    if not entry.ready:
        why = NOT_READY_THERE if pod.ready else pod.why
        return replace(pod, entry=entry, ready=False, why=why, silent=False)
    if pod.why == NOT_READY_THERE:
        return replace(pod, entry=entry, ready=True, why="")
    return replace(pod, entry=entry)


def _standing(pod: Pod) -> tuple[object, ...]:
    """What decides which requests it may take."""
    return pod.ready, pod.why, pod.silent, pod.asleep, pod.models, pod.entry


def _life(entry: PodEntry) -> tuple[str, str, str]:
    return entry.namespace, entry.name, entry.life


def metrics_page(entry: PodEntry, path: str = DEFAULT_METRICS_PATH) -> tuple[str, str]:
    """Address and path of the pod's metrics: as its labels say, else as its engine has them.

    Args:
        path: Of engines of which nothing else is known.
    """
    labels = entry.labels
    engine = next((labels[name] for name in _ENGINE_LABELS if name in labels), "")
    # The labels were checked by who read them.
    port = int(labels.get(METRICS_PORT_LABEL, entry.port))
    path = labels.get(METRICS_PATH_LABEL) or _ENGINE_PATHS.get(engine, path)
    return pod_address(entry.address, port), path
