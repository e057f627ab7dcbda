"""Registry of the followed engines: their pods, stream states and links, combined per pod.

A pod is one serving endpoint. Each data-parallel engine (rank) behind a pod has a stream and blocks of its
own under the name `PodStream.holder`. The match of a pod is that of the rank to which the request is sent, or
the mean of its ranks if the pod chooses it. Its state is the worst state of its ranks, and it is linked while
any rank is.
An EXACT view is STALE while any source has declared it invalid. Thread-safe; independent of events and
sockets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import numpy as np

from indexer.audit.late_view import LATE_REASONS
from indexer.config import PodStream
from indexer.index.contract import PodMatches, StreamState

# From best to worst.
_ORDER = (StreamState.EXACT, StreamState.STALE, StreamState.RECOVERING)


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of one engine's stream and view."""

    stream: PodStream
    stream_state: StreamState = StreamState.RECOVERING  # of the stream alone, without `invalid_reasons`
    stream_reason: str = "link_down"  # reason of `stream_state`; empty for EXACT
    settled: bool = False  # whether the stream has left RECOVERING at least once
    linked: bool = False
    # Reasons why the view is wrong although its stream is EXACT, by the source that reported them.
    invalid_reasons: Mapping[str, str] = field(default_factory=dict)
    emptied_s: float = -math.inf  # when it last published that its cache is empty, on the indexer's clock

    @property
    def state(self) -> StreamState:
        return StreamState.STALE if self._is_invalid else self.stream_state

    @property
    def reason(self) -> str:
        return next(iter(self.invalid_reasons.values())) if self._is_invalid else self.stream_reason

    @property
    def is_late(self) -> bool:
        """Return whether the view lacks only what was stored before it began."""
        is_stale = self.stream_state is StreamState.STALE
        return is_stale and self.stream_reason in LATE_REASONS and not self.invalid_reasons

    @property
    def _is_invalid(self) -> bool:
        return bool(self.invalid_reasons) and self.stream_state is StreamState.EXACT


class EngineRegistry:
    """Followed engines, by their names in the index."""

    def __init__(self) -> None:
        self._lock = Lock()
        # By `PodStream.holder`. This and all mappings derived from it are replaced as a whole, never changed.
        self.engines: Mapping[str, EngineState] = {}
        self.states: Mapping[str, StreamState] = {}  # by pod: the worst state of its engines
        self._members: Mapping[str, tuple[str, ...]] = {}
        # Members whose name differs from their pod's: ranks above 0.
        self._further: Mapping[str, tuple[str, ...]] = {}

    def add(self, stream: PodStream) -> None:
        with self._lock:
            self._replace({**self.engines, stream.holder: EngineState(stream)})

    def remove(self, holder: str) -> None:
        with self._lock:
            self._replace({other: engine for other, engine in self.engines.items() if other != holder})

    def pod(self, holder: str) -> str:
        return self.engines[holder].stream.pod

    def set_state(self, holder: str, state: StreamState, reason: str) -> None:
        with self._lock:
            settled = self.engines[holder].settled or state is not StreamState.RECOVERING
            self._change(holder, stream_state=state, stream_reason=reason, settled=settled)

    def set_invalid(self, holder: str, source: str, reason: str | None) -> bool:
        """Set why a source declares a view invalid, None: no reason; return whether that is a change."""
        with self._lock:
            engine = self.engines.get(holder)
            if engine is None or engine.invalid_reasons.get(source) == reason:
                return False
            reasons = {other: why for other, why in engine.invalid_reasons.items() if other != source}
            if reason is not None:
                reasons[source] = reason
            self._change(holder, invalid_reasons=reasons)
            return True

    def set_emptied(self, holder: str, now_s: float) -> None:
        with self._lock:
            self._change(holder, emptied_s=now_s)

    def members(self, pod: str) -> Sequence[str]:
        return self._members.get(pod, ())

    def has_exact_streams(self, pod: str) -> bool:
        engines = self.engines
        states = [engines[each].stream_state for each in self.members(pod) if each in engines]
        return bool(states) and all(state is StreamState.EXACT for state in states)

    def set_linked(self, holder: str, up: bool) -> bool | None:
        """Record whether an engine is connected; return whether its pod is linked now, None if unchanged."""
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
        """Return the names in the index of these pods' engines; `pods` itself if no pod has several ranks."""
        further = self._further
        if not further:
            return pods
        return [*pods, *(holder for pod in pods for holder in further.get(pod, ()))]

    def of_pods(
        self, table: PodMatches, pods: Collection[str], pending_tokens: Mapping[str, int] | None, block: int
    ) -> PodMatches:
        """Return the matches of pods from those of their engines.

        Args:
            pending_tokens: Uncached tokens in flight by engine, to choose the rank that decodes first. None:
                the rank cannot be chosen, so the mean of the ranks is expected.
            block: Tokens per index block.
        """
        if len(table.rows) == len(pods):
            return table
        if pending_tokens is None:
            return self._expected(table, pods)

        def left_tokens(holder: str) -> int:
            return pending_tokens.get(holder, 0) - block * table.cached_blocks.item(table.rows[holder])

        best = {pod: min(self._rows_of(pod, table), key=left_tokens) for pod in pods}
        engines = self.engines
        chosen = np.array([table.rows[holder] for holder in best.values()], np.intp)
        return PodMatches(
            {pod: row for row, pod in enumerate(pods)},
            table.tiers,
            table.cached_blocks[chosen],
            table.blocks_by_tier[chosen],
            strides=table.strides[chosen] if len(table.strides) else table.strides,
            held=table.held[chosen],
            behind=table.behind,
            ranks={
                pod: engines[name].stream.rank for pod, name in best.items() if len(self.members(pod)) > 1
            },
        )

    def _rows_of(self, pod: str, table: PodMatches) -> Sequence[str]:
        """Return the names in the table of a pod's engines; the pod itself if it has none."""
        return [holder for holder in self.members(pod) if holder in table.rows] or [pod]

    def _expected(self, table: PodMatches, pods: Collection[str]) -> PodMatches:
        """Return the mean of the ranks of each pod, rounded down to index blocks."""
        members = [[table.rows[holder] for holder in self._rows_of(pod, table)] for pod in pods]
        means = [table.blocks_by_tier[rows].mean(axis=0).astype(np.int32) for rows in members]
        by_tier = np.array(means, np.int32).reshape(len(members), len(table.tiers.names))
        firsts = np.array([rows[0] for rows in members], np.intp)
        return PodMatches(
            {pod: row for row, pod in enumerate(pods)},
            table.tiers,
            by_tier.sum(axis=1, dtype=np.int32),
            by_tier,
            strides=table.strides[firsts] if len(table.strides) else table.strides,
            behind=table.behind,
        )

    def _linked(self, pod: str) -> bool:
        return any(self.engines[holder].linked for holder in self.members(pod))

    def _change(self, holder: str, **changes: Any) -> None:
        self._replace({**self.engines, holder: replace(self.engines[holder], **changes)})

    def _replace(self, engines: Mapping[str, EngineState]) -> None:
        """Replace all engines and the mappings derived from them; the caller must hold the lock."""
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
