"""Set of pods with their state: declarations and probe results in, immutable snapshots out.

Only PodWatch writes; any thread may read `current`. Reported loads are copied to the load table. Pods
are declared by a PodsSource: a pods file here, or Kubernetes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from indexer import ConfigError as IndexerConfigError
from indexer import EngineFault, EngineState
from indexer.pod_entry import METRICS_PATH_LABEL, METRICS_PORT_LABEL, PodEntry, parse_pods, pod_address
from router.config.fields import read_text
from router.errors import ConfigError
from router.pods.engine_load import EngineLoad
from router.pods.load_table import PodLoadTable

_log = logging.getLogger(__name__)

_REGISTERED_MAX = 1024
# Unloaded adapters that are remembered per pod.
_UNLOADED_MAX, _NAME_CHARS_MAX = 1000, 256

ROLE_LABEL = "llm-d.ai/role"
# InferencePools of a pod, with commas, set by the router where it follows several.
POOL_LABEL = "kvroute.io/pool"

# The first label present applies.
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
# trtllm-serve's /metrics is JSON, and reading it consumes the values.
_ENGINE_PATHS = {"trtllm-serve": "/prometheus/metrics"}


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models that a pod serves, from its /v1/models."""

    base: str
    aliases: frozenset[str]  # all names of the base model, including `base`
    adapters: frozenset[str] = frozenset()  # names of the loaded LoRA adapters
    max_model_len: int | None = None  # limit of prompt plus output in tokens; None if not reported
    adapter_roots: frozenset[tuple[str, str]] = frozenset()  # adapters with the places of their weights

    def serves(self, model: str) -> bool:
        return model in self.aliases or model in self.adapters


@dataclass(frozen=True, slots=True)
class EventSources:
    """Ports at which an engine publishes KV events, from its /kv_event_sources."""

    reported: bool = False  # whether the engine has this page
    off: bool = False  # whether the engine reports that it publishes nothing
    # Labels of a pods file; without a replay port the engine answers no replay requests.
    labels: Mapping[str, str] = field(default_factory=dict)


NOT_REPORTED = EventSources()  # value for an engine without /kv_event_sources, or with an invalid page


@dataclass(frozen=True, slots=True)
class Pod:
    """State of one pod."""

    address: str  # "ip:port"; identifies the pod
    name: str
    entry: PodEntry
    ready: bool = False  # whether it may receive requests
    why: str = "not probed yet"  # why it is not ready; empty if it is
    silent: bool = False  # whether it is not ready only because of a timeout or lost connection
    probed: bool = False  # whether a probe has completed
    failures: int = 0  # consecutive probes that timed out
    models: ServedModels | None = None  # None until reported
    load: EngineLoad | None = None  # last reported load; None if its metrics were never readable
    refused: bool = False  # whether the last connection attempt that did not time out was refused
    unreachable: bool = False  # whether the last connection attempt timed out or had no route
    sources: EventSources | None = None  # reported event ports; None until requested
    probes_without_load: int = 0  # consecutive successful probes without a load
    asleep: bool = False  # whether its engine is in sleep mode: it answers probes, but no requests
    stalled: bool = False  # whether requests wait at its engine and it computes nothing, see `stall_checked`
    progress: tuple[float | None, ...] = ()  # last load figures that change while an engine computes
    moved_s: float = -math.inf  # time of their last change
    stuck_s: float = math.inf  # time since which requests wait without such a change
    failing: str = ""  # why it gets no requests while others serve, see `PodFailures`; empty if it does
    unloaded: frozenset[str] = frozenset()  # adapters that its engine process served before, bounded
    reloaded: frozenset[str] = frozenset()  # adapters that this process loaded again under the same name
    faults: tuple[EngineFault, ...] = ()  # why its cache cannot be used or seen as expected

    @property
    def takes_requests(self) -> bool:
        """Return whether the pod is ready and its engine awake."""
        return self.ready and not self.asleep

    @property
    def hides_load(self) -> bool:
        """Return whether the pod is ready, but its load has been missing for several probes."""
        return self.ready and self.probes_without_load >= PROBES_WITHOUT_LOAD_MAX


PodSnapshot = Mapping[str, Pod]

# Consecutive probes without a load after which a missing load is not treated as temporary.
PROBES_WITHOUT_LOAD_MAX = 3
STALL_S = 30.0  # seconds without any progress after which an engine with queued requests is stalled
# Reason `why` of a pod that answers probes, but is declared as not ready (not Ready in Kubernetes).
NOT_READY_THERE = "declared as not ready"


@dataclass(slots=True)
class PodSet:
    """Current pods by address."""

    load_table: PodLoadTable = field(default_factory=PodLoadTable)  # load table of the pods
    generation: int = 0  # incremented by every change that affects which pods may receive a request
    current: PodSnapshot = field(default_factory=dict)  # pods by address; replaced as a whole, never changed

    def declare(self, entries: Iterable[PodEntry]) -> Collection[str]:
        """Replace the pod set. Removed pods disappear immediately; added pods start as not ready.

        Returns:
            Addresses that now belong to another pod, or to a restarted one.
        """
        pods, anew = {}, []
        for entry in entries:
            known = self.current.get(entry.pod)
            if known is not None and pod_life(known.entry) == pod_life(entry):
                pods[entry.pod] = redeclared(known, entry)
            else:
                pods[entry.pod] = Pod(address=entry.pod, name=entry.name, entry=entry)
                if known is not None:
                    anew.append(entry.pod)
        self.current = pods
        self.load_table.declare(pods, anew)
        self.generation += 1
        return anew

    def of_pool(self, pool: str) -> PodSnapshot:
        """Return the pods of an InferencePool; "" stands for all."""
        pods = self.current
        return (
            pods
            if not pool
            else {
                address: pod
                for address, pod in pods.items()
                if pool in pod.entry.labels.get(POOL_LABEL, "").split(",")
            }
        )

    def put(self, pod: Pod) -> None:
        """Replace the state of one pod, unless the pod has been removed."""
        known = self.current.get(pod.address)
        if known is None:
            return
        self.current = {**self.current, pod.address: pod}
        if pod.load is not None and pod.load is not known.load:
            self.load_table.scraped(pod.address, pod.load)
        if _standing(pod) != _standing(known):
            self.generation += 1

    def suspect(self, address: str, why: str) -> Pod | None:
        """Mark a pod as not ready until a probe succeeds; return its former state if it was ready."""
        pod = self.current.get(address)
        if pod is None or not pod.ready:
            return None
        self.put(replace(pod, ready=False, why=why, silent=True))
        return pod


def with_models(pod: Pod, models: ServedModels) -> Pod:
    """Return a pod with its reported models, among which adapters may be loaded again.

    `created` on the models' page does not show that: vLLM and SGLang write the present time there.
    """
    if pod.models is None or models == pod.models:
        return replace(pod, models=models)
    roots = dict(pod.models.adapter_roots)
    moved = {name for name, root in models.adapter_roots if roots.get(name, root) != root}
    gone = pod.unloaded | (pod.models.adapters - models.adapters)
    unloaded = frozenset(islice((name for name in gone if len(name) <= _NAME_CHARS_MAX), _UNLOADED_MAX))
    reloaded = pod.reloaded | moved | (models.adapters & unloaded)
    return replace(pod, models=models, unloaded=unloaded - models.adapters, reloaded=reloaded)


def stall_checked(pod: Pod, pods: Iterable[Pod]) -> Pod:
    """Return a probed pod with its progress, and not ready while it is stalled.

    A chunk of a long prefill changes the use of the KV cache, but no counter. A stalled pod stays a candidate
    where no pod is ready.

    Args:
        pods: All pods; one of the same model must have made progress lately.
    """
    load = pod.load
    if load is None or load.tokens is None:
        return pod
    now_s, progress = load.scraped_s, (load.tokens, load.kv_usage, load.running)
    if progress != pod.progress:
        moved_s = now_s if pod.progress else pod.moved_s
        pod = replace(pod, progress=progress, moved_s=moved_s, stuck_s=now_s, stalled=False)
    if pod.asleep or not load.waiting:
        pod = replace(pod, stuck_s=now_s, stalled=False)
    if not pod.stalled and now_s - pod.stuck_s >= STALL_S:
        others = (other for other in pods if other.address != pod.address and other.ready)
        goes_on = any(other.moved_s > now_s - STALL_S and _same_model(pod, other) for other in others)
        pod = replace(pod, stalled=goes_on)
    if not (pod.stalled and pod.ready):
        return pod
    return replace(pod, ready=False, silent=True, why=f"stalled: requests wait, no token for {STALL_S:g} s")


def _same_model(pod: Pod, other: Pod) -> bool:
    return pod.models is not None and other.models is not None and pod.models.base == other.models.base


def redeclared(pod: Pod, entry: PodEntry) -> Pod:
    """Return a pod's state after a new declaration, which may change its readiness."""
    if entry == pod.entry:
        return pod
    if not entry.ready:
        why = NOT_READY_THERE if pod.ready else pod.why
        return replace(pod, entry=entry, ready=False, why=why, silent=False)
    if pod.why == NOT_READY_THERE:
        return replace(pod, entry=entry, ready=True, why="")
    return replace(pod, entry=entry)


def _standing(pod: Pod) -> tuple[object, ...]:
    """Return the fields that decide which requests the pod may receive."""
    return pod.ready, pod.why, pod.silent, pod.asleep, pod.failing, pod.models, pod.entry


def pod_life(entry: PodEntry) -> tuple[str, str, str]:
    """Return what distinguishes a pod, and its restarts where they are known, from others at its address."""
    return entry.namespace, entry.name, entry.epoch


class MetricsPage(NamedTuple):
    """Metrics page of the pods whose labels name no other."""

    path: str = "/metrics"
    port: int | None = None  # None: the serving port


DEFAULT_METRICS_PAGE = MetricsPage()


def metrics_page(entry: PodEntry, default: MetricsPage = DEFAULT_METRICS_PAGE) -> tuple[str, str]:
    """Return address and path of the pod's metrics, from its labels, else by its engine type."""
    labels = entry.labels
    engine = next((labels[name] for name in _ENGINE_LABELS if name in labels), "")
    # The labels were validated when the entry was parsed.
    port = int(labels.get(METRICS_PORT_LABEL, default.port or entry.port))
    path = labels.get(METRICS_PATH_LABEL) or _ENGINE_PATHS.get(engine, default.path)
    return pod_address(entry.address, port), path


class PodsSource:
    """Source of declared pods."""

    def changed(self) -> tuple[PodEntry, ...] | None:
        """Return all declared pods if they changed since the last call; None if not, or still unknown."""
        raise NotImplementedError

    def status(self, now_s: float) -> Any:
        """Return the content of /debug/discovery."""
        raise NotImplementedError

    def start(self, notify: Callable[[], None]) -> None:
        """Start; the source calls `notify`, which never blocks, from any thread when pods change."""

    def close(self) -> None:
        """Stop; idempotent."""

    def waits_for(self) -> Sequence[str]:
        """Return what is missing before the pods are known; empty if they are."""
        return ()

    def check(self, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float) -> None:
        """Detect discovery problems from the state of pods and event streams; called periodically."""


@dataclass(eq=False)
class PodsFile(PodsSource):
    """Source of pods that reads a pods file in llm-d's file-discovery format.

    Raises:
        ConfigError: The file cannot be read or is invalid.
    """

    path: Path
    watch: bool = True  # whether later changes are applied

    def __post_init__(self) -> None:
        self._stamp: tuple[int, int, int] | None = None
        self._complaint = ""
        self._in_file = self._read()
        self._registered: dict[str, PodEntry] = {}
        self._is_new = True

    @property
    def registered(self) -> tuple[PodEntry, ...]:
        """Pods that were registered besides the file's, until the router ends."""
        return tuple(self._registered.values())

    def register(self, entry: PodEntry, *, remove: bool = False) -> bool:
        """Add or remove a pod; return False for one too many, or if there is no such pod. Thread-safe."""
        if remove:
            done = self._registered.pop(entry.pod, None) is not None
        elif done := entry.pod in self._registered or len(self._registered) < _REGISTERED_MAX:
            self._registered[entry.pod] = entry
        if done:
            self._is_new = True
        return done

    def status(self, now_s: float) -> Any:
        del now_s
        return {"source": "file", "path": str(self.path), "watched": self.watch, "problem": self._complaint}

    def changed(self) -> tuple[PodEntry, ...] | None:
        """Return the pods if they have changed; an invalid file changes nothing, and is logged."""
        if self.watch:
            self._look()
        if not self._is_new:
            return None
        self._is_new = False
        return tuple(({entry.pod: entry for entry in self._in_file} | self._registered).values())

    def _look(self) -> None:
        try:
            if self._stamp_now() != self._stamp:
                self._in_file, self._is_new = self._read(), True
                self._complaint = ""
        except (OSError, ConfigError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("pods file invalid, keeping the last pods: error=%s", error)

    def _read(self) -> tuple[PodEntry, ...]:
        try:
            self._stamp = self._stamp_now()
            return parse_pods(read_text(self.path), str(self.path))
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error.strerror}") from error
        except IndexerConfigError as error:
            raise ConfigError(str(error)) from error

    def _stamp_now(self) -> tuple[int, int, int]:
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
