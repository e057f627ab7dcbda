"""Partial blocks: engine blocks shorter than index blocks; the last part decides whether a block is held."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.keys import MultimodalItem, extras_of_prompt
from indexer.views.runs import PARTIAL_BLOCKS_MAX
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.indexer.views import POD, OnePod, stored

TOKENS = list(range(1000, 1000 + 256))


def part(number: int, **fields: Any) -> BlockStored:
    """Return a store of only the n-th engine block of 16 tokens, from 0; its hash is n + 1."""
    tokens = fields.pop("tokens", TOKENS[number * 16 : number * 16 + 16])
    return stored([number + 1], tokens, parent=number or None, block_size=16, **fields)


@pytest.fixture
def pod() -> OnePod:
    """Return a pod with engine blocks of 16 tokens and index blocks of 64."""
    return OnePod(block_tokens=64)


def test_parts_in_one_event_make_whole_blocks(pod: OnePod) -> None:
    """A run of 9 engine blocks gives two index blocks and one partial block."""
    applied = pod.apply(stored(list(range(1, 10)), TOKENS[:144], block_size=16))
    assert applied.stored[0].tolist() == pod.keys(TOKENS[:144]).tolist()
    assert pod.cached(TOKENS) == 2


def test_parts_in_events_of_their_own_make_whole_blocks(pod: OnePod) -> None:
    """With one engine block per event the index block is stored with its last part."""
    stored_blocks = [sum(map(len, pod.apply(part(number)).stored)) for number in range(8)]
    assert stored_blocks == [0, 0, 0, 1, 0, 0, 0, 1]
    assert pod.cached(TOKENS) == 2


@given(st.permutations(range(8)))
@settings(deadline=None)
def test_parts_may_arrive_in_any_order(order: list[int]) -> None:
    """After parts in any order all index blocks are held and no orphan is left."""
    pod = OnePod(block_tokens=64)
    pod.apply(*map(part, order))
    assert (pod.cached(TOKENS), pod.view.orphans) == (2, 0)


def test_the_last_part_ends_its_index_block(pod: OnePod) -> None:
    """Removing the last part removes the index block; storing it again restores the block."""
    pod.apply(*map(part, range(8)))
    assert pod.apply(BlockRemoved([4])).removals == {"last": 1}
    assert pod.cached(TOKENS) == 0
    pod.apply(part(3))
    assert pod.cached(TOKENS) == 2


@pytest.mark.parametrize("gone", range(3))
def test_removing_only_a_partial_block_keeps_the_index_block(pod: OnePod, gone: int) -> None:
    """Removing a partial block alone keeps the index block until its last part is removed."""
    pod.apply(*map(part, range(4)))
    assert pod.apply(BlockRemoved([gone + 1])).removals == {"last": 1}
    assert pod.cached(TOKENS) == 1
    pod.apply(BlockRemoved([4]))
    assert (pod.cached(TOKENS), pod.index.stats().blocks) == (0, 0)


@pytest.mark.parametrize("number", [2, 3])
def test_a_part_with_two_copies_needs_two_removals(pod: OnePod, number: int) -> None:
    """Copies are counted per part, including the last one."""
    pod.apply(*map(part, range(4)), part(number))
    assert pod.apply(BlockRemoved([number + 1])).removals == {"copy": 1}
    assert pod.cached(TOKENS) == 1
    assert pod.apply(BlockRemoved([number + 1])).removals == {"last": 1}
    assert pod.apply(BlockRemoved([number + 1])).skipped == {("BlockRemoved", "unknown_hash"): 1}
    assert pod.cached(TOKENS) == (number < 3)


def test_a_part_is_shared_by_all_blocks_that_it_begins(pod: OnePod) -> None:
    """Two prompts that diverge within an index block share its first parts."""
    other = [7] * 16
    pod.apply(*map(part, range(4)), stored([44], other, parent=3, block_size=16))
    branch = TOKENS[:48] + other
    assert (pod.cached(TOKENS), pod.cached(branch)) == (1, 1)
    pod.apply(BlockRemoved([44]))
    assert (pod.cached(TOKENS), pod.cached(branch)) == (1, 0)


def test_a_block_lies_in_the_tiers_of_its_last_part(pod: OnePod) -> None:
    """A block offloaded by hash has the tiers of its last part, whichever tier loses its copy first."""
    pod.apply(*map(part, range(4)))
    pod.apply(stored([1, 2, 3, 4], [], block_size=0, medium="CPU"))
    assert pod.tiers(TOKENS) == {"gpu": 1}
    pod.apply(BlockRemoved([4, 3, 2, 1], "GPU"))
    assert pod.tiers(TOKENS) == {"cpu": 1}
    pod.apply(BlockRemoved([4, 3, 2, 1], "CPU"))
    assert pod.index.stats().blocks == 0


def test_a_hash_reused_for_another_part_is_counted(pod: OnePod) -> None:
    """A reused hash replaces its old block, be it partial or the end of an index block."""
    pod.apply(*map(part, range(4)))
    assert pod.apply(stored([4], [9] * 16, block_size=16)).skipped == {("BlockStored", "hash_reused"): 1}
    assert (pod.cached(TOKENS), pod.index.stats().blocks) == (0, 0)
    again = pod.apply(stored([4], TOKENS[48:64], parent=3, block_size=16))
    assert again.skipped == {("BlockStored", "hash_reused"): 1}
    assert pod.cached(TOKENS) == 1
    assert pod.apply(stored([2], [9] * 16, block_size=16)).skipped == {("BlockStored", "hash_reused"): 1}


def test_sizes_are_not_mixed_within_an_epoch(pod: OnePod) -> None:
    """A second block size within an epoch is counted and skipped; a new epoch may have it."""
    pod.apply(part(0))
    assert pod.apply(stored([9], TOKENS[:64], block_size=64)).skipped == {("BlockStored", "block_size"): 1}
    assert pod.apply(stored([9], TOKENS[:32], block_size=32)).skipped == {("BlockStored", "block_size"): 1}
    pod.view.clear()
    pod.apply(stored([9], TOKENS[:64], block_size=64))
    assert pod.cached(TOKENS) == 1


def test_a_clear_removes_partial_blocks(pod: OnePod) -> None:
    """Parts stored before a clear do not complete blocks after it."""
    pod.apply(*map(part, range(3)), AllBlocksCleared())
    pod.apply(part(3))
    assert (pod.cached(TOKENS), pod.view.orphans, pod.index.stats().blocks) == (0, 1, 0)


def test_partial_blocks_are_bounded() -> None:
    """Above the limit partial blocks without copies are dropped first, then the oldest, which are counted."""
    pod = OnePod(block_tokens=64, engine_hashes_per_pod=6)
    first = pod.apply(*map(part, range(8)), BlockRemoved([2]), part(8))
    assert (first.skipped, pod.cached(TOKENS)) == ({}, 2)
    assert pod.apply(part(9)).skipped == {("BlockStored", "too_many_hashes"): 1}
    pod.apply(BlockRemoved(list(range(1, 11))))
    assert pod.index.stats().blocks == 0


def test_partial_blocks_have_a_fixed_limit() -> None:
    """With engine blocks of one token the fixed limit of partial blocks applies."""
    pod = OnePod(block_tokens=4)
    hashes = list(range(1, 4 * (PARTIAL_BLOCKS_MAX + 1000) // 3 + 1))
    applied = pod.apply(stored(hashes, [7] * len(hashes), block_size=1))
    assert applied.skipped == {("BlockStored", "too_many_hashes"): 1000}


def test_extras_of_parts_are_bounded() -> None:
    """A store with unrealistically long extra keys is skipped and counted."""
    pod = OnePod(block_tokens=64)
    applied = pod.apply(stored([1], list(range(16)), block_size=16, extra_keys=[[["x" * 5000, 0]]]))
    assert applied.skipped == {("BlockStored", "extra_keys"): 1}


def test_a_cycle_of_hashes_is_removed(pod: OnePod) -> None:
    """Reused hashes that continue each other leave no block once all are removed."""
    for first, second in [*pairwise([1, 2, 3, 1, 2, 3, 1])] * 3:
        pod.apply(
            stored([second], [second] * 16, parent=first, block_size=16),
            stored([first], [first] * 16, block_size=16),
        )
    pod.apply(BlockRemoved([1, 2, 3]), BlockRemoved([3, 2, 1]))
    assert pod.index.stats().blocks == 0


def test_salts_adapters_and_images_change_the_whole_index_block(pod: OnePod) -> None:
    """An index block depends on the extras of its first part; an image counts where it begins."""
    image = [MultimodalItem("image", 20, 30)]
    pod.apply(
        part(0, extra_keys=[["sql", "tenant"]], lora_id=1, lora_name="sql"),
        part(1, extra_keys=[["sql", ["image", 4]]], lora_id=1, lora_name="sql"),
        part(2, extra_keys=[["sql", ["image", -12]]], lora_id=1, lora_name="sql"),
        part(3, extra_keys=[["sql", ["image", -28]]], lora_id=1, lora_name="sql"),
    )
    found = pod.match(pod.keys(TOKENS, "sql", "tenant", extras_of_prompt(image, 64, len(TOKENS))))
    assert found.cached_blocks == 1
    assert pod.cached(TOKENS, "sql", "tenant") == 0


PARTS = 12
steps = st.one_of(
    st.tuples(st.just("store"), st.integers(0, PARTS - 1), st.sampled_from(["GPU", "CPU"])),
    st.tuples(st.just("remove"), st.integers(0, PARTS - 1), st.sampled_from(["GPU", "CPU"])),
)


@pytest.mark.parametrize("flat", [False, True])
@given(st.lists(steps, max_size=60))
@settings(deadline=None)
def test_blocks_are_held_exactly_while_their_last_parts_are(
    flat: bool, history: list[tuple[str, int, str]]
) -> None:
    """An index block is held in the tiers of its last part's copies, as in a naive model."""
    pod = OnePod(block_tokens=64, flat=flat)
    pod.apply(*map(part, range(PARTS)), BlockRemoved(list(range(1, PARTS + 1))))
    copies = [{"GPU": 0, "CPU": 0} for _ in range(PARTS)]
    for step, number, medium in history:
        if step == "store":
            copies[number][medium] += 1
            pod.apply(part(number, medium=medium))
        else:
            left = copies[number][medium] - 1
            applied = pod.apply(BlockRemoved([number + 1], medium))
            copies[number][medium] = max(0, left)
            expected = {} if left < 0 else {"copy": 1} if left else {"last": 1}
            assert applied.removals == expected
    number_of = pod.index.tiers.number
    expected = [
        (copies[last]["GPU"] > 0) << number_of("gpu") | (copies[last]["CPU"] > 0) << number_of("cpu")
        for last in range(3, PARTS, 4)
    ]
    assert pod.index.held(pod.keys(TOKENS[: PARTS * 16]), POD).tolist() == expected
