"""Orphans: stores before their parent wait within a limit, and later changes are kept."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.wire.events import BlockRemoved
from tests.support.indexer.views import OnePod, stored

TOKENS = list(range(100, 124))


def block(number: int) -> list[int]:
    """Return the tokens of the n-th block, from 0."""
    return TOKENS[number * 4 : number * 4 + 4]


def test_an_orphan_attaches_when_its_parent_is_stored() -> None:
    """An orphan counts as cached as soon as its parent is stored, not before."""
    pod = OnePod()
    assert not pod.apply(stored([2], block(1), parent=1)).stored
    assert pod.view.orphans == 1
    assert len(pod.apply(stored([1], block(0))).stored) == 2
    assert (pod.cached(TOKENS), pod.view.orphans) == (2, 0)


@given(st.permutations(range(6)))
@settings(deadline=None)
def test_a_chain_is_complete_after_any_order(order: list[int]) -> None:
    """A chain whose blocks are stored in any order is completely cached in the end."""
    pod = OnePod()
    for number in order:
        pod.apply(stored([number + 1], block(number), parent=number or None))
    assert (pod.cached(TOKENS), pod.view.orphans) == (6, 0)


def test_long_texts_of_orphans_count_against_their_bound() -> None:
    """Long names, salts and extra keys count against the limit by their bytes."""
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


def test_changes_of_an_orphan_are_kept() -> None:
    """A removal or host copy of an orphan's block takes effect when the orphan attaches."""
    pod = OnePod()
    pod.apply(stored([2, 3], block(1) + block(2), parent=1))
    pod.apply(BlockRemoved([3]), stored([2], [], medium="CPU", block_size=0), BlockRemoved([2]))
    pod.apply(stored([1], block(0)))
    assert pod.tiers(TOKENS) == {"gpu": 1, "cpu": 1}
    assert pod.index.stats().blocks == 2


def test_copies_of_orphans_are_counted_in_order() -> None:
    """Of a block that was stored twice before its parent, and removed twice, no copy is left."""
    pod = OnePod()
    pod.apply(stored([2], block(1), parent=1), stored([2, 3], block(1) + block(2), parent=1))
    pod.apply(BlockRemoved([2]), BlockRemoved([3]), BlockRemoved([2]))
    pod.apply(stored([1], block(0)))
    assert pod.cached(TOKENS) == 1


def test_removals_of_unseen_copies_remove_no_later_store() -> None:
    """A stream joined late removes copies that it did not show; these are not taken from a new store."""
    pod = OnePod()
    pod.apply(stored([2], block(1), parent=1), BlockRemoved([2]), BlockRemoved([2]))
    outcome = pod.apply(stored([1, 2], block(0) + block(1)))
    assert outcome.skipped == {("BlockRemoved", "unknown_hash"): 1}
    assert pod.cached(TOKENS) == 2


def test_orphans_are_bounded() -> None:
    """Above the limit the oldest orphan is dropped and counted; newer ones still attach."""
    pod = OnePod(orphan_tokens_per_pod=32)
    pod.apply(stored([11], block(1), parent=1), stored([12], block(2), parent=1))
    assert pod.apply(stored([13], block(3), parent=1)).skipped == {("BlockStored", "orphan_dropped"): 1}
    assert pod.view.orphans == 2
    assert len(pod.apply(stored([1], block(0))).stored) == 3


def test_removals_of_orphans_are_bounded_too() -> None:
    """Too many changes of one orphan drop it, and the drop is counted."""
    pod = OnePod(orphan_tokens_per_pod=64)
    pod.apply(stored([2], block(1), parent=1))
    skipped: Counter[tuple[str, str]] = Counter()
    for _ in range(10):
        skipped += pod.apply(BlockRemoved([2])).skipped
    assert pod.view.orphans == 0
    assert skipped["BlockStored", "orphan_dropped"] == 1


def test_an_orphan_that_is_too_long_to_wait_is_dropped() -> None:
    """A single store above the limit is dropped."""
    pod = OnePod(orphan_tokens_per_pod=4)
    pod.apply(stored([2, 3], block(1) + block(2), parent=1))
    assert pod.view.orphans == 0
