"""Stores that come before their parent: they wait, bounded, and lose nothing that is said meanwhile."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.wire.events import BlockRemoved
from tests.unit.indexer_support import OnePod, stored

TOKENS = list(range(100, 124))


def block(number: int) -> list[int]:
    """Tokens of the n-th block, from 0."""
    return TOKENS[number * 4 : number * 4 + 4]


def test_an_orphan_attaches_when_its_parent_comes() -> None:
    """A child is no hit while its parent is unknown, and counts once it is not."""
    pod = OnePod()
    assert not pod.apply(stored([2], block(1), parent=1)).stored
    assert pod.view.orphans == 1
    assert len(pod.apply(stored([1], block(0))).stored) == 2
    assert (pod.cached(TOKENS), pod.view.orphans) == (2, 0)


@given(st.permutations(range(6)))
@settings(deadline=None)
def test_a_chain_comes_together_in_any_order(order: list[int]) -> None:
    """Whatever the order in which a chain's blocks are told, all are found in the end."""
    pod = OnePod()
    for number in order:
        pod.apply(stored([number + 1], block(number), parent=number or None))
    assert (pod.cached(TOKENS), pod.view.orphans) == (6, 0)


def test_long_texts_of_orphans_count_against_their_bound() -> None:
    """Names, salts and extra keys as long as a message leave no room for more orphans than their bytes."""
    long = "x" * 1000
    for fields in (
        {"lora_name": long},
        {"cache_salt": long},
        {"medium": long},
        {"extra_keys": [[long]]},
    ):
        pod = OnePod(orphan_tokens_per_pod=10_000)
        for number in range(100):
            pod.apply(stored([number + 1], block(1), parent=1000 + number, **fields))
        assert 1 <= pod.view.orphans <= 10, fields


def test_what_is_said_about_an_orphan_is_not_lost() -> None:
    """A removal, and a copy in host memory, of a block that waits take effect when it attaches."""
    pod = OnePod()
    pod.apply(stored([2, 3], block(1) + block(2), parent=1))
    pod.apply(BlockRemoved([3]), stored([2], [], medium="CPU", block_size=0), BlockRemoved([2]))
    pod.apply(stored([1], block(0)))
    assert pod.tiers(TOKENS) == {"gpu": 1, "cpu": 1}
    assert pod.index.stats().blocks == 2


def test_orphans_are_bounded() -> None:
    """When too many tokens wait the oldest store is dropped, and told; the youngest still attach."""
    pod = OnePod(orphan_tokens_per_pod=32)
    pod.apply(stored([11], block(1), parent=1), stored([12], block(2), parent=1))
    assert pod.apply(stored([13], block(3), parent=1)).skipped == {("BlockStored", "orphan_dropped"): 1}
    assert pod.view.orphans == 2
    assert len(pod.apply(stored([1], block(0))).stored) == 3


def test_removals_of_orphans_are_bounded_too() -> None:
    """Endless talk about one waiting block does not grow memory: the block is dropped, and that is told."""
    pod = OnePod(orphan_tokens_per_pod=64)
    pod.apply(stored([2], block(1), parent=1))
    skipped: Counter[tuple[str, str]] = Counter()
    for _ in range(10):
        skipped += pod.apply(BlockRemoved([2])).skipped
    assert pod.view.orphans == 0
    assert skipped["BlockStored", "orphan_dropped"] == 1


def test_an_orphan_that_is_too_long_to_wait_is_dropped() -> None:
    """A single store beyond the bound does not stay."""
    pod = OnePod(orphan_tokens_per_pod=4)
    pod.apply(stored([2, 3], block(1) + block(2), parent=1))
    assert pod.view.orphans == 0
