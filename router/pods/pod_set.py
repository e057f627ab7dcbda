"""The pods and what is known of each: declarations and probe results in, immutable snapshots out.

One writer (pod_watch) changes it; readers take `snapshot()` at any time from any thread. What engines tell of
their load goes on to the board. Declared pods come from a source, of which the pods file is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from indexer import ConfigError as IndexerConfigError
from indexer import EngineState
from indexer.pod_entry import METRICS_PATH_LABEL, METRICS_PORT_LABEL, PodEntry, parse_pods, pod_address
from router.errors import ConfigError
from router.pods.engine_load import EngineLoad
from router.pods.load_table import PodBoard

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 1 << 20

DEFAULT_METRICS_PATH = "/metrics"
ROLE_LABEL = "llm-d.ai/role"

# The first that a pod has counts.
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
# trtllm-serve's /metrics is JSON, and whoever reads it takes it away from others.
_ENGINE_PATHS = {"trtllm-serve": "/prometheus/metrics"}


@dataclass(frozen=True, slots=True)
class ServedModels:
    """Models that a pod serves, as its /v1/models says."""

    base: str
    aliases: frozenset[str]  # all names of the base model, `base` included
    adapters: frozenset[str] = frozenset()  # names of the loaded LoRA adapters
    max_model_len: int | None = None  # longest prompt plus answer in tokens; None if not told

    def serves(self, model: str) -> bool:
        return model in self.aliases or model in self.adapters


@dataclass(frozen=True, slots=True)
class EventSources:
    """Address at which an engine says that it publishes its KV events."""

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
    return entry.namespace, entry.name, entry.epoch


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


class PodsSource:
    """Source of declared pods."""

    def changed(self) -> tuple[PodEntry, ...] | None:
        """All declared pods if they are others than the last time; None if not, or not known yet."""
        raise NotImplementedError

    def status(self, now_s: float) -> Any:
        """Return what /debug/discovery shows."""
        raise NotImplementedError

    def start(self, notify: Callable[[], None]) -> None:
        """Begins; `news` is to be called from any thread when there is something new, and never blocks."""

    def close(self) -> None:
        """Ends it; idempotent."""

    def waits_for(self) -> Sequence[str]:
        """Return what is missing before it is known which pods there are."""
        return ()

    def check(self, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float) -> None:
        """Compares what was declared with what was found; called now and then."""


@dataclass(eq=False)
class PodsFile(PodsSource):
    """A pods file in the reference's file-discovery form.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
    """

    path: Path
    watch: bool = True  # whether later changes are taken over

    def __post_init__(self) -> None:
        self._stamp: tuple[int, int, int] | None = None
        self._complaint = ""
        self._first: tuple[PodEntry, ...] | None = self._read()

    def status(self, now_s: float) -> Any:
        del now_s
        return {"source": "file", "path": str(self.path), "watched": self.watch, "problem": self._complaint}

    def changed(self) -> tuple[PodEntry, ...] | None:
        """The pods if the file has changed; None when it has not, or is broken (which is logged)."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if not self.watch:
            return None
        try:
            if self._stamp_now() == self._stamp:
                return None
            entries = self._read()
            self._complaint = ""
            return entries
        except (OSError, ConfigError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("pods file not taken over, the pods known before stay: %s", error)
            return None

    def _read(self) -> tuple[PodEntry, ...]:
        """Reads the file.

        Raises:
            ConfigError: Names file, line and field.
        """
        try:
            self._stamp = self._stamp_now()
            with self.path.open("rb") as file:
                data = file.read(_FILE_BYTES_MAX + 1)
            if len(data) > _FILE_BYTES_MAX:
                raise ConfigError(f"{self.path}: larger than {_FILE_BYTES_MAX} bytes")
            return parse_pods(data.decode("utf-8"), str(self.path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from error
        except IndexerConfigError as error:
            raise ConfigError(str(error)) from error

    def _stamp_now(self) -> tuple[int, int, int]:
        stat = self.path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
