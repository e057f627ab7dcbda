"""Stores that tell again what is there, and stores of further physical copies, which look the same."""

from __future__ import annotations

import pytest

from indexer.views.hybrid import group_holder
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tests.support.decoding import decode_batch
from tests.support.held_copies import references
from tests.unit.indexer_support import POD, OnePod, read_lines, stored

TOKENS = list(range(100, 132))
FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}


@pytest.fixture(params=[4, 8])
def pod(request: pytest.FixtureRequest) -> OnePod:
    """A pod with engine blocks of 4 tokens, in an index of as many or of twice as many."""
    return OnePod(block_tokens=request.param)


def blocks(start: int, stop: int) -> BlockStored:
    """Engine blocks of a prompt; a block's hash is its number from 1."""
    return stored(list(range(start + 1, stop + 1)), TOKENS[start * 4 : stop * 4], parent=start or None)


def begin_episode(pod: OnePod) -> None:
    """A report that shows itself, of another prompt."""
    other = stored([90_000, 90_001], list(range(90_000, 90_008)))
    pod.apply(other)
    pod.apply(other, stored([90_002, 90_003], list(range(90_008, 90_016)), parent=90_001))


def copies(pod: OnePod, number: int) -> int:
    """How many removals of a block count; it is gone after them."""
    count = 0
    while pod.apply(BlockRemoved([number])).removals:
        count += 1
    return count


def test_a_run_that_is_continued_in_its_batch_was_not_new(pod: OnePod) -> None:
    """What a request found is announced before what it adds: not a copy, one removal ends it."""
    pod.apply(blocks(0, 4))
    told = pod.apply(blocks(0, 4), BlockRemoved([99]), blocks(4, 6))
    assert [len(keys) * pod.hasher.block_tokens for keys in told.stored] == [8]
    assert [copies(pod, number) for number in (1, 4, 5)] == [1, 1, 1]


def test_a_run_that_nothing_continues_is_a_copy(pod: OnePod) -> None:
    """Two requests that compute the same blocks at once hold them twice."""
    pod.apply(blocks(0, 2))
    assert pod.apply(blocks(0, 2)).stored
    assert [copies(pod, number) for number in (1, 2)] == [2, 2]


def test_only_a_later_store_continues_a_run(pod: OnePod) -> None:
    """A store in front of a run says nothing of it: the run is a copy."""
    pod.apply(blocks(0, 4))
    pod.apply(blocks(4, 6), blocks(0, 4))
    assert [copies(pod, number) for number in (1, 5)] == [2, 1]


def test_a_last_block_that_is_computed_again_is_a_copy(pod: OnePod) -> None:
    """Only the run from the prompt's start is told again; what continues it was computed once more."""
    pod.apply(blocks(0, 4), blocks(4, 6))
    pod.apply(blocks(0, 4), blocks(4, 6))
    assert [copies(pod, number) for number in (4, 5)] == [1, 2]


def test_a_report_is_over_with_its_batch(pod: OnePod) -> None:
    """A later run that nothing continues may be a copy: its first removal leaves a block in doubt."""
    pod.apply(blocks(0, 2))
    pod.apply(blocks(0, 2), blocks(2, 4))
    assert pod.apply(blocks(0, 4)).stored
    assert pod.view.invalid_reason is None
    held = pod.cached(TOKENS)
    assert pod.apply(BlockRemoved([4])).removals == {"copy": 1}
    assert (pod.cached(TOKENS), pod.view.invalid_reason) == (held, "ambiguous_copies")
    assert pod.apply(BlockRemoved([4])).removals == {"last": 1}
    assert (pod.cached(TOKENS) < held, pod.view.invalid_reason) == (True, None)


def test_out_of_an_episode_a_run_is_a_copy_without_a_doubt(pod: OnePod) -> None:
    """An engine that never reports announces the same prompts of a burst once each, and stays EXACT."""
    pod.apply(blocks(0, 2), blocks(2, 4))
    pod.apply(blocks(0, 4))
    assert pod.apply(BlockRemoved([4])).removals == {"copy": 1}
    assert pod.view.invalid_reason is None


def test_an_episode_ends_where_no_report_shows_itself(pod: OnePod) -> None:
    """After a thousand stores without a report that shows itself, what could be one is a copy."""
    begin_episode(pod)
    for number in range(1000):
        pod.apply(stored([1000 + number], list(range(4 * number, 4 * number + 4))))
    pod.apply(blocks(0, 4))
    pod.apply(blocks(0, 4))
    assert copies(pod, 4) == 2
    assert pod.view.invalid_reason is None


@pytest.mark.parametrize(
    ("shows", "is_doubtful", "removals"),
    [
        pytest.param([blocks(4, 6)], False, 1, id="a request goes on behind it"),
        pytest.param([blocks(0, 4), blocks(4, 6)], False, 1, id="a report names it"),
        pytest.param([blocks(0, 4)], False, 2, id="it is told once more"),
        pytest.param([blocks(3, 4)], False, 2, id="it is computed once more"),
        pytest.param([blocks(3, 6)], False, 2, id="it is computed with what follows"),
        pytest.param([AllBlocksCleared()], False, 0, id="the cache is emptied"),
        pytest.param([blocks(0, 3)], True, 1, id="another block is told"),
    ],
)
def test_a_doubt_ends_when_events_show_what_is_there(
    pod: OnePod, shows: list[KVEvent], is_doubtful: bool, removals: int
) -> None:
    """A doubtful block is there if a request used it or stored it again, and no doubt outlives a clear."""
    begin_episode(pod)
    pod.apply(blocks(0, 4))
    pod.apply(blocks(0, 4))
    pod.apply(BlockRemoved([4]))
    assert pod.view.invalid_reason == "ambiguous_copies"
    pod.apply(*shows)
    assert (pod.view.invalid_reason is not None) == is_doubtful
    assert copies(pod, 4) == removals
    assert pod.view.invalid_reason is None


def test_a_doubt_ends_when_later_blocks_are_evicted(pod: OnePod) -> None:
    """The least recently used goes first: once a block goes that was stored since, an unused copy is gone."""
    begin_episode(pod)
    pod.apply(blocks(0, 4))
    pod.apply(blocks(0, 4))
    pod.apply(stored([50, 51], list(range(500, 508))))
    pod.apply(BlockRemoved([4]))
    pod.apply(stored([60, 61], list(range(600, 608))))
    pod.apply(BlockRemoved([51]))
    assert pod.view.invalid_reason == "ambiguous_copies"
    pod.apply(BlockRemoved([61]))
    # Likely, not certain: another order of eviction would leave it there.
    assert pod.view.invalid_reason == "ambiguous_copies"
    assert pod.cached(TOKENS[:16]) * pod.hasher.block_tokens < 16
    assert copies(pod, 4) == 0


def test_more_uncertain_copies_than_can_be_remembered_damage_the_view() -> None:
    """Beyond the bound copies are counted, and the view says that it may be wrong."""
    pod = OnePod(block_tokens=4)
    begin_episode(pod)
    prompt = list(range(4 * 12_000))
    run = stored(list(range(1, 12_001)), prompt)
    assert not pod.apply(run).skipped
    assert not pod.apply(run).skipped
    other = stored(list(range(20_001, 32_001)), [token + 1 for token in prompt])
    pod.apply(other)
    assert pod.apply(other).skipped == {("BlockStored", "ambiguous_copies"): 1}


def test_an_uncertain_view_is_not_told_to_peers(pod: OnePod) -> None:
    """A list of its parts would not tell which copies are uncertain."""
    begin_episode(pod)
    pod.apply(blocks(0, 4))
    assert pod.view.unexportable != "ambiguous_copies"
    pod.apply(blocks(0, 4))
    assert pod.view.unexportable == "ambiguous_copies"


def test_a_run_of_which_a_block_is_not_held_is_new(pod: OnePod) -> None:
    """A run is told again only if the pod holds all of it in that tier; else it counts, and marks nothing."""
    pod.apply(blocks(0, 4), BlockRemoved([3]))
    pod.apply(blocks(0, 4), blocks(4, 6))
    assert [copies(pod, number) for number in (1, 3, 4)] == [2, 1, 2]
    host = OnePod()
    host.apply(blocks(0, 2))
    host.apply(stored([1, 2], TOKENS[:8], medium="CPU"), blocks(2, 3))
    assert host.apply(BlockRemoved([1, 2])).removals == {"last": 2}
    assert host.tiers(TOKENS) == {"cpu": 2, "gpu": 1}


def test_run1_tells_again_once_and_counts_every_copy() -> None:
    """A real vLLM: r14 asked for a full report; one removal for each physical copy must end each block."""
    pod = OnePod(block_tokens=32)
    for frame in read_lines("vllm_run1_frames.jsonl.gz"):
        before = pod.index.stats()
        batch = decode_batch(bytes.fromhex(frame["frames"][2]), 1 << 24).batch
        applied = pod.apply(*batch.events)
        runs = [event for event in batch.events if isinstance(event, BlockStored)]
        if len(applied.stored) < len(runs):
            assert [len(run.block_hashes) for run in runs] == [4, 1]
            first = runs[0].block_hashes
            assert pod.index.stats().blocks == before.blocks + 1
            snapshot = {key: copies for (_, _, key), copies in references(pod.index, [POD]).items()}
            counted = [snapshot[int(key)] for key in pod.keys(runs[0].token_ids)]
            assert len(first) == 4
            # The last one was computed twice (r1, r2).
            assert counted == [1, 1, 1, 2]
            return
    pytest.fail("no run was told again")


def hybrid(*group_runs: tuple[list[int], list[int], int | None]) -> list[KVEvent]:
    """Stores of both groups: hashes of the window's, hashes of the full group's, parent."""
    events: list[KVEvent] = []
    for window, full, parent in group_runs:
        tokens = [token for number in full for token in TOKENS[number * 4 - 4 : number * 4]]
        events.append(stored(list(window), tokens, parent, **WINDOW))
        events.append(stored(list(full), tokens, parent, **FULL))
    return events


def test_a_window_group_is_not_told_to_hold_what_it_dropped() -> None:
    """A full report names all blocks of the prefix in every group, also those that left a window long ago."""
    pod = OnePod()
    pod.apply(*hybrid(([3, 4], [1, 2, 3, 4], None)))
    pod.apply(*hybrid(([1, 2, 3, 4], [1, 2, 3, 4], None), ([], [5], 4)))
    held = pod.index.held(pod.keys(TOKENS[:20]), group_holder(POD, 0))
    assert (held != 0).tolist() == [False, False, True, True, False]
    assert pod.apply(BlockRemoved([3], None, 0)).removals == {"last": 1}
    told = pod.apply(*hybrid(([1, 2, 3, 4], [1, 2, 3, 4], None))).skipped
    assert told == {("BlockStored", "ambiguous_copies"): 1}


def test_a_new_window_run_is_no_report() -> None:
    """A short prompt's first store looks the same in both groups, and counts in both."""
    pod = OnePod()
    pod.apply(*hybrid(([1, 2], [1, 2], None), ([3], [3], 2)))
    assert pod.cached(TOKENS) == 3
    assert pod.apply(BlockRemoved([1, 2], None, 0)).removals == {"last": 2}


def test_a_real_engines_reports_and_copies_are_never_exact_and_wrong() -> None:
    """Captured from vLLM 0.32 under eviction: what a view predicts without a doubt is delivered."""
    pod, equal, has_doubtful = OnePod(block_tokens=16), 0, set()
    for line in read_lines("vllm_0_32_full_reports.jsonl.gz"):
        if "frames" in line:
            batch = decode_batch(bytes.fromhex(line["frames"][2]), 1 << 24).batch
            assert ("BlockStored", "ambiguous_copies") not in pod.apply(*batch.events).skipped
        elif (prompt := line.get("token_ids")) and line["request"] != "prompt_logprobs":
            cached = min(pod.cached(prompt) * 16, len(prompt) - 1) // 64 * 64
            if pod.view.invalid_reason is None:
                assert cached == line["cached_tokens"], line["request"]
                equal += 1
            else:
                has_doubtful.add(line["request"])
    assert (equal, has_doubtful) == (5, {"probe"})
