"""Causes of hits and misses: the split of a prompt, and the index's memory of lost blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.config import PodStream, engine_name
from indexer.index import layout
from indexer.index.contract import Cause, Limit, PodMatches, split_prompt
from indexer.index.index import FlatIndex
from indexer.streams.engine_registry import EngineRegistry
from indexer.views.block_cache import BlockCache
from indexer.views.hybrid import group_holder
from indexer.wire.tiers import GPU_TIER, SPECULATIVE_TIER, Tiers

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
BLOCK_TOKENS = 4
# Blocks of a prompt of 26 tokens; the last two tokens fill none.
KEYS = np.arange(101, 107, dtype=np.uint64)
PROMPT_TOKENS = 26
PARTIAL = {Cause.PARTIAL_BLOCK: 2}
LIMITS = st.builds(Limit, st.booleans(), st.sampled_from([None, Cause.WINDOW, Cause.CHECKPOINT]))


def made(capacity_blocks: int = 1000) -> FlatIndex:
    """Return an empty index."""
    return FlatIndex(1 << 20, Tiers(), capacity_blocks=capacity_blocks)


def cache(index: FlatIndex, pod: str, blocks: int = len(KEYS)) -> BlockCache:
    """Return a pod's cache with the first blocks, named 1, 2 and so on."""
    held = BlockCache(index, pod, "m")
    held.store(range(1, blocks + 1), KEYS[:blocks], GPU_TIER)
    return held


def split(index: FlatIndex, pods: tuple[str, ...] = (A,), limit: Limit = Limit()) -> dict[str, int]:  # noqa: B008 (immutable)
    """Return the prompt's tokens by cause at the first pod."""
    return split_prompt(index.match(KEYS, pods), pods[0], PROMPT_TOKENS, BLOCK_TOKENS, limit)


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=4),
    behind=st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 9)),
    strides=st.integers(1, 4),
    prompt_tokens=st.integers(0, 90),
    limit=LIMITS,
    other=st.integers(0, 20),
)
def test_the_parts_sum_up_to_the_prompt(
    rows: list[tuple[int, int]],
    behind: tuple[int, int, int],
    strides: int,
    prompt_tokens: int,
    limit: Limit,
    other: int,
) -> None:
    """Whatever the match is, the parts are positive, and their sum is the prompt's length."""
    served = np.array([first for first, _ in rows], np.int32)
    match = PodMatches(
        {str(row): row for row in range(len(rows))},
        Tiers(),
        served,
        np.zeros((len(rows), len(Tiers().names)), np.int32),
        strides=np.full(len(rows), strides, np.int32),
        held=served + np.array([more for _, more in rows], np.int32),
        behind=behind,
    )
    parts = split_prompt(match, "0", prompt_tokens, BLOCK_TOKENS, limit, other)
    assert sum(parts.values()) == prompt_tokens
    assert all(tokens > 0 for tokens in parts.values())
    servable = max(0, prompt_tokens - 1) // BLOCK_TOKENS
    hit = min(rows[0][0], servable)
    assert parts.get(Cause.HIT, 0) == (hit - hit % strides) * BLOCK_TOKENS


def test_removed_blocks_are_evicted() -> None:
    """Blocks that the last pod removed count as evicted, at the second of their removal."""
    index = made()
    held = cache(index, A)
    index.set_time(77.5)
    for name in (4, 5, 6):
        held.drop(name, GPU_TIER)
    assert split(index) == {Cause.HIT: 12, Cause.EVICTED: 12, **PARTIAL}
    assert index.match(KEYS, (A,)).behind == [3, 6, 77]
    assert (index.lost_s(int(KEYS[3])), index.lost_s(int(KEYS[0]))) == (77, None)


def test_blocks_behind_a_hole_are_evicted() -> None:
    """Blocks that are still held behind a removed one are lost with it."""
    index = made()
    cache(index, A).drop(3, GPU_TIER)
    assert split(index) == {Cause.HIT: 8, Cause.EVICTED: 16, **PARTIAL}


@pytest.mark.parametrize("pods", [(A,), (A, B)], ids=["not_a_candidate", "candidate"])
def test_blocks_of_another_pod_are_elsewhere(pods: tuple[str, ...]) -> None:
    """Blocks that only another pod holds are elsewhere, whether it was a candidate or not."""
    index = made()
    cache(index, A, 2)
    cache(index, B, 5)
    assert split(index, pods) == {Cause.HIT: 8, Cause.ELSEWHERE: 12, Cause.NEVER_CACHED: 4, **PARTIAL}


@pytest.mark.parametrize("holders", [1, 6], ids=["few", "row"])
@pytest.mark.parametrize("swept", [False, True])
def test_blocks_of_a_removed_pod_are_evicted(holders: int, swept: bool) -> None:
    """Blocks are lost with their last pod at once, at the second at which that was cleared."""
    index = made()
    pods = [f"10.0.1.{number}:8000" for number in range(holders)]
    for pod in pods:
        cache(index, pod)
    for second, pod in enumerate(pods, 50):
        index.set_time(second)
        index.clear_pod(pod)
    index.set_time(99)
    if swept:
        index.sweep()
    assert split(index) == {Cause.EVICTED: 24, **PARTIAL}
    lost_s = index.match(KEYS, (A,)).behind[2]
    # Of several pods that are swept at once, any may be the last one remembered.
    assert lost_s in range(50, 50 + holders)


def test_blocks_of_other_layers_are_not_held() -> None:
    """A block that only another cache group of a pod still holds is evicted, not elsewhere."""
    index = made()
    lead = cache(index, A)
    cache(index, group_holder(A, 1))
    for name in range(1, 7):
        lead.drop(name, GPU_TIER)
    assert split(index) == {Cause.EVICTED: 24, **PARTIAL}


def test_blocks_evicted_from_a_full_index_are_evicted() -> None:
    """What the index itself evicted, because it was full, counts as evicted."""
    index = made(capacity_blocks=len(KEYS))
    cache(index, A)
    index.add(B, GPU_TIER, KEYS[:2] + np.uint64(1000))
    assert split(index) == {Cause.HIT: 16, Cause.EVICTED: 8, **PARTIAL}


def test_expired_speculation_was_never_cached() -> None:
    """Blocks that were only assumed are not remembered."""
    index = made()
    index.add(A, SPECULATIVE_TIER, KEYS)
    index.remove(A, SPECULATIVE_TIER, KEYS)
    assert split(index) == {Cause.NEVER_CACHED: 24, **PARTIAL}


def test_an_overwritten_loss_reads_as_never_cached() -> None:
    """The memory of lost blocks is bounded: a later loss in the same place replaces an earlier one."""
    index = made()
    held = cache(index, A)
    for name in range(1, 7):
        held.drop(name, GPU_TIER)
    held.store(range(11, 17), KEYS + np.uint64(layout.LOST_KEYS), GPU_TIER)
    for name in range(11, 17):
        held.drop(name, GPU_TIER)
    assert split(index) == {Cause.NEVER_CACHED: 24, **PARTIAL}


def test_a_new_prompt_is_not_looked_up_to_its_end() -> None:
    """Behind eight unknown blocks nothing is looked up."""
    index = made()
    keys = np.arange(201, 221, dtype=np.uint64)
    held = BlockCache(index, A, "m")
    held.store([1, 2], keys[[8, 17]], GPU_TIER)
    held.drop(1, GPU_TIER)
    held.drop(2, GPU_TIER)
    assert index.match(keys, (A,)).behind[1] == 0
    held.store([1], keys[7:8], GPU_TIER)
    held.drop(1, GPU_TIER)
    assert index.match(keys, (A,)).behind[1] == 9


@pytest.mark.parametrize(
    ("limit", "held", "causes"),
    [
        (Limit(drops=True), 3, {Cause.HIT: 8, Cause.DRAFTER: 4}),
        (Limit(groups=Cause.WINDOW), 5, {Cause.HIT: 8, Cause.WINDOW: 12}),
        (Limit(groups=Cause.CHECKPOINT), 5, {Cause.HIT: 8, Cause.CHECKPOINT: 12}),
        (Limit(True, Cause.WINDOW), 5, {Cause.HIT: 8, Cause.DRAFTER: 4, Cause.WINDOW: 8}),
    ],
)
def test_held_blocks_that_are_not_served_have_the_engines_reason(
    limit: Limit, held: int, causes: dict[str, int]
) -> None:
    """Between hit and held prefix, a drafter takes one block, and layers of another kind the rest."""
    table = made().match(KEYS, (A,))
    served, more = np.array([2], np.int32), np.array([held], np.int32)
    match = PodMatches(table.rows, table.tiers, served, table.blocks_by_tier, held=more, behind=(held, 0, 0))
    parts = split_prompt(match, A, PROMPT_TOKENS, BLOCK_TOKENS, limit)
    never = {Cause.NEVER_CACHED: 24 - held * BLOCK_TOKENS}
    assert parts == {**causes, **never, **PARTIAL}


def test_blocks_of_another_rank_are_elsewhere() -> None:
    """Blocks that another rank of the same pod holds than the chosen one are elsewhere."""
    registry, index = EngineRegistry(), made()
    for rank in (0, 1):
        registry.add(PodStream(A, "m", None, rank=rank))
    cache(index, A, 5)
    cache(index, engine_name(A, 1), 2)
    table = index.match(KEYS, registry.holders((A,)))
    # Rank 0 is too busy to be chosen.
    match = registry.of_pods(table, (A,), {A: 1000}, BLOCK_TOKENS)
    assert match.ranks == {A: 1}
    parts = split_prompt(match, A, PROMPT_TOKENS, BLOCK_TOKENS, Limit())
    assert parts == {Cause.HIT: 8, Cause.ELSEWHERE: 12, Cause.NEVER_CACHED: 4, **PARTIAL}


def test_blocks_under_another_scope_are_told() -> None:
    """Tokens that are held under another salt or adapter are other_scope, up to where those end."""
    match = made().match(KEYS, (A,))
    parts = split_prompt(match, A, PROMPT_TOKENS, BLOCK_TOKENS, Limit(), 4)
    assert parts == {Cause.OTHER_SCOPE: 16, Cause.NEVER_CACHED: 8, **PARTIAL}


def test_larger_blocks_of_the_engine_leave_a_longer_tail() -> None:
    """Tokens that fill no whole block of the engine are in a partial block."""
    index = made()
    cache(index, A, 4)
    index.set_stride(A, 4)
    assert split(index) == {Cause.HIT: 16, Cause.PARTIAL_BLOCK: 10}
