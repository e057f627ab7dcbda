"""Engine blocks shorter than the index's: an index block is held while all its parts are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.events import AllBlocksCleared, BlockRemoved, BlockStored
from indexer.extras import MultimodalItem, extras_of_prompt
from indexer.part_runs import PARTS_MAX
from tests.unit.indexer_support import POD, OnePod, stored

TOKENS = list(range(1000, 1000 + 256))


def part(number: int, **fields: Any) -> BlockStored:
    """The n-th engine block of 16 tokens, from 0, in an event of its own; its hash is n + 1."""
    tokens = fields.pop("tokens", TOKENS[number * 16 : number * 16 + 16])
    return stored([number + 1], tokens, parent=number or None, block_size=16, **fields)


@pytest.fixture
def pod() -> OnePod:
    """A pod with engine blocks of 16 tokens in an index of 64."""
    return OnePod(block_tokens=64)


def test_parts_in_one_event_make_whole_blocks(pod: OnePod) -> None:
    """A run of 9 engine blocks holds two index blocks; the ninth waits for its neighbours."""
    applied = pod.apply(stored(list(range(1, 10)), TOKENS[:144], block_size=16))
    assert applied.stored[0].tolist() == pod.keys(TOKENS[:144]).tolist()
    assert pod.cached(TOKENS) == 2


def test_parts_in_events_of_their_own_make_whole_blocks(pod: OnePod) -> None:
    """One engine block an event: the index block is stored with its last part."""
    told = [sum(map(len, pod.apply(part(number)).stored)) for number in range(8)]
    assert told == [0, 0, 0, 1, 0, 0, 0, 1]
    assert pod.cached(TOKENS) == 2


@given(st.permutations(range(8)))
@settings(deadline=None)
def test_parts_may_come_in_any_order(order: list[int]) -> None:
    """Whatever the order, all index blocks are held in the end and nothing waits."""
    pod = OnePod(block_tokens=64)
    pod.apply(*map(part, order))
    assert (pod.cached(TOKENS), pod.view.orphans) == (2, 0)


@pytest.mark.parametrize("gone", range(4))
def test_a_removed_part_ends_its_index_block(pod: OnePod, gone: int) -> None:
    """Evicting any part ends the block; when it comes again the block is held again."""
    pod.apply(*map(part, range(8)))
    assert pod.apply(BlockRemoved([gone + 1])).removals == {"last": 1}
    assert pod.cached(TOKENS) == 0
    pod.apply(part(gone))
    assert pod.cached(TOKENS) == 2


def test_a_part_with_two_copies_needs_two_removals(pod: OnePod) -> None:
    """Copies are counted for each part."""
    pod.apply(*map(part, range(4)), part(2))
    assert pod.apply(BlockRemoved([3])).removals == {"copy": 1}
    assert pod.cached(TOKENS) == 1
    pod.apply(BlockRemoved([3]))
    assert pod.cached(TOKENS) == 0


def test_a_part_is_shared_by_all_blocks_that_it_begins(pod: OnePod) -> None:
    """Two prompts that part within an index block depend on the same first parts."""
    other = [7] * 16
    pod.apply(*map(part, range(4)), stored([44], other, parent=3, block_size=16))
    branch = TOKENS[:48] + other
    assert (pod.cached(TOKENS), pod.cached(branch)) == (1, 1)
    pod.apply(BlockRemoved([1]))
    assert (pod.cached(TOKENS), pod.cached(branch)) == (0, 0)
    pod.apply(BlockRemoved([44]), part(0))
    assert (pod.cached(TOKENS), pod.cached(branch)) == (1, 0)


def test_a_block_lies_in_the_slowest_tier_of_its_parts(pod: OnePod) -> None:
    """Each part counts in its best tier, the index block where its slowest part lies."""
    pod.apply(*map(part, range(4)))
    pod.apply(stored([1, 2, 3, 4], [], block_size=0, medium="CPU"))
    assert pod.tiers(TOKENS) == {"gpu": 1}
    pod.apply(BlockRemoved([2], "GPU"))
    assert pod.tiers(TOKENS) == {"cpu": 1}
    pod.apply(BlockRemoved([1], "CPU"))
    assert pod.tiers(TOKENS) == {"cpu": 1}
    pod.apply(BlockRemoved([1], "GPU"))
    assert pod.index.stats().blocks == 0


def test_sizes_are_not_mixed_within_a_life(pod: OnePod) -> None:
    """An engine has one block size; another one is told, and a new life may have it."""
    pod.apply(part(0))
    assert pod.apply(stored([9], TOKENS[:64], block_size=64)).skipped == {("BlockStored", "block_size"): 1}
    assert pod.apply(stored([9], TOKENS[:32], block_size=32)).skipped == {("BlockStored", "block_size"): 1}
    pod.view.clear()
    pod.apply(stored([9], TOKENS[:64], block_size=64))
    assert pod.cached(TOKENS) == 1


def test_a_clear_forgets_half_blocks(pod: OnePod) -> None:
    """Parts from before a clear do not complete blocks after it."""
    pod.apply(*map(part, range(3)), AllBlocksCleared())
    pod.apply(part(3))
    assert (pod.cached(TOKENS), pod.view.orphans, pod.index.stats().blocks) == (0, 1, 0)


def test_parts_are_bounded() -> None:
    """A part that is given up takes its index block with it; what is remembered stays small."""
    pod = OnePod(block_tokens=64, engine_hashes_per_pod=6, released_hashes_per_pod=2)
    applied = pod.apply(*map(part, range(8)))
    assert applied.skipped == {("BlockStored", "too_many_hashes"): 2}
    assert pod.index.stats().blocks == 1
    pod.apply(BlockRemoved(list(range(1, 9))))
    assert pod.index.stats().blocks == 0


def test_parts_have_a_bound_of_their_own() -> None:
    """Engine blocks of one token cannot take more memory than that of the parts' bound."""
    pod = OnePod(block_tokens=4)
    hashes = list(range(1, PARTS_MAX + 1001))
    applied = pod.apply(stored(hashes, [7] * len(hashes), block_size=1))
    assert applied.skipped == {("BlockStored", "too_many_hashes"): 1000}


def test_extras_of_parts_are_bounded() -> None:
    """A part whose extra keys are longer than any real ones is not held, and the store is counted."""
    pod = OnePod(block_tokens=64)
    applied = pod.apply(stored([1], list(range(16)), block_size=16, extra_keys=[[["x" * 5000, 0]]]))
    assert applied.skipped == {("BlockStored", "extra_keys"): 1}


def test_hashes_in_a_ring_end(pod: OnePod) -> None:
    """An engine that reuses hashes so that each continues the other cannot make us run in circles."""
    for first, second in [*pairwise([1, 2, 3, 1, 2, 3, 1])] * 3:
        pod.apply(
            stored([second], [second] * 16, parent=first, block_size=16),
            stored([first], [first] * 16, block_size=16),
        )
    pod.apply(BlockRemoved([1, 2, 3]), BlockRemoved([3, 2, 1]))
    assert pod.index.stats().blocks == 0


def test_salts_adapters_and_images_reach_the_whole_index_block(pod: OnePod) -> None:
    """What the first part depends on the block depends on; an image counts where it begins."""
    image = [MultimodalItem("image", 20, 30)]
    pod.apply(
        part(0, extra_keys=[["sql", "tenant"]], lora_id=1, lora_name="sql"),
        part(1, extra_keys=[["sql", ["image", 4]]], lora_id=1, lora_name="sql"),
        part(2, extra_keys=[["sql", ["image", -12]]], lora_id=1, lora_name="sql"),
        part(3, extra_keys=[["sql", ["image", -28]]], lora_id=1, lora_name="sql"),
    )
    found = pod.match(pod.keys(TOKENS, "sql", "tenant", extras_of_prompt(image, 64, len(TOKENS))))
    assert found.blocks == 1
    assert pod.cached(TOKENS, "sql", "tenant") == 0


PARTS = 12
steps = st.one_of(
    st.tuples(st.just("store"), st.integers(0, PARTS - 1), st.sampled_from(["GPU", "CPU"])),
    st.tuples(st.just("remove"), st.integers(0, PARTS - 1), st.sampled_from(["GPU", "CPU"])),
)


@pytest.mark.parametrize("flat", [False, True])
@given(st.lists(steps, max_size=60))
@settings(deadline=None)
def test_blocks_are_held_exactly_while_all_their_parts_are(
    flat: bool, history: list[tuple[str, int, str]]
) -> None:
    """Against a naive mirror: copies of each part, and an index block where its slowest part lies best."""
    pod = OnePod(block_tokens=64, flat=flat)
    pod.apply(*map(part, range(PARTS)), BlockRemoved(list(range(1, PARTS + 1))))
    copies = [{"GPU": 0, "CPU": 0} for _ in range(PARTS)]
    for step, number, medium in history:
        if step == "store":
            copies[number][medium] += 1
            pod.apply(part(number, medium=medium))
        elif copies[number][medium]:
            copies[number][medium] -= 1
            pod.apply(BlockRemoved([number + 1], medium))
    expected = []
    for block in range(PARTS // 4):
        best = [
            "gpu" if held["GPU"] else "cpu" if held["CPU"] else ""
            for held in copies[block * 4 : block * 4 + 4]
        ]
        expected.append(0 if "" in best else 1 << pod.index.tiers.number("cpu" if "cpu" in best else "gpu"))
    assert pod.index.held(pod.keys(TOKENS[: PARTS * 16]), POD).tolist() == expected
