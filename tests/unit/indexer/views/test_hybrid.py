"""Hybrid attention: groups learned from events, blocks known by hashes, prefixes cut by rules."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.index.contract import Cause, Limit, split_prompt
from indexer.views.hybrid import group_holder, usable_blocks
from indexer.views.view_parts import GroupRule
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.indexer.decoding import decode_batch
from tests.support.indexer.views import POD, OnePod, read_lines, stored

TOKENS = list(range(100, 132))
FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
# Windows of 9 tokens: the 2 blocks of 4 before a prefix's end.
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}


def masked(hashes: list[int | bytes], tokens: list[int], **fields: Any) -> BlockStored:
    """Return a store of a few blocks with the tokens of the whole run."""
    return stored(hashes, tokens, **{**WINDOW, **fields})


@pytest.fixture
def pod() -> OnePod:
    """Return a pod with blocks of 4 tokens in engine and index."""
    return OnePod()


RUN3_FRAMES = read_lines("vllm_run3_frames.jsonl.gz")
RUN3_REQUESTS = [
    line for line in read_lines("vllm_run3_requests.jsonl.gz") if "prompt" in (line["body"] or {})
]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("block_tokens", [32, 16, 8])
def test_predictions_equal_what_a_hybrid_vllm_served(block_tokens: int, flat: bool) -> None:
    """Each request's prediction equals the cached tokens that a real hybrid vLLM 0.32 then reported.

    The engine served a Gemma-3 with windows of 64 tokens and blocks of 32. The one exception is a reset,
    which the engine publishes only with the next request's events.
    """
    pod = OnePod(block_tokens=block_tokens, flat=flat)
    waiting = list(RUN3_FRAMES)
    exact = 0
    for request in RUN3_REQUESTS:
        while waiting and waiting[0]["t"] < request["t0"]:
            batch = decode_batch(bytes.fromhex(waiting.pop(0)["frames"][2]), 1 << 24).batch
            assert not pod.apply(*batch.events).skipped
        prompt = request["body"]["prompt"]
        predicted = pod.match(pod.keys(prompt), len(prompt)).cached_blocks * block_tokens
        served = request["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]
        if request["label"] == "g11 after reset":
            assert (predicted, served) == (160, 0)
            continue
        assert predicted == served, request["label"]
        exact += 1
    assert exact == len(RUN3_REQUESTS) - 1 == 10
    assert pod.view.orphans == 0


def test_without_the_windows_the_capture_would_be_over_scored() -> None:
    """Without window groups the capture would predict a hit that the engine did not have."""
    pod = OnePod(block_tokens=32)
    for frame in RUN3_FRAMES[:3]:
        pod.apply(*decode_batch(bytes.fromhex(frame["frames"][2]), 1 << 24).batch.events)
    request = next(request for request in RUN3_REQUESTS if request["label"] == "g4 96 shared")
    keys = pod.keys(request["body"]["prompt"])
    assert pod.index.match(keys, [POD])[POD].cached_blocks == 3
    assert pod.match(keys).cached_blocks == 0


def test_a_masked_store_waits_for_the_full_one(pod: OnePod) -> None:
    """A group's hashes are mapped even if the full-attention run arrives later or in parts."""
    pod.apply(masked([3, 4], TOKENS[:16]))
    assert pod.view.orphans == 2
    assert pod.apply(stored([1, 2, 3], TOKENS[:12], **FULL)).stored
    assert (pod.view.orphans, pod.cached(TOKENS)) == (1, 0)
    pod.apply(stored([4], TOKENS[12:16], parent=3, **FULL))
    assert (pod.view.orphans, pod.cached(TOKENS)) == (0, 4)


def test_a_masked_store_is_not_mapped_by_position(pod: OnePod) -> None:
    """The first hash of a window group's store is not mapped to the first block of its tokens."""
    pod.apply(stored([1, 2, 3, 4], TOKENS[:16], **FULL), masked([3, 4], TOKENS[:16]))
    held = pod.index.held(pod.keys(TOKENS[:16]), group_holder(POD, 0))
    assert (held != 0).tolist() == [False, False, True, True]


def test_changes_of_a_waiting_copy_are_kept(pod: OnePod) -> None:
    """Removals and host copies of a group's unknown block take effect in order once it is stored."""
    pod.apply(masked([1, 2], TOKENS[:8]), BlockRemoved([1], "GPU", 0))
    pod.apply(stored([2], [], block_size=0, medium="CPU", group_idx=0), BlockRemoved([2], "GPU", 0))
    pod.apply(stored([1, 2], TOKENS[:8], **FULL))
    held = pod.index.held(pod.keys(TOKENS[:8]), group_holder(POD, 0))
    assert held.tolist() == [0, 1 << pod.index.tiers.number("cpu")]


def test_a_copy_waits_behind_a_full_run_that_is_an_orphan(pod: OnePod) -> None:
    """A group's block is stored together with its full-attention run, which waits for its parent."""
    pod.apply(stored([3, 4], TOKENS[8:16], parent=2, **FULL), masked([3, 4], TOKENS[:16]))
    pod.apply(stored([1, 2], TOKENS[:8], **FULL))
    assert (pod.cached(TOKENS), pod.view.orphans) == (4, 0)


def test_a_host_copy_waits_behind_a_full_run_that_is_an_orphan(pod: OnePod) -> None:
    """A group's copy without tokens is kept while the lead group's run is an orphan."""
    pod.apply(stored([9], TOKENS[:4], **FULL), masked([9], TOKENS[:4]))
    pod.apply(stored([2], TOKENS[8:12], parent=1, **FULL))
    assert not pod.apply(stored([2], [], block_size=0, medium="CPU", group_idx=0)).skipped
    pod.apply(stored([1], TOKENS[4:8], parent=9, **FULL))
    held = pod.index.held(pod.keys(TOKENS[:12]), group_holder(POD, 0))
    assert held[2] == 1 << pod.index.tiers.number("cpu")


def test_groups_lose_their_blocks_separately(pod: OnePod) -> None:
    """A removal affects only its group: a window's lost block ends the prefix, an unknown group none."""
    pod.apply(masked([1, 2, 3, 4], TOKENS[:16]), stored([1, 2, 3, 4], TOKENS[:16], **FULL))
    assert pod.cached(TOKENS) == 4
    assert pod.apply(BlockRemoved([4], "GPU", 7)).skipped == {("BlockRemoved", "unknown_group"): 1}
    pod.apply(BlockRemoved([4], "GPU", 0))
    assert pod.cached(TOKENS) == 3
    pod.apply(BlockRemoved([3], "GPU", 1))
    assert pod.cached(TOKENS) == 2
    pod.apply(BlockRemoved([1], "GPU", 0))
    assert pod.cached(TOKENS) == 0


def test_every_full_attention_group_must_hold_the_prefix(pod: OnePod) -> None:
    """A prefix ends where a second full-attention group lacks a block."""
    second = {"group_idx": 2, "kv_cache_spec_kind": "mla_attention"}
    pod.apply(stored([1, 2, 3], TOKENS[:12], **FULL), stored([1, 2, 3], TOKENS[:12], **second))
    assert pod.cached(TOKENS) == 3
    pod.apply(BlockRemoved([2], "GPU", 2))
    assert pod.cached(TOKENS) == 1


def test_a_linear_group_needs_a_state_at_the_end(pod: OnePod) -> None:
    """A mamba group needs only the block with the state at the prefix's end."""
    mamba = {"group_idx": 0, "kv_cache_spec_kind": "mamba", "kv_cache_spec_sliding_window": None}
    pod.apply(stored([1, 2, 3, 4], TOKENS[:16], **FULL), masked([3], TOKENS[:16], **mamba))
    assert pod.cached(TOKENS) == 3
    pod.apply(stored([5], TOKENS[16:20], parent=4, **FULL), masked([5], TOKENS[16:20], parent=4, **mamba))
    assert pod.cached(TOKENS) == 5


def test_a_prompt_that_ends_with_a_block_is_resumed_before_it(pod: OnePod) -> None:
    """A prompt that ends with a block resumes earlier, because the last token is always computed."""
    pod.apply(stored([1, 2, 3, 4], TOKENS[:16], **FULL), masked([3, 4], TOKENS[:16]))
    keys = pod.keys(TOKENS[:16])
    assert pod.match(keys, 17).cached_blocks == 4
    assert pod.match(keys, 16).cached_blocks == 0
    pod.apply(masked([2], TOKENS[:16]))
    assert pod.match(keys, 16).cached_blocks == 3


def test_a_cut_prefix_has_the_tiers_of_its_own_blocks(pod: OnePod) -> None:
    """Tier counts contain only usable blocks, in the lead group's tiers."""
    pod.apply(stored([1, 2, 3], TOKENS[:12], **FULL), masked([1, 2], TOKENS[:12]))
    pod.apply(stored([2], [], block_size=0, medium="CPU", group_idx=1), BlockRemoved([2], "GPU", 1))
    assert pod.tiers(TOKENS) == {"gpu": 1, "cpu": 1}
    assert pod.match(pod.keys(TOKENS)).weighted_blocks == pytest.approx(1.8)


def test_windows_are_counted_in_the_engines_blocks() -> None:
    """A window of 65 tokens needs one whole engine block of 64 tokens, which is 4 index blocks."""
    pod = OnePod(block_tokens=16)
    tokens = list(range(256))
    window = {**WINDOW, "block_size": 64, "kv_cache_spec_sliding_window": 65}
    pod.apply(stored([1, 2, 3, 4], tokens, block_size=64, **FULL), stored([3], tokens, **window))
    assert pod.cached(tokens) == 12
    assert pod.cached(tokens[:176]) == 0


def test_speculative_blocks_count_in_all_groups(pod: OnePod) -> None:
    """A speculative block counts as held in all groups of its pod."""
    pod.apply(stored([1, 2], TOKENS[:8], **FULL), masked([1, 2], TOKENS[:8]))
    keys = pod.keys(TOKENS[:16])
    pod.index.add(POD, "speculative", keys)
    assert pod.match(keys).cached_blocks == 4
    pod.index.remove(POD, "speculative", keys)
    assert pod.match(keys).cached_blocks == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_spec_kind": "unknown"},
        {"kv_cache_spec_kind": "cross_attention"},
        {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": None},
        {"kv_cache_spec_kind": "chunked_local_attention", "kv_cache_spec_sliding_window": None},
        {"kv_cache_spec_kind": "sliding_window", "block_size": 2},
        {"kv_cache_spec_kind": None},
    ],
)
def test_a_group_without_a_known_rule_is_counted(pod: OnePod, fields: dict[str, Any]) -> None:
    """Stores of a group with an unknown rule are counted, because predictions may be too high."""
    pod.apply(stored([1, 2], TOKENS[:8], **FULL))
    skipped = pod.apply(masked([1, 2], TOKENS[:8], **fields)).skipped
    assert skipped == {("BlockStored", "unsupported_cache_kind"): 1}
    assert not any(
        reason != "unsupported_cache_kind" for _, reason in pod.apply(BlockRemoved([1], None, 0)).skipped
    )
    assert pod.cached(TOKENS) == 2


def test_a_pod_without_full_attention_is_counted(pod: OnePod) -> None:
    """Stores of a pod without a full-attention group are counted, because they have no positions."""
    skipped = pod.apply(masked([3, 4], TOKENS[:16])).skipped
    assert skipped == {("BlockStored", "no_full_attention_group"): 2}
    assert not pod.apply(masked([5], TOKENS[:20]), stored([1, 2, 3, 4, 5], TOKENS[:20], **FULL)).skipped


def test_groups_are_bounded(pod: OnePod) -> None:
    """An engine's events can create at most a fixed number of groups."""
    for group in range(100):
        skipped = pod.apply(
            stored([1], TOKENS[:4], group_idx=group, kv_cache_spec_kind="full_attention")
        ).skipped
        assert bool(skipped) == (group >= 32)


def test_a_new_epoch_learns_its_groups_again(pod: OnePod) -> None:
    """A clear empties all groups but keeps their rules; a new epoch has neither."""
    pod.apply(stored([1, 2], TOKENS[:8], **FULL), masked([1, 2], TOKENS[:8]))
    pod.apply(AllBlocksCleared())
    assert pod.index.stats().blocks == 0
    assert pod.view.groups is not None
    pod.apply(stored([1, 2], TOKENS[:8], **FULL), masked([1, 2], TOKENS[:8]))
    pod.view.clear()
    assert (pod.index.stats().blocks, pod.view.groups) == (0, None)
    pod.apply(stored([1, 2], TOKENS[:8], group_idx=0, kv_cache_spec_kind="full_attention"))
    assert pod.cached(TOKENS) == 2


def test_pods_with_one_group_cost_nothing(pod: OnePod) -> None:
    """Matches of pods with one group are returned unchanged."""
    pod.apply(stored([1, 2], TOKENS[:8], **FULL))
    keys = pod.keys(TOKENS)
    table = pod.index.match(keys, [POD])
    assert pod.hybrid.refine(keys, table) is table
    pod.apply(masked([1, 2], TOKENS[:8]))
    assert pod.hybrid.refine(keys, table) is table
    others = pod.index.match(keys, ["other"])
    assert pod.hybrid.refine(keys, others) is others


def rule(stride: int, last_blocks: int = -1, chunk_blocks: int = 0) -> GroupRule:
    """Return a rule of a group that does not lead."""
    return GroupRule(1, True, False, stride, last_blocks, stride * chunk_blocks)


rules = st.one_of(
    st.builds(rule, st.sampled_from([1, 2, 3])),
    st.builds(rule, st.sampled_from([1, 2, 3]), st.integers(0, 4)),
    st.builds(rule, st.sampled_from([1, 2]), chunk_blocks=st.integers(1, 4)),
)


@given(
    st.integers(0, 24),
    st.sampled_from([1, 2]),
    st.lists(rules, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_usable_prefixes_are_the_longest_that_obey_all_rules(
    depth: int, stride: int, group_rules: list[GroupRule], dice: random.Random
) -> None:
    """The search finds the same prefix as trying every length, longest first."""
    groups = [(rule, np.array([dice.random() < 0.7 for _ in range(depth)], np.uint8)) for rule in group_rules]

    def obeys(length: int, rule: GroupRule, held: np.ndarray) -> bool:
        if length % rule.stride:
            return False
        first = 0
        if rule.last_blocks >= 0:
            first = max(0, length // rule.stride - rule.last_blocks)
        if rule.chunk > 0:
            first = length // rule.chunk * rule.chunk // rule.stride
        return all(held[(block + 1) * rule.stride - 1] for block in range(first, length // rule.stride))

    lengths = range(depth - depth % stride, -1, -stride)
    longest = next(length for length in lengths if all(obeys(length, *group) for group in groups))
    assert usable_blocks(depth, stride, groups) == longest
    # Dropping a block never makes a prefix longer, and without other groups it costs exactly one. A chunk's
    # start needs no block, the prefix before it does: vLLM runs no drafter beside chunked attention.
    dropped = usable_blocks(depth, stride, groups, drops=True)
    assert dropped <= longest or any(each.chunk for each, _ in groups)
    assert dropped % stride == 0
    assert usable_blocks(depth, stride, [], drops=True) == max(0, depth - depth % stride - stride)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, Cause.WINDOW),
        ({"kv_cache_spec_kind": "mamba", "kv_cache_spec_sliding_window": None}, Cause.CHECKPOINT),
    ],
)
def test_held_blocks_without_window_or_state_have_that_cause(fields: dict[str, Any], cause: str) -> None:
    """Blocks that the lead group holds without a window or state behind them have that cause."""
    pod = OnePod(flat=True)
    pod.apply(stored([1, 2, 3, 4], TOKENS[:16], **FULL), masked([1, 2], TOKENS[:8], **fields))
    table = pod.hybrid.refine(pod.keys(TOKENS), pod.index.match(pod.keys(TOKENS), [POD]), len(TOKENS))
    parts = split_prompt(table, POD, len(TOKENS), 4, pod.hybrid.limit(POD, drops=False))
    assert parts == {Cause.HIT: 8, cause: 8, Cause.NEVER_CACHED: 12, Cause.PARTIAL_BLOCK: 4}


def test_pods_of_one_group_serve_all_that_they_hold() -> None:
    """Only drops and further groups limit what an engine serves."""
    pod = OnePod(flat=True)
    pod.apply(stored([1], TOKENS[:4]))
    assert pod.hybrid.limit(POD, drops=False) == Limit()
    assert pod.hybrid.limit(POD, drops=True) == Limit(drops=True)
    pod.hybrid.set_groups(POD, None, is_paired=True)
    assert pod.hybrid.limit(POD, drops=False) == Limit(drops=True)
