"""Full reports: repeated stores of cached blocks, and stores of further copies, which look the same."""

from __future__ import annotations

import pytest

from indexer.views.hybrid import group_holder
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tests.support.indexer.decoding import decode_batch
from tests.support.indexer.held_copies import references
from tests.support.indexer.views import POD, OnePod, read_lines, stored

TOKENS = list(range(100, 132))
FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 9}


@pytest.fixture(params=[4, 8])
def pod(request: pytest.FixtureRequest) -> OnePod:
    """Return a pod with engine blocks of 4 tokens and index blocks of 4 or 8."""
    return OnePod(block_tokens=request.param)


def blocks(start: int, stop: int) -> BlockStored:
    """Return a store of engine blocks of a prompt; a block's hash is its number from 1."""
    return stored(list(range(start + 1, stop + 1)), TOKENS[start * 4 : stop * 4], parent=start or None)


def begin_episode(pod: OnePod) -> None:
    """Apply an unambiguous report of another prompt."""
    other = stored([90_000, 90_001], list(range(90_000, 90_008)))
    pod.apply(other)
    pod.apply(other, stored([90_002, 90_003], list(range(90_008, 90_016)), parent=90_001))


def copies(pod: OnePod, number: int) -> int:
    """Return the number of removals until a block is gone."""
    count = 0
    while pod.apply(BlockRemoved([number])).removals:
        count += 1
    return count


def test_a_run_continued_in_its_batch_is_a_report(pod: OnePod) -> None:
    """A cached run followed by its continuation is a report, so one removal ends its blocks."""
    pod.apply(blocks(0, 4))
    outcome = pod.apply(blocks(0, 4), BlockRemoved([99]), blocks(4, 6))
    assert [len(keys) * pod.hasher.block_tokens for keys in outcome.stored] == [8]
    assert [copies(pod, number) for number in (1, 4, 5)] == [1, 1, 1]


def test_a_run_without_continuation_is_a_copy(pod: OnePod) -> None:
    """Two requests that compute the same blocks at once create two copies."""
    pod.apply(blocks(0, 2))
    assert pod.apply(blocks(0, 2)).stored
    assert [copies(pod, number) for number in (1, 2)] == [2, 2]


def test_only_a_later_store_continues_a_run(pod: OnePod) -> None:
    """A run that only an earlier store continues is a copy."""
    pod.apply(blocks(0, 4))
    pod.apply(blocks(4, 6), blocks(0, 4))
    assert [copies(pod, number) for number in (1, 5)] == [2, 1]


def test_a_last_block_that_is_computed_again_is_a_copy(pod: OnePod) -> None:
    """Only the run from the prompt's start is a report; its continuation was computed again."""
    pod.apply(blocks(0, 4), blocks(4, 6))
    pod.apply(blocks(0, 4), blocks(4, 6))
    assert [copies(pod, number) for number in (4, 5)] == [1, 2]


def test_a_report_ends_with_its_batch(pod: OnePod) -> None:
    """A run without continuation in a later batch is ambiguous: its first removal makes blocks doubtful."""
    pod.apply(blocks(0, 2))
    pod.apply(blocks(0, 2), blocks(2, 4))
    assert pod.apply(blocks(0, 4)).stored
    assert pod.view.invalid_reason is None
    held = pod.cached(TOKENS)
    assert pod.apply(BlockRemoved([4])).removals == {"copy": 1}
    assert (pod.cached(TOKENS), pod.view.invalid_reason) == (held, "ambiguous_copies")
    assert pod.apply(BlockRemoved([4])).removals == {"last": 1}
    assert (pod.cached(TOKENS) < held, pod.view.invalid_reason) == (True, None)


def test_outside_of_an_episode_a_run_is_a_certain_copy(pod: OnePod) -> None:
    """Repeated stores of an engine that never reports are certain copies, so its view stays valid."""
    pod.apply(blocks(0, 2), blocks(2, 4))
    pod.apply(blocks(0, 4))
    assert pod.apply(BlockRemoved([4])).removals == {"copy": 1}
    assert pod.view.invalid_reason is None


def test_an_episode_ends_without_reports(pod: OnePod) -> None:
    """After a thousand stores without an unambiguous report, ambiguous runs are copies."""
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
        pytest.param([blocks(0, 4)], False, 2, id="it is stored once more"),
        pytest.param([blocks(3, 4)], False, 2, id="it is computed once more"),
        pytest.param([blocks(3, 6)], False, 2, id="it is computed with what follows"),
        pytest.param([AllBlocksCleared()], False, 0, id="the cache is emptied"),
        pytest.param([blocks(0, 3)], True, 1, id="another block is stored"),
    ],
)
def test_a_doubt_ends_when_events_show_what_is_there(
    pod: OnePod, shows: list[KVEvent], is_doubtful: bool, removals: int
) -> None:
    """A doubt ends when a request uses or stores the block, or when the cache is cleared."""
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
    """If a block stored after the doubt is evicted, the unused doubtful block was evicted before."""
    begin_episode(pod)
    pod.apply(blocks(0, 4))
    pod.apply(blocks(0, 4))
    pod.apply(stored([50, 51], list(range(500, 508))))
    pod.apply(BlockRemoved([4]))
    pod.apply(stored([60, 61], list(range(600, 608))))
    pod.apply(BlockRemoved([51]))
    assert pod.view.invalid_reason == "ambiguous_copies"
    pod.apply(BlockRemoved([61]))
    # Likely but not certain: another eviction order would keep the block.
    assert pod.view.invalid_reason == "ambiguous_copies"
    assert pod.cached(TOKENS[:16]) * pod.hasher.block_tokens < 16
    assert copies(pod, 4) == 0


def test_too_many_uncertain_copies_invalidate_the_view() -> None:
    """Above the limit ambiguous runs count as copies and invalidate the view."""
    pod = OnePod(block_tokens=4)
    begin_episode(pod)
    prompt = list(range(4 * 12_000))
    run = stored(list(range(1, 12_001)), prompt)
    assert not pod.apply(run).skipped
    assert not pod.apply(run).skipped
    other = stored(list(range(20_001, 32_001)), [token + 1 for token in prompt])
    pod.apply(other)
    assert pod.apply(other).skipped == {("BlockStored", "ambiguous_copies"): 1}


def test_an_uncertain_view_is_not_exported(pod: OnePod) -> None:
    """A view with uncertain copies cannot be exported, because its parts would not mark them."""
    begin_episode(pod)
    pod.apply(blocks(0, 4))
    assert pod.view.unexportable != "ambiguous_copies"
    pod.apply(blocks(0, 4))
    assert pod.view.unexportable == "ambiguous_copies"


def test_a_run_with_a_missing_block_is_new(pod: OnePod) -> None:
    """A run is a report only if the pod holds all of it in that tier."""
    pod.apply(blocks(0, 4), BlockRemoved([3]))
    pod.apply(blocks(0, 4), blocks(4, 6))
    assert [copies(pod, number) for number in (1, 3, 4)] == [2, 1, 2]
    host = OnePod()
    host.apply(blocks(0, 2))
    host.apply(stored([1, 2], TOKENS[:8], medium="CPU"), blocks(2, 3))
    assert host.apply(BlockRemoved([1, 2])).removals == {"last": 2}
    assert host.tiers(TOKENS) == {"cpu": 2, "gpu": 1}


def test_run1_has_one_report_and_counts_every_copy() -> None:
    """In a real vLLM's capture with one full report (r14), one removal per physical copy ends each block."""
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
    pytest.fail("no run was a report")


def hybrid(*group_runs: tuple[list[int], list[int], int | None]) -> list[KVEvent]:
    """Return stores of both groups from (window group's hashes, full group's hashes, parent)."""
    events: list[KVEvent] = []
    for window, full, parent in group_runs:
        tokens = [token for number in full for token in TOKENS[number * 4 - 4 : number * 4]]
        events.append(stored(list(window), tokens, parent, **WINDOW))
        events.append(stored(list(full), tokens, parent, **FULL))
    return events


def test_a_report_does_not_restore_evicted_window_blocks() -> None:
    """A full report lists all blocks in every group, but a window group does not regain evicted ones."""
    pod = OnePod()
    pod.apply(*hybrid(([3, 4], [1, 2, 3, 4], None)))
    pod.apply(*hybrid(([1, 2, 3, 4], [1, 2, 3, 4], None), ([], [5], 4)))
    held = pod.index.held(pod.keys(TOKENS[:20]), group_holder(POD, 0))
    assert (held != 0).tolist() == [False, False, True, True, False]
    assert pod.apply(BlockRemoved([3], None, 0)).removals == {"last": 1}
    skipped = pod.apply(*hybrid(([1, 2, 3, 4], [1, 2, 3, 4], None))).skipped
    assert skipped == {("BlockStored", "ambiguous_copies"): 1}


def test_a_new_window_run_is_not_a_report() -> None:
    """A short prompt's first store, which is equal in both groups, counts in both."""
    pod = OnePod()
    pod.apply(*hybrid(([1, 2], [1, 2], None), ([3], [3], 2)))
    assert pod.cached(TOKENS) == 3
    assert pod.apply(BlockRemoved([1, 2], None, 0)).removals == {"last": 2}


def test_a_real_engines_reports_and_copies_are_never_exact_and_wrong() -> None:
    """In captures of vLLM 0.32 with evictions, predictions of a valid view are what the engine served."""
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
