"""Speculative entries: how long they live, whose they are, and that they stay bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from indexer import IndexerConfig, KvIndexer
from indexer.speculate import Speculation

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
KEYS = [11, 12, 13]


@pytest.fixture
def speculation() -> Speculation:
    """A TTL of 2 s, a hard cap of 60 s."""
    return make()


def make(max_entries: int = 1000) -> Speculation:
    """As in production, with room for so many entries."""
    return Speculation(ttl_s=2.0, max_s=60.0, max_entries=max_entries)


def assumed(speculation: Speculation, now_s: float, pod: str = A) -> list[int]:
    """Positions in KEYS that are assumed of the pod."""
    return sorted(speculation.assumed(KEYS, {pod}, now_s).get(pod, ()))


def test_a_request_is_assumed_of_its_pod_at_once(speculation: Speculation) -> None:
    """The blocks count for the pod that the request was sent to, and for no other."""
    speculation.assume("r", A, KEYS[:2], 0.0)
    assert speculation.assumed(KEYS, {A, B}, 0.0) == {A: {0, 1}}
    assert speculation.assumed(KEYS, {B}, 0.0) == {}
    assert len(speculation) == 2


def test_without_a_sign_of_life_the_ttl_ends_it(speculation: Speculation) -> None:
    """A request of which nothing is heard is forgotten after two seconds."""
    speculation.assume("r", A, KEYS, 0.0)
    assert assumed(speculation, 1.99) == [0, 1, 2]
    assert assumed(speculation, 2.0) == []
    assert len(speculation) == 0


def test_an_idle_indexer_tells_no_entries_that_are_over() -> None:
    """The gauge of assumed blocks falls by time alone, also when no further request comes."""
    now_s, registry = [0.0], CollectorRegistry()
    indexer = KvIndexer(IndexerConfig(), registry=registry, clock=lambda: now_s[0])
    indexer.speculate("r", A, KEYS, 0.0)
    gauge = "kvroute_indexer_speculative_entries"
    before = registry.get_sample_value(gauge)
    now_s[0] = 2.0
    after = registry.get_sample_value(gauge)
    indexer.close()
    assert (before, after) == (3, 0)


def test_a_pod_that_stores_blocks_keeps_its_queue_assumed(speculation: Speculation) -> None:
    """While the pod works off what is in front of the request, the TTL starts again."""
    speculation.assume("r", A, KEYS, 0.0)
    for second in range(1, 20):
        speculation.stored(A, [999], float(second))
    assert assumed(speculation, 20.9) == [0, 1, 2]
    assert assumed(speculation, 21.0) == []


def test_another_pods_life_is_no_sign(speculation: Speculation) -> None:
    """Only the pods of the request itself renew it."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.assume("other", B, [5], 0.0)
    speculation.stored(B, [999], 1.5)
    assert assumed(speculation, 2.0) == []


def test_saying_it_again_renews_it(speculation: Speculation) -> None:
    """A caller that knows that the request still waits may say so, without counting it twice."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.assume("r", A, KEYS, 1.5)
    assert len(speculation) == 3
    assert assumed(speculation, 3.4) == [0, 1, 2]
    assert assumed(speculation, 3.5) == []


def test_the_hard_cap_ends_it_in_any_case(speculation: Speculation) -> None:
    """No sign of life keeps an assumption beyond a minute."""
    speculation.assume("r", A, KEYS, 0.0)
    for second in range(1, 60):
        speculation.stored(A, [999], float(second))
        speculation.assume("r", A, KEYS, float(second))
    assert assumed(speculation, 59.9) == [0, 1, 2]
    assert assumed(speculation, 60.0) == []


def test_a_settled_request_ends_after_its_grace(speculation: Speculation) -> None:
    """First token or failure end it soon, whatever the pod tells meanwhile."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.settle("r", 1.0, 0.05)
    speculation.stored(A, [999], 1.04)
    assert assumed(speculation, 1.04) == [0, 1, 2]
    assert assumed(speculation, 1.06) == []
    speculation.settle("r", 2.0, 0.05)
    speculation.settle("unknown", 2.0, 0.05)


def test_entries_are_counted_per_request(speculation: Speculation) -> None:
    """One request's end does not take away what another one on the same pod relies on."""
    speculation.assume("first", A, KEYS, 0.0)
    speculation.assume("second", A, KEYS[:2], 0.5)
    speculation.settle("first", 1.0, 0.0)
    assert assumed(speculation, 1.1) == [0, 1]


def test_an_event_confirms_and_ends_it(speculation: Speculation) -> None:
    """What the pod told of is not assumed any more, for any request, so that a later removal shows."""
    speculation.assume("first", A, KEYS, 0.0)
    speculation.assume("second", A, KEYS, 0.0)
    speculation.stored(A, KEYS[:2], 0.1)
    assert assumed(speculation, 0.1) == [2]
    speculation.stored(A, KEYS[2:], 0.2)
    assert len(speculation) == 0
    speculation.assume("third", A, KEYS, 0.3)
    speculation.settle("first", 0.3, 0.0)
    assert assumed(speculation, 0.4) == [0, 1, 2]


def test_prefill_and_decode_pods_are_both_assumed(speculation: Speculation) -> None:
    """One request may be assumed of several pods; one pod's end spares the other."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.assume("r", B, KEYS[:1], 0.0)
    assert speculation.assumed(KEYS, {A, B}, 0.1) == {A: {0, 1, 2}, B: {0}}
    speculation.drop_pod(A)
    assert speculation.assumed(KEYS, {A, B}, 0.1) == {B: {0}}


def test_the_oldest_requests_make_room() -> None:
    """Beyond the bound the oldest requests are dropped whole."""
    speculation = make(max_entries=5)
    speculation.assume("old", A, [1, 2, 3], 0.0)
    speculation.assume("new", A, KEYS, 0.1)
    assert len(speculation) == 3
    assert assumed(speculation, 0.1) == [0, 1, 2]
    speculation.assume("huge", A, range(100, 110), 0.2)
    assert len(speculation) == 0


operations = st.one_of(
    st.tuples(
        st.just("assume"), st.sampled_from("rst"), st.sampled_from([A, B]), st.lists(st.sampled_from(KEYS))
    ),
    st.tuples(st.just("settle"), st.sampled_from("rst"), st.just(0.05)),
    st.tuples(st.just("stored"), st.sampled_from([A, B]), st.lists(st.sampled_from([*KEYS, 99]))),
    st.tuples(st.just("drop_pod"), st.sampled_from([A, B])),
)


@given(st.lists(st.tuples(operations, st.floats(0, 3)), max_size=40))
def test_nothing_is_left_behind(history: list[tuple[tuple[object, ...], float]]) -> None:
    """After any history the count is that of the entries, and a minute later nothing is kept."""
    speculation = make(max_entries=12)
    now_s = 0.0
    for (name, *arguments), pause_s in history:
        now_s += pause_s
        with_time = {"assume": [*arguments, now_s], "stored": [*arguments, now_s]}
        if name == "settle":
            arguments.insert(1, now_s)
        getattr(speculation, str(name))(*with_time.get(str(name), arguments))
        entries = {
            (request_id, pod, key)
            for key, pods in speculation._holders.items()
            for pod, requests in pods.items()
            for request_id in requests
        }
        assert len(speculation) == len(entries) <= 12
        assert {request_id for request_id, _, _ in entries} == set(speculation._requests)
    speculation.assumed(KEYS, {A, B}, now_s + 60.0)
    assert not speculation._holders
    assert not speculation._requests
    assert not speculation._requests_by_pod
    assert not speculation._stored_s
    assert not speculation._due
