"""Who is followed: the engines behind each pod, their streams' states, and one answer for each pod.

A pod is one serving endpoint. Where several data-parallel engines (ranks) stand behind it, each has a stream
and blocks of its own under the name `PodStream.holder`; a request sent to the pod may meet any of them. So a
pod's match is its best rank's, its state the worst of all ranks', and it is linked while any rank is.
An EXACT view that somebody doubts is STALE for as long as the doubt lasts. Thread-safe; knows neither events
nor sockets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from threading import RLock

import numpy as np

from indexer.config import PodStream
from indexer.index import PodMatches
from indexer.stream import StreamState

# From best to worst.
_ORDER = (StreamState.EXACT, StreamState.STALE, StreamState.RECOVERING)
_LACKS_NOTHING = (StreamState.EXACT, "")


@dataclass(frozen=True, slots=True)
class EngineState:
    """What is known of one engine's stream.

    Attributes:
        stream: The stream.
        state: How far its view can be trusted.
        reason: Why; empty for EXACT.
        settled: Whether it was anything but RECOVERING since it is followed.
        linked: Whether its publisher is connected.
        doubts: By who has it: why a view is in doubt of whose stream nothing lacks.
    """

    stream: PodStream
    state: StreamState = StreamState.RECOVERING
    reason: str = "link_down"
    settled: bool = False
    linked: bool = False
    doubts: Mapping[str, str] = field(default_factory=dict)

    def with_state(self, state: StreamState, reason: str) -> EngineState:
        """Return this engine with another state of its stream, as the doubts leave it."""
        settled = self.settled or state is not StreamState.RECOVERING
        if state is StreamState.EXACT and self.doubts:
            state, reason = StreamState.STALE, next(iter(self.doubts.values()))
        return replace(self, state=state, reason=reason, settled=settled)


class Roster:
    """All engines that are followed."""

    def __init__(self) -> None:
        self._lock = RLock()
        # State of each stream and its reason, whoever doubts the view.
        self._streams: dict[str, tuple[StreamState, str]] = {}
        # Replaced as a whole, never changed.
        self._engines: Mapping[str, EngineState] = {}
        self._states: Mapping[str, StreamState] = {}
        self._further: Mapping[str, tuple[str, ...]] = {}

    @property
    def engines(self) -> Mapping[str, EngineState]:
        """Every engine, by holder."""
        return self._engines

    @property
    def states(self) -> Mapping[str, StreamState]:
        """Every pod's state."""
        return self._states

    def opened(self, stream: PodStream) -> None:
        """An engine is followed from now on."""
        with self._lock:
            self._put(stream.holder, EngineState(stream))

    def closed(self, holder: str) -> None:
        """An engine is not followed any more."""
        with self._lock:
            self._streams.pop(holder, None)
            self._put(holder, None)

    def pod(self, holder: str) -> str:
        """The pod that an engine stands behind."""
        return self._engines[holder].stream.pod

    def told(self, holder: str, state: StreamState, reason: str) -> None:
        """The state of an engine's stream changed."""
        with self._lock:
            self._streams[holder] = state, reason
            self._put(holder, self._engines[holder].with_state(state, reason))

    def doubt(self, holder: str, source: str, reason: str | None) -> bool:
        """Record that this source doubts an engine's view, or with None that it does not any more.

        Returns:
            Whether the engine is followed and that is news.
        """
        with self._lock:
            engine = self._engines.get(holder)
            if engine is None or engine.doubts.get(source) == reason:
                return False
            doubts = {other: why for other, why in engine.doubts.items() if other != source}
            if reason is not None:
                doubts[source] = reason
            told = self._streams.get(holder, (engine.state, engine.reason))
            self._put(holder, replace(engine, doubts=doubts).with_state(*told))
            return True

    def members(self, pod: str) -> list[str]:
        """The engines behind a pod."""
        return [holder for holder in (pod, *self._further.get(pod, ())) if holder in self._engines]

    def lacks_nothing(self, pod: str) -> bool:
        """Whether no engine's stream behind a pod lacks anything, in doubt or not."""
        members = self.members(pod)
        return bool(members) and all(self._streams.get(each) == _LACKS_NOTHING for each in members)

    def link(self, holder: str, up: bool) -> bool | None:
        """An engine's connection was made or lost.

        Returns:
            Whether its pod is linked now, if that changed; else None.
        """
        with self._lock:
            engine = self._engines[holder]
            before = self._linked(engine.stream.pod)
            self._put(holder, replace(engine, linked=up))
            after = self._linked(engine.stream.pod)
        return None if before == after else after

    def linked_engines(self) -> int:
        """How many engines' publishers are connected."""
        return sum(engine.linked for engine in self._engines.values())

    def unsettled(self) -> frozenset[str]:
        """Pods of which an engine's view was never built."""
        return frozenset(engine.stream.pod for engine in tuple(self._engines.values()) if not engine.settled)

    def has_one_rank(self, pod: str) -> bool:
        """Whether no more than one engine stands behind a pod."""
        return pod not in self._further

    def holders(self, pods: Collection[str]) -> Collection[str]:
        """The names in the index of these pods' blocks; `pods` itself where no pod has further ranks."""
        further = self._further
        if not further:
            return pods
        return [*pods, *(holder for pod in pods for holder in further.get(pod, ()))]

    def best_ranks(self, table: PodMatches, pods: Collection[str]) -> PodMatches:
        """Makes one row for each of `pods` from a match of all their `holders`."""
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
        return any(self._engines[holder].linked for holder in self.members(pod))

    def _put(self, holder: str, engine: EngineState | None) -> None:
        """Sets or drops one engine, and what follows from it for its pod; with the lock held."""
        pod = (engine or self._engines[holder]).stream.pod
        engines = dict(self._engines)
        if engine is None:
            del engines[holder]
        else:
            engines[holder] = engine
        self._engines = engines
        if holder != pod:
            ranks = [*(other for other in self._further.get(pod, ()) if other != holder)]
            if engine is not None:
                ranks.append(holder)
            others = {other: names for other, names in self._further.items() if other != pod}
            self._further = {**others, pod: tuple(ranks)} if ranks else others
        states = dict(self._states)
        members = self.members(pod)
        if members:
            states[pod] = max((engines[member].state for member in members), key=_ORDER.index)
        else:
            del states[pod]
        self._states = states
