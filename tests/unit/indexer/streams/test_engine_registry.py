"""Engine registry: one match, one state and one link per pod."""

from __future__ import annotations

import numpy as np

from indexer.config import PodStream
from indexer.index.contract import StreamState
from indexer.keys import BlockHasher
from indexer.streams.engine_registry import EngineRegistry
from indexer.wire.tiers import Tiers
from tests.support.indexer.reference_index import ReferenceIndex

POD, OTHER = "10.0.0.1:8000", "10.0.0.2:8000"
EXACT, RECOVERING, STALE = StreamState.EXACT, StreamState.RECOVERING, StreamState.STALE


def roster(*streams: PodStream) -> EngineRegistry:
    """A roster that follows these."""
    made = EngineRegistry()
    for stream in streams:
        made.add(stream)
    return made


def rank(number: int, pod: str = POD) -> PodStream:
    """Return the stream of one engine behind a pod."""
    return PodStream(pod, "m", None, rank=number)


def test_a_pod_is_as_good_as_its_worst_rank() -> None:
    """A pod is EXACT if all its ranks are, RECOVERING while any is, else STALE."""
    made = roster(rank(0), rank(1), rank(0, OTHER))
    assert made.states == {POD: RECOVERING, OTHER: RECOVERING}
    made.set_state(POD, EXACT, "")
    assert made.states[POD] is RECOVERING
    made.set_state(f"{POD}@dp1", STALE, "gap")
    assert made.states[POD] is STALE
    made.set_state(f"{POD}@dp1", EXACT, "")
    assert made.states == {POD: EXACT, OTHER: RECOVERING}
    made.remove(OTHER)
    assert made.states == {POD: EXACT}


def test_a_pod_is_linked_while_any_rank_is() -> None:
    """Only changes of a pod's link are reported."""
    made = roster(rank(0), rank(1))
    told = [made.set_linked(POD, True), made.set_linked(f"{POD}@dp1", True), made.set_linked(POD, False)]
    assert [*told, made.set_linked(f"{POD}@dp1", False)] == [True, None, None, False]
    assert made.linked_engines() == 0


def test_a_view_that_was_built_once_is_settled_for_good() -> None:
    """A view that recovers later does not count as unsettled again."""
    made = roster(rank(0), rank(1))
    made.set_state(POD, EXACT, "")
    assert made.unsettled() == {POD}
    made.set_state(f"{POD}@dp1", STALE, "no_history")
    made.set_state(POD, RECOVERING, "gap")
    assert made.unsettled() == frozenset()


def test_a_pods_match_is_that_of_one_rank_or_the_mean_of_all() -> None:
    """A rank that can be chosen is the one with the least tokens left; else the mean of all is expected."""
    index, hasher = ReferenceIndex(100, Tiers()), BlockHasher(4, 1)
    keys = hasher.chain(hasher.root("m", None, None), np.arange(20, dtype=np.uint32))
    made = roster(rank(0), rank(1), rank(3, OTHER))
    index.add(POD, "gpu", keys[:2])
    index.add(f"{POD}@dp1", "gpu", keys[:1])
    index.add(f"{POD}@dp1", "cpu", keys[1:4])
    index.add(f"{OTHER}@dp3", "gpu", keys[1:])
    pods = [POD, OTHER, "unknown"]
    matched = index.match(keys, made.holders(pods))
    table = made.of_pods(matched, pods, {}, 4)
    assert {pod: table[pod].cached_blocks for pod in table} == {POD: 4, OTHER: 0, "unknown": 0}
    assert dict(table[POD].blocks_by_tier) == {"gpu": 1, "cpu": 3}
    assert table.ranks == {POD: 1}
    busy = made.of_pods(matched, pods, {f"{POD}@dp1": 9}, 4)
    assert (busy[POD].cached_blocks, busy.ranks) == (2, {POD: 0})
    expected = made.of_pods(matched, pods, None, 4)
    assert (dict(expected[POD].blocks_by_tier), expected.ranks) == ({"gpu": 1, "cpu": 1}, {})


def test_pods_with_one_rank_are_passed_through() -> None:
    """Without further ranks the requested set and the table are returned as they are."""
    index, made, pods = ReferenceIndex(100, Tiers()), roster(rank(0)), frozenset({POD, OTHER})
    assert made.holders(pods) is pods
    table = index.match(np.empty(0, np.uint64), pods)
    assert made.of_pods(table, pods, {}, 4) is table
