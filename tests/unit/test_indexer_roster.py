"""Engines behind pods: one match, one state and one link for each pod."""

from __future__ import annotations

import numpy as np

from indexer.config import PodStream
from indexer.index.contract import StreamState
from indexer.keys import BlockHasher
from indexer.streams.engine_registry import Roster
from indexer.tiers import Tiers
from tests.support.reference_index import ReferenceIndex

POD, OTHER = "10.0.0.1:8000", "10.0.0.2:8000"
EXACT, RECOVERING, STALE = StreamState.EXACT, StreamState.RECOVERING, StreamState.STALE


def roster(*streams: PodStream) -> Roster:
    """A roster that follows these."""
    made = Roster()
    for stream in streams:
        made.opened(stream)
    return made


def rank(number: int, pod: str = POD) -> PodStream:
    """One engine behind a pod."""
    return PodStream(pod, "m", None, rank=number)


def test_a_pod_is_as_good_as_its_worst_rank() -> None:
    """EXACT if all are, RECOVERING while any is, else STALE."""
    made = roster(rank(0), rank(1), rank(0, OTHER))
    assert made.states == {POD: RECOVERING, OTHER: RECOVERING}
    made.told(POD, EXACT, "")
    assert made.states[POD] is RECOVERING
    made.told(f"{POD}@dp1", STALE, "gap")
    assert made.states[POD] is STALE
    made.told(f"{POD}@dp1", EXACT, "")
    assert made.states == {POD: EXACT, OTHER: RECOVERING}
    made.closed(OTHER)
    assert made.states == {POD: EXACT}


def test_a_pod_is_linked_while_any_rank_is() -> None:
    """Only changes of the pod are told."""
    made = roster(rank(0), rank(1))
    told = [made.link(POD, True), made.link(f"{POD}@dp1", True), made.link(POD, False)]
    assert [*told, made.link(f"{POD}@dp1", False)] == [True, None, None, False]
    assert made.linked_engines() == 0


def test_a_view_that_was_built_once_is_settled_for_good() -> None:
    """What recovers later does not make us wait again."""
    made = roster(rank(0), rank(1))
    made.told(POD, EXACT, "")
    assert made.unsettled() == {POD}
    made.told(f"{POD}@dp1", STALE, "no_history")
    made.told(POD, RECOVERING, "gap")
    assert made.unsettled() == frozenset()


def test_a_pods_match_is_its_best_ranks() -> None:
    """The longest prefix of one engine counts, never parts of two."""
    index, hasher = ReferenceIndex(100, Tiers()), BlockHasher(4, 1)
    keys = hasher.chain(hasher.root("m", None, None), np.arange(20, dtype=np.uint32))
    made = roster(rank(0), rank(1), rank(3, OTHER))
    index.add(POD, "gpu", keys[:2])
    index.add(f"{POD}@dp1", "gpu", keys[:1])
    index.add(f"{POD}@dp1", "cpu", keys[1:4])
    index.add(f"{OTHER}@dp3", "gpu", keys[1:])
    pods = [POD, OTHER, "unknown"]
    table = made.best_ranks(index.match(keys, made.holders(pods)), pods)
    assert {pod: table[pod].cached_blocks for pod in table} == {POD: 4, OTHER: 0, "unknown": 0}
    assert dict(table[POD].blocks_by_tier) == {"gpu": 1, "cpu": 3}


def test_pods_without_ranks_cost_nothing() -> None:
    """The very set that was asked for is passed on, and the very table back."""
    index, made, pods = ReferenceIndex(100, Tiers()), roster(rank(0)), frozenset({POD, OTHER})
    assert made.holders(pods) is pods
    table = index.match(np.empty(0, np.uint64), pods)
    assert made.best_ranks(table, pods) is table
