"""Candidate cache: hits, invalidation, limits, and rows in index matches."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from router.errors import NoEndpointError
from router.picking.candidates import CandidateCache
from router.pods.engine_load import EngineLoad
from router.pods.pod_set import PodSet
from tests.support.router.bench import completion, entry, ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")
REQUEST = completion("r", "p")


def two_pods() -> tuple[PodSet, CandidateCache]:
    """Return two ready pods and their candidate cache."""
    pods = PodSet()
    pods.declare([A.entry, B.entry])
    pods.put(A)
    pods.put(B)
    return pods, CandidateCache(pods)


def test_a_load_change_keeps_the_cached_candidates() -> None:
    """A new load report does not invalidate the cached candidates."""
    pods, cache = two_pods()
    first = cache.get(REQUEST)
    pods.put(replace(A, load=EngineLoad(1, 1, 0.5, 100, 1.0)))
    assert cache.get(completion("other", "text")) is first
    assert first.addresses == (A.address, B.address)


def test_a_pod_change_is_visible_to_the_next_request() -> None:
    """A change of readiness or of the declared pods invalidates the cached candidates."""
    pods, cache = two_pods()
    cache.get(REQUEST)
    pods.suspect(A.address, "its link broke")
    assert cache.get(REQUEST).addresses == (B.address,)
    assert cache.get(REQUEST).excluded == {A.address: "not ready: its link broke"}
    pods.declare([A.entry, entry("10.0.0.3:8000")])
    assert cache.get(REQUEST).addresses == (A.address,)
    pods.declare([entry("10.0.0.3:8000")])
    with pytest.raises(NoEndpointError):
        cache.get(REQUEST)


def test_a_failing_pod_is_a_candidate_only_if_all_fail() -> None:
    """A failing pod is excluded with the reason while another pod serves; a sleeping one does not serve."""
    pods, cache = two_pods()
    pods.put(replace(A, failing="5 or more"))
    assert cache.get(REQUEST).addresses == (B.address,)
    assert cache.get(REQUEST).excluded == {A.address: "failing: 5 or more"}
    pods.put(replace(B, asleep=True))
    assert cache.get(REQUEST).addresses == (A.address,)
    pods.put(replace(B, failing="5 or more"))
    assert cache.get(REQUEST).addresses == (A.address, B.address)


def test_models_and_subsets_have_separate_candidates() -> None:
    """Requests with different allowed endpoints get different candidates."""
    _, cache = two_pods()
    only_b = msgspec.structs.replace(REQUEST, candidates=frozenset({B.address}))
    assert cache.get(only_b).addresses == (B.address,)
    assert cache.get(REQUEST).addresses == (A.address, B.address)


def test_the_number_of_cached_subsets_is_limited() -> None:
    """The cache keeps at most 256 entries, however many subsets clients name."""
    _, cache = two_pods()
    subsets = (frozenset({A.address, f"10.1.0.1:{number}"}) for number in range(1000))
    requests = [msgspec.structs.replace(REQUEST, candidates=subset) for subset in subsets]
    results = [cache.get(request) for request in requests]
    kept = sum(cache.get(requests[at]) is results[at] for at in reversed(range(1000)))
    assert 0 < kept <= 256


def test_match_rows_follow_each_match() -> None:
    """Rows are those of the given match, whatever its order of pods."""
    _, cache = two_pods()
    candidates = cache.get(REQUEST)
    for order in ({A.address: 0, B.address: 1}, {B.address: 0, "other": 1, A.address: 2}):
        assert candidates.match_rows(order).tolist() == [order[A.address], order[B.address]]
