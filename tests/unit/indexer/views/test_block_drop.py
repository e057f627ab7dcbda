"""Blocks that engines with a drafter drop from every hit: learned from events, used in every match.

The captures are of vLLM 0.32 with random EAGLE heads, an MTP layer, a draft model, and EAGLE with its drop
disabled; each request comes with the cached tokens that the engine reported.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig, PodStream
from indexer.streams.ingest import Ingest
from indexer.views.hybrid import BlockDrop
from indexer.views.view_parts import StoredRun
from tests.support.indexer.views import read_json

POD = "10.0.0.1:8000"
CAPTURES = read_json("vllm_0_32_drafters.json.gz")
DROPPING = ["eagle_bs32", "eagle_hybrid_bs32", "mtp_glm4moe_bs32"]
NOT_DROPPING = ["eagle_nodrop_bs32", "draft_model_bs64"]


class Followed:
    """Ingest that follows one engine, which may have reported a drafter in its metrics."""

    def __init__(self, block_tokens: int, has_drafter: bool | None) -> None:
        config = IndexerConfig(block_tokens=block_tokens, hash_seed=1)
        self.ingest = Ingest(config, CollectorRegistry(), lambda *_: None, lambda *_: None, lambda: 1.0)
        self.block_tokens = block_tokens
        self.ingest.opened(PodStream(POD, "m", "tcp://127.0.0.1:1"))
        self.ingest.set_drafter(POD, has_drafter)

    def cached_tokens(self, prompt: list[int], salt: str | None = None) -> int:
        """Return the predicted cached tokens of a prompt."""
        hasher, servable = self.ingest.hasher, (len(prompt) - 1) // self.block_tokens
        keys = hasher.chain(hasher.root("m", None, salt), prompt)
        table = self.ingest.index.match(keys, [POD], servable)
        blocks = min(int(self.ingest.hybrid.refine(keys, table, len(prompt)).cached_blocks[0]), servable)
        stride = int(table.strides[0]) if len(table.strides) else 1
        return (blocks - blocks % stride) * self.block_tokens

    def played(self, capture: dict[str, Any]) -> list[tuple[int, int]]:
        """Play a capture; return predicted and delivered cached tokens of each request."""
        batches, pairs = iter(capture["batches"]), []
        waiting = next(batches, None)
        for sent_s, prompt, salt, delivered in capture["requests"]:
            while waiting is not None and waiting[0] < sent_s:
                assert self.ingest.apply(POD, [bytes.fromhex(waiting[1])]).damage is None
                waiting = next(batches, None)
            pairs.append((self.cached_tokens(prompt, salt), delivered))
        return pairs


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("name", DROPPING)
def test_with_a_drafter_in_the_metrics_all_predictions_equal_what_vllm_served(
    name: str, block_tokens: int
) -> None:
    """An unknown drop is predicted, and events then confirm it: no request is predicted wrongly."""
    followed = Followed(block_tokens, has_drafter=True)
    pairs = followed.played(CAPTURES[name])
    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    assert followed.ingest.drops(POD)
    assert followed.ingest.drafter(POD) == "drafter: costs 32 tokens a hit, learned from 8 stores"


@pytest.mark.parametrize("name", DROPPING)
def test_without_metrics_the_drop_is_learned_from_the_first_stores(name: str) -> None:
    """Events alone show the drop: the first hits are predicted one block too high, later ones exactly."""
    pairs = Followed(16, has_drafter=None).played(CAPTURES[name])
    wrong = [at for at, (predicted, delivered) in enumerate(pairs) if predicted != delivered]
    assert len(wrong) <= 6
    assert max(wrong) < len(pairs) // 4
    assert {pairs[at][0] - pairs[at][1] for at in wrong} == {32}


@pytest.mark.parametrize("has_drafter", [None, False])
@pytest.mark.parametrize("name", NOT_DROPPING)
def test_engines_that_drop_nothing_lose_nothing(name: str, has_drafter: bool | None) -> None:
    """A draft model, and EAGLE with its drop disabled, are predicted as engines without a drafter."""
    followed = Followed(16, has_drafter)
    assert [pair for pair in followed.played(CAPTURES[name]) if pair[0] != pair[1]] == []
    assert not followed.ingest.drops(POD)


@pytest.mark.parametrize("name", NOT_DROPPING)
def test_a_drafter_that_drops_nothing_is_learned(name: str) -> None:
    """A drafter in the metrics lowers predictions by one block, until events show that none is dropped."""
    followed = Followed(16, has_drafter=True)
    pairs = followed.played(CAPTURES[name])
    assert all(predicted <= delivered for predicted, delivered in pairs)
    assert pairs[-1][0] == pairs[-1][1]
    assert followed.ingest.drafter(POD).startswith("drafter: costs nothing a hit, learned from")


def test_metrics_without_a_drafter_end_the_prediction_of_a_drop_at_once() -> None:
    """If the metrics name no drafter, events that look like one change nothing."""
    followed = Followed(16, has_drafter=None)
    followed.played(CAPTURES["eagle_bs32"])
    assert followed.ingest.drops(POD)
    followed.ingest.set_drafter(POD, False)
    assert (followed.ingest.drops(POD), followed.ingest.drafter(POD)) == (False, "")


def test_a_new_view_keeps_the_drop_but_can_unlearn_it() -> None:
    """After a clear the drop is still predicted; an engine restarted without a drafter is learned anew."""
    followed = Followed(16, has_drafter=None)
    followed.played(CAPTURES["eagle_bs32"])
    followed.ingest.clear(POD, "test")
    assert followed.ingest.drops(POD)
    followed.played(CAPTURES["eagle_nodrop_bs32"])
    assert not followed.ingest.drops(POD)


def test_a_run_one_block_behind_the_expected_start_shows_that_nothing_is_dropped() -> None:
    """If the pod stores only what follows the block that it was predicted to drop, it dropped none.

    That store is one block, which could be a decoded one if the request were not known.
    """
    followed = Followed(1, has_drafter=True)
    ingest, prompt = followed.ingest, [1, 2, 3, 4, 5]
    ingest.apply(POD, [_batch([1, 2, 3], None)])
    hasher = ingest.hasher
    keys = hasher.chain(hasher.root("m"), prompt)
    start = followed.cached_tokens(prompt)
    assert start == 2
    first = np.array(prompt[start : start + 1], np.uint32)
    ingest.mismatches.expect("r", POD, "m", int(keys[start - 1]), keys[start:], first, start_tokens=start)
    ingest.apply(POD, [_batch([4], 3)])
    assert not ingest.drops(POD)
    assert followed.cached_tokens(prompt) == 4


def _batch(tokens: list[int], parent: int | None) -> bytes:
    run = {"type": "BlockStored", "block_hashes": tokens, "parent_block_hash": parent, "token_ids": tokens}
    return msgspec.msgpack.encode([0.0, [{**run, "block_size": 1, "lora_id": None, "medium": "GPU"}], None])


class Engine:
    """Block pool of an engine without a drafter: it serves cached blocks and stores the rest at once."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}

    def run(self, prompt: list[int], hit: int) -> StoredRun:
        """Store a prompt's blocks behind its first `hit` blocks; a block's key is its prefix."""
        keys = [hash(tuple(prompt[: end + 1])) & (2**63 - 1) for end in range(len(prompt))]
        for key in keys[hit:]:
            self.copies[key] = self.copies.get(key, 0) + 1
        parent = keys[hit - 1] if hit else 0
        return StoredRun(parent, np.array(keys[hit:], np.uint64), np.array(prompt[hit : hit + 1], np.uint32))

    def cached(self, prompt: list[int]) -> int:
        """Return the cached blocks of a prompt, without its last one."""
        keys = [hash(tuple(prompt[: end + 1])) & (2**63 - 1) for end in range(len(prompt) - 1)]
        return len(list(itertools.takewhile(self.copies.__contains__, keys)))

    def copies_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the number of copies of each block."""
        return np.array([self.copies.get(key, 0) for key in keys.tolist()], np.int32)


_prompts = st.lists(st.integers(1, 3), min_size=3, max_size=8)


@given(st.lists(st.lists(_prompts, min_size=1, max_size=5), max_size=20))
def test_concurrent_requests_with_one_prefix_do_not_look_like_a_drop(bursts: list[list[list[int]]]) -> None:
    """Without a drafter, bursts whose requests compute the same new blocks never teach a drop."""
    engine, drop = Engine(), BlockDrop()
    for burst in bursts:
        hits = [engine.cached(prompt) for prompt in burst]
        for prompt, hit in zip(burst, hits, strict=True):
            drop.observe([engine.run(prompt, hit)], 1, engine.copies_of, 0.0)
        assert not drop.drops
