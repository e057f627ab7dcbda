"""Views that were joined late: what of a match is proven, and when the whole view is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from indexer.audit.late_view import LATE_REASONS, SETTLE_S, SUBTREES_MAX, LateView
from indexer.config import IndexerConfig, PodStream
from indexer.index.contract import StreamState
from indexer.streams.ingest import Ingest
from indexer.views.view_parts import Outcome, StoredRun
from tests.support.indexer.late_engine import BLOCK, LruEngine, Prompt

POD = "10.0.0.1:8000"


class Late:
    """Ingest that follows one engine whose stream it joined late."""

    def __init__(
        self, has_drafter: bool | None = False, capacity: int | None = None, stride: int = 1
    ) -> None:
        clock = itertools.count(1.0).__next__
        config = IndexerConfig(block_tokens=BLOCK // stride, hash_seed=1)
        self.ingest = Ingest(config, CollectorRegistry(), lambda *_: None, lambda *_: None, clock)
        self.ingest.opened(PodStream(POD, "m", "tcp://127.0.0.1:1"))
        self.ingest.set_drafter(POD, has_drafter)
        self.ingest.set_capacity(POD, capacity)
        self.ingest.state(POD, StreamState.STALE, "no_history")
        self._stride = stride

    def apply(self, ts: float, events: Sequence[dict[str, Any]]) -> Outcome:
        """Apply one batch."""
        return self.ingest.apply(POD, [msgspec.msgpack.encode([ts, events, None])])

    def proven(self, prompt: Prompt) -> tuple[int, bool]:
        """Return the proven blocks of a prompt, in blocks of the engine, and whether there are no others."""
        hasher = self.ingest.hasher
        keys = hasher.chain(hasher.root("m"), list(prompt))
        held = self.ingest.index.held(keys, POD)
        blocks, is_end = self.ingest.proven(POD, keys, held, self._stride)
        return blocks // self._stride, is_end


def stored(hashes: list[int], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return a store of blocks whose tokens are their hashes."""
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "block_size": BLOCK}
    return {**event, "token_ids": words(hashes), "lora_id": None, "medium": "GPU", **fields}


def words(blocks: Sequence[int]) -> Prompt:
    """Return the tokens of blocks."""
    return tuple(block for block in blocks for _ in range(BLOCK))


def removed(*hashes: int) -> dict[str, Any]:
    """Return removals of blocks."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def settled(**settings: Any) -> Late:
    """Return a late view whose stream was joined long ago."""
    late = Late(**settings)
    late.apply(0.0, [])
    return late


@pytest.mark.parametrize("stride", [1, 2])
def test_a_match_behind_a_miss_is_exact_and_others_are_in_doubt(stride: int) -> None:
    """Blocks behind a block that a request missed are known; those of other prompts may be older."""
    late = settled(stride=stride)
    late.apply(SETTLE_S, [stored([1, 2, 3])])
    assert late.proven(words([1, 2, 9])) == (2, True)
    assert late.proven(words([9, 8])) == (0, False)
    late.apply(SETTLE_S, [removed(3, 2)])
    assert late.proven(words([1, 2, 3])) == (1, True)
    late.apply(SETTLE_S, [removed(1)])
    assert late.proven(words([1, 2, 3])) == (0, True)


def test_a_whole_prompt_is_exact() -> None:
    """A prompt that is held as a whole cannot be held further, whatever was stored before."""
    late = settled()
    late.apply(1.0, [stored([1])])
    assert (late.proven(words([1])), late.proven(words([1, 2]))) == ((1, True), (1, False))


def test_a_block_that_may_be_computed_again_proves_nothing() -> None:
    """A run of one block may be a cached one; with a drafter, so may be the first of two."""
    late = settled(has_drafter=None)
    late.apply(SETTLE_S, [stored([1, 2]), stored([5])])
    assert late.proven(words([1, 9])) == (1, False)
    assert late.proven(words([5, 9])) == (1, False)
    late.apply(SETTLE_S, [stored([6, 7, 8])])
    assert (late.proven(words([6, 9])), late.proven(words([6, 7, 9]))) == ((1, False), (2, True))


def test_stores_soon_after_the_join_prove_nothing() -> None:
    """A request may have been looked up before the join, and stores what another stored meanwhile."""
    late = settled()
    late.apply(SETTLE_S - 1, [stored([1, 2])])
    assert late.proven(words([1, 9])) == (1, False)


@pytest.mark.parametrize(
    "event",
    [
        stored([7], medium="CPU_PINNED"),
        stored([7], block_size=3),
        stored([1], group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=BLOCK),
    ],
    ids=["host memory", "unusable store", "another group"],
)
def test_what_events_do_not_show_is_in_doubt(event: dict[str, Any]) -> None:
    """With a further tier or group, or after an event that could not be applied, no end is proven."""
    late = settled(capacity=4)
    late.apply(SETTLE_S, [stored([1, 2, 3], group_idx=0)])
    late.ingest.set_capacity(POD, 3)
    outcome = late.apply(SETTLE_S, [event])
    assert not late.proven(words([1, 2, 9]))[1]
    assert not late.proven(words([1, 2, 3]))[1]
    assert not outcome.is_complete


@pytest.mark.parametrize("lost", [[], [stored([4], 99)]])
def test_a_damaged_view_proves_no_block_until_it_is_cleared(lost: list[dict[str, Any]]) -> None:
    """A batch that cannot be read may have been a removal; a new view begins anew."""
    late = settled()
    late.apply(SETTLE_S, [stored([1, 2, 3]), *lost])
    assert late.proven(words([1, 2, 9])) == (2, True)
    late.ingest.apply(POD, [b"\xc1"])
    assert late.proven(words([1, 2, 9])) == (0, False)
    late.ingest.clear(POD, "test")
    late.apply(20.0, [stored([1])])
    assert late.proven(words([1])) == (1, True)


@pytest.mark.parametrize("state", StreamState)
@pytest.mark.parametrize("reason", ["no_history", "tier_not_proven"])
def test_only_views_that_began_empty_prove_anything(state: StreamState, reason: str) -> None:
    """An EXACT view is exact everywhere; one that lacks anything else, or is being rebuilt, is nowhere."""
    late = settled()
    late.apply(SETTLE_S, [stored([1, 2, 3])])
    late.ingest.state(POD, state, reason)
    is_late = state is StreamState.STALE and reason in LATE_REASONS
    is_proven = is_late or state is StreamState.EXACT
    assert late.proven(words([1, 2, 9])) == ((2, True) if is_proven else (0, False))
    assert late.proven(words([9, 9])) == (0, state is StreamState.EXACT)


def test_speculative_blocks_are_not_proven() -> None:
    """Blocks of a request that was only just sent count for picks, not as proven."""
    late = settled()
    late.apply(SETTLE_S, [stored([1, 2])])
    hasher = late.ingest.hasher
    late.ingest.index.add(POD, "speculative", hasher.chain(hasher.root("m"), list(words([1, 2, 3]))))
    assert late.proven(words([1, 2, 3])) == (2, True)


def test_a_full_view_is_complete() -> None:
    """A view with as many blocks as the engine can hold, all but vLLM's null block, leaves none in doubt."""
    late = settled(capacity=5)
    assert not late.apply(1.0, [stored([1, 2, 3]), stored([1])]).is_complete
    assert late.apply(1.0, [stored([4])]).is_complete


def test_subtrees_are_bounded() -> None:
    """An engine that stores without end fills a bounded memory; the latest subtrees are kept."""
    late, outcome = LateView(), Outcome(published_s=[SETTLE_S])
    late.applied(Outcome(published_s=[0.0]), 1, may_drop=False, is_simple=True)
    keys = Late().ingest.hasher.chain(1, list(range(2 * BLOCK * (SUBTREES_MAX + 1))))
    outcome.runs = [StoredRun(0, keys[at : at + 2], keys[:0]) for at in range(0, len(keys), 2)]
    late.applied(outcome, 1, may_drop=False, is_simple=True)
    known = [late.is_end(keys[at : at + 1], whole=False) for at in range(0, len(keys), 2)]
    assert (known[0], known[-1], sum(known)) == (False, True, SUBTREES_MAX // 2 + 1)


PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=5 * BLOCK).map(tuple)
STEPS = st.lists(st.tuples(st.integers(0, 9), PROMPTS), max_size=40)


def all_prompts() -> Iterator[Prompt]:
    """Yield prompts of up to three blocks."""
    blocks = list(itertools.product(range(1, 4), repeat=BLOCK))
    for length in (1, 2, 3):
        for chosen in itertools.product(blocks, repeat=length):
            yield tuple(itertools.chain(*chosen))


@given(before=STEPS, during=STEPS, after=STEPS, drops=st.booleans(), capacity=st.integers(8, 20))
def test_what_is_proven_is_what_the_engine_holds(
    before: list[Any], during: list[Any], after: list[Any], drops: bool, capacity: int
) -> None:
    """Of an engine joined at any time, no proven block is missing, and a proven end is the engine's."""
    engine, late = LruEngine(capacity, drops=drops), Late(has_drafter=drops, capacity=capacity)
    for step in before:
        engine.act(*step)
    engine.take_events()
    old = set(engine.running)
    late.apply(0.0, [])
    for step in during:
        engine.act(*step)
        late.apply(1.0, engine.take_events())
    for number in old & set(engine.running):
        engine.finish(number)
    is_complete = False
    for step in after:
        engine.act(*step)
        is_complete |= late.apply(SETTLE_S, engine.take_events()).is_complete
        if is_complete:
            late.ingest.state(POD, StreamState.EXACT, "")
        for prompt in all_prompts():
            blocks, is_end = late.proven(prompt)
            held = engine.held_blocks(prompt)
            assert blocks == held if is_end else blocks <= held


def test_a_turnover_makes_the_view_exact() -> None:
    """After new prompts have filled the engine's memory, the view is complete and equal."""
    engine, late = LruEngine(9, drops=False), Late(capacity=9)
    engine.run((1, 1, 1, 1, 2))
    engine.take_events()
    late.apply(0.0, [])
    verdicts = []
    for number in range(10, 14):
        engine.run(words([number, number + 10]))
        verdicts.append(late.apply(SETTLE_S, engine.take_events()).is_complete)
    assert verdicts == [False, False, False, True]
    late.ingest.state(POD, StreamState.EXACT, "")
    for prompt in (words([10, 20]), words([13, 23]), words([1, 1])):
        assert late.proven(prompt) == (engine.held_blocks(prompt), True)
