"""Line-ups: kept while nothing changes, made anew when it does, and in the order of every table."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.errors import NoEndpointError
from router.picking.candidates import CandidateCache
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import PodSet
from tests.unit.router_support import completion, entry, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
REQUEST = completion("r", "p")


def known() -> tuple[PodSet, CandidateCache]:
    """Two ready pods."""
    pods = PodSet()
    pods.declare([A.entry, B.entry])
    pods.put(A)
    pods.put(B)
    return pods, CandidateCache(pods)


def test_a_line_up_is_kept_while_only_loads_change() -> None:
    """A probe that brings nothing but a load does not cost every request its filtering."""
    pods, cache = known()
    first = cache.get(REQUEST)
    pods.put(replace(A, load=EngineLoad(1, 1, 0.5, 100, 1.0)))
    assert cache.get(completion("other", "text")) is first
    assert first.addresses == (A.address, B.address)


def test_a_pod_that_leaves_or_comes_is_seen_by_the_next_request() -> None:
    """Readiness, models and declarations each make a new line-up."""
    pods, cache = known()
    cache.get(REQUEST)
    pods.suspect(A.address, "its link broke")
    assert cache.get(REQUEST).addresses == (B.address,)
    assert cache.get(REQUEST).excluded == {A.address: "not ready: its link broke"}
    pods.declare([A.entry, entry("10.0.0.3:8000")])
    assert cache.get(REQUEST).addresses == (A.address,)
    pods.declare([entry("10.0.0.3:8000")])
    with pytest.raises(NoEndpointError):
        cache.get(REQUEST)


def test_models_and_subsets_have_line_ups_of_their_own() -> None:
    """Requests for other pods do not get each other's."""
    _, cache = known()
    only_b = msgspec.structs.replace(REQUEST, candidates=frozenset({B.address}))
    assert cache.get(only_b).addresses == (B.address,)
    assert cache.get(REQUEST).addresses == (A.address, B.address)


def test_a_flood_of_subsets_does_not_grow_without_end() -> None:
    """Clients that name ever new subsets cost filtering, not memory."""
    _, cache = known()
    subsets = (frozenset({A.address, f"10.1.0.1:{number}"}) for number in range(1000))
    asked = [msgspec.structs.replace(REQUEST, candidates=subset) for subset in subsets]
    made = [cache.get(request) for request in asked]
    kept = sum(cache.get(asked[at]) is made[at] for at in reversed(range(1000)))
    assert 0 < kept <= 256


def test_places_follow_the_order_of_each_match() -> None:
    """A match may hold its pods in any order, and another one in another."""
    _, cache = known()
    candidates = cache.get(REQUEST)
    for order in ({A.address: 0, B.address: 1}, {B.address: 0, "other": 1, A.address: 2}):
        assert candidates.match_rows(order).tolist() == [order[A.address], order[B.address]]
