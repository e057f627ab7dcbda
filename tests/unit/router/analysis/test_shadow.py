"""Caches and picks of other policies, against simple oracles."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.analysis.hot_prefixes import HotPrefixes
from router.analysis.shadow import LEAST_REQUESTS, OURS, ROUND_ROBIN, Blocks, Shadow, ShadowCache
from tests.support.depth import examples

BLOCK = 16
PODS = ("a", "b", "c")


def keys(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return block keys."""
    return np.array(numbers, np.uint64)


class PlainCache:
    """Oracle: blocks with the time of their last use, of which the lowest goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, int] = {}
        self.clock = count()

    def serve(self, names: list[int]) -> int:
        """Return the hits of a request that runs alone, and store its blocks."""
        hits = 0
        while hits < len(names) and names[hits] in self.used:
            hits += 1
        for room in (self.capacity - 1, self.capacity):
            for name in reversed(names):
                self.used[name] = next(self.clock)
            while len(self.used) > max(0, room):
                del self.used[min(self.used, key=self.used.__getitem__)]
        return hits


# Prompts as paths in a tree: a block's name tells all before it.
prompts = st.lists(st.integers(0, 2), max_size=6).map(
    lambda path: [hash(tuple(path[: at + 1])) for at in range(len(path))]
)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 12), st.lists(prompts, max_size=40))
def test_a_cache_hits_what_the_plain_one_hits(capacity: int, served: list[list[int]]) -> None:
    """For any requests, one after the other, hits are those of a plain cache that evicts tails first."""
    cache, plain = ShadowCache(), PlainCache(capacity)
    for names in served:
        assert cache.begin(names, len(names), capacity) == plain.serve(names)
        cache.end(names, capacity)
        assert len(cache.blocks) <= capacity


def test_policies_place_as_they_are_named() -> None:
    """Round-robin takes pods in turn, least requests the one with fewest in flight, ours the picked one."""
    shadow = Shadow(BLOCK)
    shadow.resize(dict.fromkeys(PODS, 1600))
    flights = [shadow.begin("m", PODS, "b", Blocks(1, keys(1, 2), 40, 0)) for _ in range(4)]
    assert [flight.pods[ROUND_ROBIN] for flight in flights] == ["a", "b", "c", "a"]
    assert {flight.pods[OURS] for flight in flights} == {"b"}
    shadow.end(flights[1], 1)
    assert shadow.begin("m", PODS, "b", Blocks(1, keys(1, 2), 40, 0)).pods[LEAST_REQUESTS] == "b"
    assert [flight.computed[OURS] for flight in flights] == [40, 8, 8, 8]
    assert [flight.computed[ROUND_ROBIN] for flight in flights] == [40, 40, 40, 8]


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached to its end computes its last block again."""
    shadow = Shadow(BLOCK)
    shadow.resize({"a": 1600})
    for expected in (32, 16):
        flight = shadow.begin("m", ("a",), "a", Blocks(1, keys(1, 2), 32, 0))
        assert flight.computed[OURS] == expected
        shadow.end(flight, 1)


@pytest.mark.parametrize(("held", "computed"), [(4, 8), (2, 40)])
def test_an_answer_is_cached_if_a_pod_was_seen_to_hold_it(held: int, computed: int) -> None:
    """The next turn finds its last answer at the pod that computed it, unless its blocks were never held."""
    shadow = Shadow(BLOCK)
    shadow.resize({"a": 1600})
    flight = shadow.begin("m", ("a",), "a", Blocks(7, keys(1, 2), 32, 0))
    shadow.end(flight, 33)
    again = shadow.begin("m", ("a",), "a", Blocks(7, keys(1, 2, 3, 4), 72, held))
    assert again.computed[OURS] == computed


def test_the_sample_keeps_all_caches_within_their_bound() -> None:
    """Fleets beyond the bound get coarser blocks, then fewer sessions; a pod of unknown size is left out."""
    shadow = Shadow(BLOCK, blocks_max=300)
    shadow.resize({"a": 100 * BLOCK})
    assert shadow.sample == 1.0
    shadow.resize(dict.fromkeys(PODS, 100_000 * BLOCK))
    assert shadow.sample == pytest.approx(16 * 300 / 900_000)
    total, sampled = 2000, 0
    for session in range(total):
        number = hash((session, "x")) % (1 << 64)
        flight = shadow.begin("m", PODS, "a", Blocks(number, keys(*range(64)), 1024, 0))
        sampled += bool(flight.computed)
        shadow.end(flight, 1)
    assert 0 < sampled < total // 50
    assert not shadow.begin("m", ("z",), "z", Blocks(0, keys(1), 20, 0)).computed


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 8), max_size=200))
def test_heavy_prefixes_are_kept_and_never_overcounted(begun: list[int]) -> None:
    """A prefix shows at most the sessions that began with it, and all of them while there is room."""
    hot, entries = HotPrefixes(BLOCK, b"k", entries_max=4), 4
    for prefix in begun:
        hot.began(keys(*(100 * prefix + at for at in range(6))), 5)
    page = hot.page(lambda found: [str(int(found[-1]) // 100)])
    for shown in page["prefixes"]:
        assert shown["hits"] <= begun.count(int(shown["pods"][0]))
        assert shown["tokens"] == 5 * BLOCK
    if len(set(begun)) <= entries:
        expected = {str(prefix) for prefix in set(begun) if begun.count(prefix) > 1}
        assert {shown["pods"][0] for shown in page["prefixes"]} == expected
