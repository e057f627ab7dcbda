"""Speculative entries: lifetime, references and bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from indexer import CachingFacts, EngineReading, IndexerConfig, KvIndexer
from indexer.audit.speculation import Speculation
from indexer.keys import Keys
from indexer.wire.tiers import Tiers
from tests.support.indexer.contents import items_within
from tests.support.indexer.reference_index import ReferenceIndex

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def keys_of(numbers: Iterable[int]) -> Keys:
    """Return keys by their numbers."""
    return np.array(list(numbers), np.uint64)


KEYS = keys_of([11, 12, 13])


class CountingIndex(ReferenceIndex):
    """Index that counts how often each block is held per pod."""

    def __init__(self) -> None:
        super().__init__(1000, Tiers())
        self.copies: Counter[tuple[str, int]] = Counter()

    def store(self, pod: str, number: int, keys: Keys) -> None:
        """Add and count."""
        super().store(pod, number, keys)
        self.copies.update((pod, key) for key in keys.tolist())

    def remove(self, pod: str, tier: str, keys: Keys) -> int:
        """Remove and count; a block that is not held counts negatively."""
        self.copies.subtract((pod, key) for key in keys.tolist())
        for key in keys.tolist():
            if not self.copies[pod, key]:
                del self.copies[pod, key]
        return super().remove(pod, tier, keys)


class Speculated(Speculation):
    """Speculation with room for so many entries, a TTL of 2 s and a hard limit of 60 s."""

    def __init__(self, max_entries: int = 1000) -> None:
        self.index = CountingIndex()
        super().__init__(self.index, ttl_s=2.0, max_s=60.0, max_entries=max_entries)

    def held(self, now_s: float, pod: str = A) -> list[int]:
        """Return the positions in KEYS that have speculative entries at the pod."""
        self.expire(now_s)
        return np.flatnonzero(self.index.held(KEYS, pod)).tolist()


@pytest.fixture
def speculation() -> Speculated:
    """Return a speculation with room for all entries."""
    return Speculated()


def test_entries_count_for_the_requests_pod_immediately(speculation: Speculated) -> None:
    """The blocks count for the pod that the request was sent to, and for no other."""
    speculation.assume("r", A, KEYS[:2], 0.0)
    assert speculation.held(0.0) == [0, 1]
    assert speculation.held(0.0, B) == []
    assert len(speculation) == 2


def test_entries_expire_after_the_ttl(speculation: Speculated) -> None:
    """The entries of a request without further reports expire after two seconds."""
    speculation.assume("r", A, KEYS, 0.0)
    assert speculation.held(1.99) == [0, 1, 2]
    assert speculation.held(2.0) == []
    assert len(speculation) == 0


def test_the_gauge_falls_without_further_requests() -> None:
    """The gauge of speculative entries falls by time alone."""
    now_s, registry = [0.0], CollectorRegistry()
    indexer = KvIndexer(IndexerConfig(), registry=registry, clock=lambda: now_s[0])
    indexer.speculate("r", A, KEYS, 0.0)
    gauge = "kvroute_indexer_speculative_entries"
    before = registry.get_sample_value(gauge)
    now_s[0] = 2.0
    after = registry.get_sample_value(gauge)
    indexer.close()
    assert (before, after) == (3, 0)


def test_an_engine_without_prefix_caching_gets_no_entries() -> None:
    """Nothing is assumed at a pod whose metrics say that it caches nothing."""
    registry = CollectorRegistry()
    indexer = KvIndexer(IndexerConfig(), registry=registry)
    for caches, entries in ((False, 0), (True, 3)):
        indexer.observe(A, EngineReading(caching=CachingFacts(is_on=caches)))
        indexer.speculate("r", A, KEYS, 0.0)
        assert registry.get_sample_value("kvroute_indexer_blocks") == entries
    indexer.close()


def test_zero_entries_disable_speculation() -> None:
    """speculative_entries: 0 disables speculation: blocks count only after their events."""
    registry = CollectorRegistry()
    indexer = KvIndexer(IndexerConfig(speculative_entries=0), registry=registry)
    indexer.speculate("r", A, KEYS, 0.0)
    entries = registry.get_sample_value("kvroute_indexer_speculative_entries")
    blocks = registry.get_sample_value("kvroute_indexer_blocks")
    indexer.close()
    assert (entries, blocks) == (0, 0)


def test_a_stored_block_restarts_the_ttl(speculation: Speculated) -> None:
    """While the pod works off the requests in front, the TTL restarts."""
    speculation.assume("r", A, KEYS, 0.0)
    for second in range(1, 20):
        speculation.stored(A, [999], float(second))
    assert speculation.held(20.9) == [0, 1, 2]
    assert speculation.held(21.0) == []


def test_another_pods_stores_do_not_restart_the_ttl(speculation: Speculated) -> None:
    """Only stores of the request's own pods restart its TTL."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.assume("other", B, keys_of([5]), 0.0)
    speculation.stored(B, [999], 1.5)
    assert speculation.held(2.0) == []


def test_a_second_call_restarts_the_ttl(speculation: Speculated) -> None:
    """A second call for a waiting request restarts its TTL without counting its blocks twice."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.assume("r", A, KEYS, 1.5)
    assert len(speculation) == 3
    assert speculation.held(3.4) == [0, 1, 2]
    assert speculation.held(3.5) == []


def test_the_hard_limit_ends_entries_in_any_case(speculation: Speculated) -> None:
    """No stores keep entries beyond a minute."""
    speculation.assume("r", A, KEYS, 0.0)
    for second in range(1, 60):
        speculation.stored(A, [999], float(second))
        speculation.assume("r", A, KEYS, float(second))
    assert speculation.held(59.9) == [0, 1, 2]
    assert speculation.held(60.0) == []


def test_a_settled_request_ends_after_its_grace(speculation: Speculated) -> None:
    """First token or failure end a request's entries after the grace time, whatever the pod stores."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.settle("r", 1.0, 0.05)
    speculation.stored(A, [999], 1.04)
    assert speculation.held(1.04) == [0, 1, 2]
    assert speculation.held(1.06) == []
    speculation.settle("r", 2.0, 0.05)
    speculation.settle("unknown", 2.0, 0.05)


def test_deadlines_out_of_order_are_kept(speculation: Speculated) -> None:
    """A request with an earlier deadline than the one before it ends first."""
    speculation.assume("second", A, KEYS, 1.0)
    speculation.assume("first", B, KEYS, 0.5)
    assert (speculation.held(2.4, B), speculation.held(2.5, B)) == ([0, 1, 2], [])
    assert (speculation.held(2.9), speculation.held(3.0)) == ([0, 1, 2], [])
    speculation.assume("patient", A, KEYS, 4.0)
    speculation.assume("hasty", B, KEYS, 4.0)
    speculation.settle("patient", 4.0, 1.0)
    speculation.settle("hasty", 4.0, 0.125)
    assert (speculation.held(4.1, B), speculation.held(4.125, B)) == ([0, 1, 2], [])
    assert (speculation.held(4.9), speculation.held(5.0)) == ([0, 1, 2], [])


def test_an_expired_request_starts_over(speculation: Speculated) -> None:
    """The deadline of a request's first entries does not end later ones."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.settle("r", 0.0, 0.05)
    speculation.assume("r", A, KEYS, 1.0)
    assert (speculation.held(2.9), speculation.held(3.0)) == ([0, 1, 2], [])


def test_entries_are_counted_per_request(speculation: Speculated) -> None:
    """The end of one request does not remove entries of another one at the same pod."""
    speculation.assume("first", A, KEYS, 0.0)
    speculation.assume("second", A, KEYS[:2], 0.5)
    speculation.settle("first", 1.0, 0.0)
    assert speculation.held(1.1) == [0, 1]


def test_the_last_blocks_event_confirms_a_request(speculation: Speculated) -> None:
    """Confirmed entries end for all requests, so that a later removal takes effect."""
    speculation.assume("first", A, KEYS, 0.0)
    speculation.assume("second", A, KEYS, 0.0)
    speculation.stored(A, KEYS[:2].tolist(), 0.1)
    assert speculation.held(0.1) == [0, 1, 2]
    speculation.stored(A, KEYS[2:].tolist(), 0.2)
    assert len(speculation) == 0
    assert speculation.held(0.2) == []
    speculation.assume("third", A, KEYS, 0.3)
    speculation.settle("first", 0.3, 0.0)
    assert speculation.held(0.4) == [0, 1, 2]


def test_one_request_less_leaves_the_others_to_be_confirmed(speculation: Speculated) -> None:
    """Of several requests for the same blocks the event confirms those that still wait."""
    for request_id in ("gone", "r", "s"):
        speculation.assume(request_id, A, KEYS, 0.0)
    speculation.settle("gone", 0.0, 0.5)
    assert speculation.held(0.5) == [0, 1, 2]
    speculation.stored(A, KEYS[2:].tolist(), 0.6)
    assert speculation.held(0.6) == []
    assert len(speculation) == 0


def test_prefill_and_decode_pods_both_have_entries(speculation: Speculated) -> None:
    """One request may have entries at several pods, which end separately."""
    speculation.assume("r", A, KEYS, 0.0)
    speculation.assume("r", B, KEYS[:1], 0.0)
    assert (speculation.held(0.1), speculation.held(0.1, B)) == ([0, 1, 2], [0])
    speculation.drop_pod(A)
    assert (speculation.held(0.1), speculation.held(0.1, B)) == ([], [0])


def test_the_oldest_requests_make_room() -> None:
    """Above the bound the entries of the oldest requests end as a whole."""
    speculation = Speculated(max_entries=5)
    speculation.assume("old", A, keys_of([1, 2, 3]), 0.0)
    speculation.assume("new", A, KEYS, 0.1)
    assert len(speculation) == 3
    assert speculation.held(0.1) == [0, 1, 2]
    speculation.assume("huge", A, keys_of(range(100, 110)), 0.2)
    assert len(speculation) == 0


def test_expired_entries_make_room_first() -> None:
    """Entries of a waiting request are kept while others have expired."""
    speculation = Speculated(max_entries=5)
    speculation.assume("waits", B, KEYS[:2], 0.0)
    speculation.assume("over", A, KEYS, 0.1)
    speculation.settle("over", 0.1, 0.05)
    speculation.assume("new", A, KEYS, 0.2)
    assert (speculation.held(0.2), speculation.held(0.2, B)) == ([0, 1, 2], [0, 1])


some_keys = st.lists(st.sampled_from([*KEYS.tolist(), 99]), unique=True).map(keys_of)
operations = st.one_of(
    st.tuples(st.just("assume"), st.sampled_from("rst"), st.sampled_from([A, B]), some_keys),
    st.tuples(st.just("settle"), st.sampled_from("rst"), st.just(0.05)),
    st.tuples(st.just("stored"), st.sampled_from([A, B]), some_keys),
    st.tuples(st.just("drop_pod"), st.sampled_from([A, B])),
)


@given(st.lists(st.tuples(operations, st.floats(0, 3)), max_size=40))
def test_nothing_is_left_behind(history: list[tuple[tuple[object, ...], float]]) -> None:
    """After any history the index has exactly the entries of the requests, and none a minute later."""
    speculation, fresh = Speculated(max_entries=12), Speculated(max_entries=12)
    now_s = 0.0
    for (name, *arguments), pause_s in history:
        now_s += pause_s
        with_time = {"assume": [*arguments, now_s], "stored": [*arguments, now_s]}
        if name == "settle":
            arguments.insert(1, now_s)
        getattr(speculation, str(name))(*with_time.get(str(name), arguments))
        copies = speculation.index.copies
        assert len(speculation) == copies.total() <= 12
        assert speculation.index.stats().holdings == len(+copies) == len(copies)
    speculation.expire(now_s + 60.0)
    assert len(speculation) == speculation.index.stats().blocks == 0
    assert items_within(speculation, but=speculation.index) == items_within(fresh, but=fresh.index)
