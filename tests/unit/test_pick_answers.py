"""PickEndpoint's answers: a decision in, the ranked endpoints out."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer import PodMatches, StreamState
from indexer.index.tiers import Tiers
from indexer.pod_entry import PodEntry
from router._pb import endpoint_picker_pb2 as pb
from router.doors.pick import answer
from router.picking.cost import CACHE_HIT, COST_BREAKDOWN
from router.picking.decision import Decision, Ranking
from router.pods.pod_set import PodSet

SECONDS = ("cost_s", "queued_prefill_s", "own_prefill_s", "copy_s", "kv_pressure_s")
numbers = st.floats(allow_nan=False)
tokens = st.integers(0, 2**32 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
NOTHING = np.zeros((0, len(Tiers().names)), np.int32)


def entry(pod: str, name: str) -> PodEntry:
    """A declared pod."""
    address, _, port = pod.rpartition(":")
    return PodEntry(name, "default", address, int(port))


def pod_set(named: dict[str, str]) -> PodSet:
    """Pods by address."""
    pods = PodSet()
    pods.declare([entry(address, name) for address, name in named.items()])
    return pods


def ranking(
    pods: tuple[str, ...],
    known: dict[str, StreamState] | None = None,
    followed: frozenset[str] = frozenset(),
) -> Ranking:
    """Candidates that hold nothing, best first; `known`: the states of their streams, None: nobody asked."""
    breakdowns, hits = np.zeros(len(pods), COST_BREAKDOWN), np.zeros(len(pods), CACHE_HIT)
    none = PodMatches({}, Tiers(), NOTHING[:, 0], NOTHING, states=known or {}, followed=followed)
    matches = [] if known is None else [none]
    return Ranking(pods, breakdowns, hits, np.arange(len(pods)), 100, 16, matches, 0)


def decided(ranked: Ranking, request_id: str = "r", degraded: str | None = None) -> Decision:
    """A decision for these candidates."""
    return Decision(request_id, "chat", "m", ranked, {}, 100, degraded, 0.0)


def read(pods: PodSet, decision: Decision, endpoints_max: int = 40) -> pb.PickEndpointResponse:
    """An answer as clients read it."""
    told = answer(decision, pods.snapshot(), endpoints_max)
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
    """Every field of every candidate comes out as it went in, in the order of the ranking."""
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
        assert endpoint.pod_name == pods.snapshot()[endpoint.address].name
        assert [getattr(endpoint, name) for name in SECONDS] == [getattr(candidate, name) for name in SECONDS]
        assert (endpoint.cached_tokens, endpoint.view) == (candidate.cached_tokens, candidate.view)
    assert (told.request_id, told.reason) == (request_id, decision.reason)
    assert (told.prompt_tokens, told.degraded) == (prompt_tokens, degraded or "")


def test_only_the_ranked_are_answered() -> None:
    """Candidates that a filter took out of the order are not among the endpoints."""
    ranked = ranking(("a:1", "b:1", "c:1"))
    ranked = Ranking(ranked.pods, ranked.breakdowns, ranked.hits, np.array([2, 0]), 100, 16, [], 0)
    told = read(pod_set({"a:1": "a", "b:1": "b", "c:1": "c"}), decided(ranked))
    assert [(endpoint.address, endpoint.pod_name) for endpoint in told.endpoints] == [
        ("c:1", "c"),
        ("a:1", "a"),
    ]


def test_views_are_those_of_the_decision() -> None:
    """One pod's stream changes, or begins: the next answer says so, and an older decision's what was true."""
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


def test_a_replaced_pod_is_called_by_its_new_name() -> None:
    """Another pod at a known address has its own name in the next answer; one that is gone has none."""
    pods, ranked = pod_set({"a:1": "old", "b:1": "b"}), ranking(("a:1", "b:1"))
    decision = decided(ranked)
    assert [endpoint.pod_name for endpoint in read(pods, decision).endpoints] == ["old", "b"]
    pods.declare([entry("a:1", "new")])
    assert [endpoint.pod_name for endpoint in read(pods, decision).endpoints] == ["new", ""]


def test_the_best_so_many_are_answered() -> None:
    """No more endpoints are answered than asked for, and those are the best."""
    addresses = tuple(f"{at}:1" for at in range(40))
    told = read(pod_set(dict.fromkeys(addresses, "pod")), decided(ranking(addresses)), 3)
    assert [endpoint.address for endpoint in told.endpoints] == ["0:1", "1:1", "2:1"]


def test_a_name_that_is_no_text_costs_no_pick() -> None:
    """Half a surrogate pair, which protobuf refuses, is answered as a question mark."""
    told = read(pod_set({"a:1": "pod-\ud800"}), decided(ranking(("a:1",))))
    assert [endpoint.pod_name for endpoint in told.endpoints] == ["pod-?"]
