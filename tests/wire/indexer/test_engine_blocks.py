"""Router whose blocks are smaller than an engine's: predictions and ends of prefills in engine blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

import pytest

from indexer import StreamState
from indexer.index.contract import PrefixEnd
from router.picking.decision import Decision
from tests.support.indexer.engine_publisher import EnginePublisher, stored, wait_until
from tests.support.indexer.subscriber import Watched, stream
from tests.support.router.bench import TINY, Bench, PlainIndex, completion, ended, ready_pod

POD = ready_pod("10.0.0.1:8000")
ADDRESS = POD.address
OTHER_PROMPT = list(range(1000, 1064))
PROMPT = list(range(200))


class Routed:
    """Router with blocks of 16 tokens and its indexer, which follow one engine with larger blocks."""

    def __init__(self, engine: EnginePublisher, engine_tokens: int) -> None:
        self.engine, self.engine_tokens = engine, engine_tokens
        self.watched = Watched(block_tokens=16)
        self.indexer = self.watched.indexer
        self.bench = Bench(index=cast(PlainIndex, self.indexer)).with_pods(POD)
        self.watched.on_stored = lambda _pod: None
        self.indexer.follow([stream(engine, ADDRESS, TINY)])
        self.publish(OTHER_PROMPT, first_hash=9000)
        wait_until("the view is exact", lambda: self.cached(OTHER_PROMPT) == 4)
        assert self.indexer.states()[ADDRESS] is StreamState.EXACT

    def publish(self, prompt: list[int], first_hash: int = 1) -> None:
        """Publish the prompt's full blocks as stored."""
        blocks = len(prompt) // self.engine_tokens
        tokens = prompt[: blocks * self.engine_tokens]
        self.engine.publish(
            stored(range(first_hash, first_hash + blocks), tokens, block_size=self.engine_tokens)
        )

    def cached(self, prompt: list[int]) -> int:
        """Return the index blocks of the prompt that count as cached."""
        keys = self.indexer.block_keys(TINY, prompt)
        return self.indexer.match(keys, [ADDRESS])[ADDRESS].cached_blocks

    def route(self, request_id: str, prompt: list[int]) -> Decision:
        """Route a request."""
        return self.bench.router.route(completion(request_id, prompt), time.monotonic())

    def predicted_tokens(self, prompt: list[int]) -> int:
        """Return the predicted cached tokens of a request, and end it."""
        decision = self.route("probe", prompt)
        ended(self.bench.lifecycle, "probe", "response", time.monotonic())
        self.indexer.settle(decision.key, time.monotonic(), grace_s=0.0)
        return decision.primary.cached_tokens


@pytest.fixture(params=[32, 64])
def routed(request: pytest.FixtureRequest) -> Iterator[Routed]:
    """Start a router beside an engine with blocks of 32 or 64 tokens."""
    with EnginePublisher() as engine:
        running = Routed(engine, request.param)
        yield running
        running.indexer.close()


def test_predicted_is_whole_blocks_of_the_engine(routed: Routed) -> None:
    """A prediction is whole engine blocks without the last token, whatever prefix is shared."""
    routed.publish(PROMPT)
    whole = len(PROMPT) // routed.engine_tokens * routed.engine_tokens
    wait_until("the prompt is cached", lambda: routed.cached(PROMPT) == whole // 16)
    for shared in (15, 16, 31, 33, 48, 63, 64, 65, 96, 112, 128, 150, 199, 200):
        for tail in (0, 1, 40):
            prompt = [*PROMPT[:shared], *range(2000, 2000 + tail)]
            served = min(shared, len(prompt) - 1, whole) // routed.engine_tokens * routed.engine_tokens
            assert routed.predicted_tokens(prompt) == served, (shared, tail)


def test_explained_is_what_is_predicted(routed: Routed) -> None:
    """Decisions by tier and the indexer's explanation have the same whole blocks as the prediction."""
    routed.publish(PROMPT)
    wait_until("the prompt is cached", lambda: routed.cached(PROMPT) > 0)
    prompt = [*PROMPT[:112], *range(2000, 2030)]
    decision = routed.route("r", prompt)
    served = 112 // routed.engine_tokens * routed.engine_tokens
    assert decision.ranked.cached_tokens_by_tier(0) == {"gpu": served}
    routed.indexer.settle(decision.key, time.monotonic(), grace_s=0.0)
    wait_until("the assumption is over", lambda: routed.cached(prompt) == served // 16)
    [prefix] = routed.indexer.explain(routed.indexer.block_keys(TINY, prompt), [ADDRESS])
    held = prefix.held
    assert (prefix.cached_blocks, held.held_blocks, held.end) == (served // 16, served // 16, PrefixEnd.HOLE)
    assert held.tiers == (("gpu", served // 16),)


def test_what_is_on_its_way_is_whole_blocks_too(routed: Routed) -> None:
    """The speculative entries of a prompt end with its last engine block."""
    routed.route("first", PROMPT)
    whole = len(PROMPT) // routed.engine_tokens * routed.engine_tokens
    assert routed.predicted_tokens([*PROMPT, *range(2000, 2040)]) == whole


def test_the_engines_last_block_ends_the_prefill(routed: Routed) -> None:
    """A prefill ends with the event of its last whole block; the tail is not awaited."""
    decision = routed.route("r", PROMPT)
    assert routed.bench.ledger.load_table.work(ADDRESS).awaiting == 1
    assert routed.watched.metric("kvroute_indexer_speculative_entries") > 0
    lifecycle = routed.bench.lifecycle
    keys = routed.indexer.block_keys(TINY, PROMPT)
    routed.watched.on_stored = lambda pod: lifecycle.stored(
        pod, keys[: routed.cached(PROMPT)], time.monotonic()
    )
    routed.publish(PROMPT)
    wait_until("the prefill is over", lambda: routed.bench.ledger.load_table.work(ADDRESS).awaiting == 0)
    wait_until(
        "nothing is assumed any more",
        lambda: routed.watched.metric("kvroute_indexer_speculative_entries") == 0,
    )
    assert routed.bench.ledger.prefill_ended_s("r", ADDRESS, decision.decided_s) is not None


def test_a_prompt_of_less_than_a_block_awaits_no_event(routed: Routed) -> None:
    """The prefill of a prompt shorter than a block ends by the clock, because no event follows."""
    decision = routed.route("short", PROMPT[:24])
    assert routed.watched.metric("kvroute_indexer_speculative_entries") == 0
    best = decision.ranked.best
    patience_s = 2.0 * (best.queued_prefill_s + best.own_prefill_s) + 0.2
    routed.bench.lifecycle.expire(decision.decided_s + patience_s)
    assert routed.bench.ledger.load_table.work(ADDRESS).awaiting == 0
