"""Who is followed: the engines behind each pod, their streams' states, and one answer for each pod.

A pod is one serving endpoint. Where several data-parallel engines (ranks) stand behind it, each has a stream
and blocks of its own under the name `PodStream.holder`; a request sent to the pod may meet any of them. So a
pod's match is its best rank's, its state the worst of all ranks', and it is linked while any rank is.
An EXACT view that somebody doubts is STALE for as long as the doubt lasts. Thread-safe; knows neither events
nor sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np

from indexer.config import PodStream
from indexer.index.contract import PodMatches, StreamState

# From best to worst.
_ORDER = (StreamState.EXACT, StreamState.STALE, StreamState.RECOVERING)


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of one engine's stream."""

    stream: PodStream
    stream_state: StreamState = StreamState.RECOVERING  # what the stream itself tells, whoever doubts it
    stream_reason: str = "link_down"  # why; empty for EXACT
    settled: bool = False  # whether it was anything but RECOVERING since it is followed
    linked: bool = False
    # By who has it: why a view is in doubt of whose stream nothing lacks.
    doubts: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> StreamState:
        return StreamState.STALE if self._is_doubted else self.stream_state

    @property
    def reason(self) -> str:
        return next(iter(self.doubts.values())) if self._is_doubted else self.stream_reason

    @property
    def _is_doubted(self) -> bool:
        return bool(self.doubts) and self.stream_state is StreamState.EXACT


class Roster:
    """All engines that are followed."""

    def __init__(self) -> None:
        self._lock = Lock()
        # By name in the index; replaced as a whole, never changed. So is all that follows from it.
        self.engines: Mapping[str, EngineState] = {}
        self.states: Mapping[str, StreamState] = {}  # of each pod: its worst engine's
        self._members: Mapping[str, tuple[str, ...]] = {}
        # Members that are not named as their pod.
        self._further: Mapping[str, tuple[str, ...]] = {}

    def opened(self, stream: PodStream) -> None:
        with self._lock:
            self._replace({**self.engines, stream.holder: EngineState(stream)})

    def closed(self, holder: str) -> None:
        with self._lock:
            self._replace({other: engine for other, engine in self.engines.items() if other != holder})

    def pod(self, holder: str) -> str:
        return self.engines[holder].stream.pod

    def told(self, holder: str, state: StreamState, reason: str) -> None:
        with self._lock:
            settled = self.engines[holder].settled or state is not StreamState.RECOVERING
            self._change(holder, stream_state=state, stream_reason=reason, settled=settled)

    def doubt(self, holder: str, source: str, reason: str | None) -> bool:
        """Record why this source doubts an engine's view, None: not any more; tell whether that is news."""
        with self._lock:
            engine = self.engines.get(holder)
            if engine is None or engine.doubts.get(source) == reason:
                return False
            doubts = {other: why for other, why in engine.doubts.items() if other != source}
            self._change(holder, doubts=doubts if reason is None else {**doubts, source: reason})
            return True

    def members(self, pod: str) -> Sequence[str]:
        return self._members.get(pod, ())

    def lacks_nothing(self, pod: str) -> bool:
        engines = self.engines
        states = [engines[each].stream_state for each in self.members(pod) if each in engines]
        return bool(states) and all(state is StreamState.EXACT for state in states)

    def link(self, holder: str, up: bool) -> bool | None:
        """An engine's connection came or went; tells whether its pod is linked now, None if as before."""
        with self._lock:
            pod = self.pod(holder)
            before = self._linked(pod)
            self._change(holder, linked=up)
            after = self._linked(pod)
        return None if before == after else after

    def linked_engines(self) -> int:
        return sum(engine.linked for engine in self.engines.values())

    def unsettled(self) -> frozenset[str]:
        return frozenset(engine.stream.pod for engine in self.engines.values() if not engine.settled)

    def has_one_rank(self, pod: str) -> bool:
        return pod not in self._further

    def holders(self, pods: Collection[str]) -> Collection[str]:
        """The names in the index of these pods' blocks; `pods` itself where no pod has further ranks."""
        further = self._further
        if not further:
            return pods
        return [*pods, *(holder for pod in pods for holder in further.get(pod, ()))]

    def best_ranks(self, table: PodMatches, pods: Collection[str]) -> PodMatches:
        if len(table.rows) == len(pods):
            return table
        rows = [
            max(
                (table.rows[holder] for holder in (pod, *self._further.get(pod, ())) if holder in table.rows),
                key=lambda row: (
                    int(table.cached_blocks[row]),
                    table.tiers.weighted(table.blocks_by_tier[row].tolist()),
                ),
            )
            for pod in pods
        ]
        chosen = np.array(rows, np.intp)
        return PodMatches(
            {pod: row for row, pod in enumerate(pods)},
            table.tiers,
            table.cached_blocks[chosen],
            table.blocks_by_tier[chosen],
            strides=table.strides[chosen] if len(table.strides) else table.strides,
        )

    def _linked(self, pod: str) -> bool:
        return any(self.engines[holder].linked for holder in self.members(pod))

    def _change(self, holder: str, **changes: Any) -> None:
        self._replace({**self.engines, holder: replace(self.engines[holder], **changes)})

    def _replace(self, engines: Mapping[str, EngineState]) -> None:
        """Take other engines, and what follows from all of them; with the lock held."""
        members: dict[str, tuple[str, ...]] = {}
        for holder, engine in engines.items():
            pod = engine.stream.pod
            members[pod] = (*members.get(pod, ()), holder)
        further = {pod: tuple(each for each in found if each != pod) for pod, found in members.items()}
        self.engines, self._members = engines, members
        self._further = {pod: holders for pod, holders in further.items() if holders}
        self.states = {
            pod: max((engines[holder].state for holder in found), key=_ORDER.index)
            for pod, found in members.items()
        }
