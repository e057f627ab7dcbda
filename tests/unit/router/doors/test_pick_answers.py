"""PickEndpoint responses: from a decision to the ranked endpoints."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer import PodMatches, StreamState
from indexer.pod_entry import PodEntry
from indexer.wire.tiers import Tiers
from router._pb import endpoint_picker_pb2 as pb
from router.doors.pick import pick_response
from router.picking.cost import CACHE_HIT, COST_BREAKDOWN
from router.picking.decision import Decision, Ranking
from router.pods.pod_set import PodSet

SECONDS = ("cost_s", "queued_prefill_s", "own_prefill_s", "copy_s", "kv_pressure_s")
numbers = st.floats(allow_nan=False)
tokens = st.integers(0, 2**32 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
NOTHING = np.zeros((0, len(Tiers().names)), np.int32)


def entry(pod: str, name: str) -> PodEntry:
    """Return a declared pod."""
    address, _, port = pod.rpartition(":")
    return PodEntry(name, "default", address, int(port))


def pod_set(named: dict[str, str]) -> PodSet:
    """Return a pod set with these pods."""
    pods = PodSet()
    pods.declare([entry(address, name) for address, name in named.items()])
    return pods


def ranking(
    pods: tuple[str, ...],
    known: dict[str, StreamState] | None = None,
    followed: frozenset[str] = frozenset(),
) -> Ranking:
    """Return a ranking of candidates without cache hits; `known`: stream states by pod, None: unknown."""
    breakdowns, hits = np.zeros(len(pods), COST_BREAKDOWN), np.zeros(len(pods), CACHE_HIT)
    none = PodMatches({}, Tiers(), NOTHING[:, 0], NOTHING, states=known or {}, followed=followed)
    matches = [] if known is None else [none]
    return Ranking(pods, breakdowns, hits, np.arange(len(pods)), 100, 16, matches, 0)


def decided(ranked: Ranking, request_id: str = "r", degraded: str | None = None) -> Decision:
    """Return a decision for a ranking."""
    return Decision(request_id, "chat", "m", ranked, {}, 100, degraded, 0.0)


def read(pods: PodSet, decision: Decision, endpoints_max: int = 40) -> pb.PickEndpointResponse:
    """Return a response as a client reads it."""
    told = pick_response(decision, pods.current, endpoints_max)
    return pb.PickEndpointResponse.FromString(told.SerializeToString())


@given(
    st.lists(st.tuples(names, names, tokens, st.tuples(*[numbers] * 5)), min_size=1, max_size=40),
    st.randoms(),
    names,
    tokens,
    st.none() | names,
)
def test_protobuf_reads_what_was_decided(
    candidates: list[tuple[str, str, int, tuple[float, ...]]],
    random: Random,
    request_id: str,
    prompt_tokens: int,
    degraded: str | None,
) -> None:
    """Every field of every candidate is copied to the response in ranking order."""
    entries = [PodEntry(name, "", address, at) for at, (address, name, *_) in enumerate(candidates)]
    ranked, pods = ranking(tuple(one.pod for one in entries)), PodSet()
    pods.declare(entries)
    for place, (_, _, cached_tokens, seconds) in enumerate(candidates):
        ranked.hits[place]["cached_tokens"] = cached_tokens
        for name, value in zip(SECONDS, seconds, strict=True):
            ranked.breakdowns[place][name] = value
    random.shuffle(ranked.order)
    most = int(ranked.hits["cached_tokens"].max())
    ranked = Ranking(ranked.pods, ranked.breakdowns, ranked.hits, ranked.order, prompt_tokens, 16, [], most)
    decision = Decision(request_id, "chat", "m", ranked, {}, prompt_tokens, degraded, 0.0)
    told = read(pods, decision)
    assert [endpoint.address for endpoint in told.endpoints] == [ranked.pods[at] for at in ranked.order]
    for endpoint, candidate in zip(told.endpoints, ranked, strict=True):
        assert endpoint.pod_name == pods.current[endpoint.address].name
        assert [getattr(endpoint, name) for name in SECONDS] == [getattr(candidate, name) for name in SECONDS]
        assert (endpoint.cached_tokens, endpoint.view) == (candidate.cached_tokens, candidate.view)
    assert (told.request_id, told.reason) == (request_id, decision.reason)
    assert (told.prompt_tokens, told.degraded) == (prompt_tokens, degraded or "")


def test_only_ranked_candidates_are_returned() -> None:
    """Pods removed by a filter are not among the endpoints."""
    ranked = ranking(("a:1", "b:1", "c:1"))
    ranked = Ranking(ranked.pods, ranked.breakdowns, ranked.hits, np.array([2, 0]), 100, 16, [], 0)
    told = read(pod_set({"a:1": "a", "b:1": "b", "c:1": "c"}), decided(ranked))
    assert [(endpoint.address, endpoint.pod_name) for endpoint in told.endpoints] == [
        ("c:1", "c"),
        ("a:1", "a"),
    ]


def test_views_are_those_of_the_decision() -> None:
    """A response reports the stream states at the time of its decision, not later ones."""
    named, pods = pod_set({"a:1": "a", "b:1": "b"}), ("a:1", "b:1")
    exact, stale = StreamState.EXACT, StreamState.STALE
    before = decided(ranking(pods, {"a:1": exact, "b:1": exact}))
    asked = [
        (before, ["EXACT", "EXACT"]),
        (decided(ranking(pods, {"a:1": exact, "b:1": stale})), ["EXACT", "STALE"]),
        (decided(ranking(pods, {"b:1": exact}, frozenset(pods))), ["RECOVERING", "EXACT"]),
        (decided(ranking(pods, {"b:1": exact})), ["STALE", "EXACT"]),
        (decided(ranking(pods)), ["STALE", "STALE"]),
        (before, ["EXACT", "EXACT"]),
    ]
    for decision, views in asked:
        assert [endpoint.view for endpoint in read(named, decision).endpoints] == views


def test_a_replaced_pod_is_returned_with_its_new_name() -> None:
    """A new pod at a known address has its own name in the response; a removed pod has none."""
    pods, ranked = pod_set({"a:1": "old", "b:1": "b"}), ranking(("a:1", "b:1"))
    decision = decided(ranked)
    assert [endpoint.pod_name for endpoint in read(pods, decision).endpoints] == ["old", "b"]
    pods.declare([entry("a:1", "new")])
    assert [endpoint.pod_name for endpoint in read(pods, decision).endpoints] == ["new", ""]


def test_at_most_max_endpoints_are_returned() -> None:
    """The response has at most `max_endpoints` endpoints, the best ones."""
    addresses = tuple(f"{at}:1" for at in range(40))
    told = read(pod_set(dict.fromkeys(addresses, "pod")), decided(ranking(addresses)), 3)
    assert [endpoint.address for endpoint in told.endpoints] == ["0:1", "1:1", "2:1"]


def test_a_lone_surrogate_in_a_pod_name_is_replaced() -> None:
    """A lone surrogate in a pod's name, which protobuf rejects, becomes a question mark."""
    told = read(pod_set({"a:1": "pod-\ud800"}), decided(ranking(("a:1",))))
    assert [endpoint.pod_name for endpoint in told.endpoints] == ["pod-?"]
