"""SGLang with EAGLE: token ids as pairs, and blocks that are found only in front of the same token.

The vectors were recorded by SGLang's own radix cache with pages of 4 tokens: first a sequence of 13 tokens,
then one with the same first 8 tokens and other ones behind.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig, PodStream
from indexer.errors import PayloadError
from indexer.streams.ingest import Ingest
from indexer.wire.decode import decode_event, split_batch
from indexer.wire.events import BlockStored
from tests.support.paths import DATA

POD = "10.0.0.1:8000"
VECTORS = json.loads((DATA / "sglang_bigram_events.json").read_text("utf-8"))
PAIRED = [bytes.fromhex(each["hex"]) for each in VECTORS if each["eagle"]]
FIRST = list(range(100, 113))


class Followed:
    """Ingest that follows one engine."""

    def __init__(self, payloads: Sequence[bytes] = (), block_tokens: int = 4) -> None:
        config = IndexerConfig(block_tokens=block_tokens, hash_seed=1, capacity_bytes=1 << 20)
        self.ingest = Ingest(config, CollectorRegistry(), lambda *_: None, lambda *_: None, lambda: 1.0)
        self.ingest.opened(PodStream(POD, "m", "tcp://127.0.0.1:1"))
        for payload in payloads:
            assert not self.apply(payload)

    def apply(self, payload: bytes) -> str | None:
        """Apply a payload; return the damage."""
        return self.ingest.apply(POD, [payload]).damage

    def cached_tokens(self, prompt: list[int]) -> int:
        """Return the predicted cached tokens of a prompt."""
        hasher = self.ingest.hasher
        keys = hasher.chain(hasher.root("m"), prompt)
        table = self.ingest.index.match(keys, [POD])
        table = self.ingest.hybrid.refine(keys, table, len(prompt), prompt)
        return int(table.cached_blocks[0]) * hasher.block_tokens


def test_pairs_are_read_as_tokens_and_the_token_behind_each_block() -> None:
    """A pair's first token belongs to its block; the second token of a block's last pair must follow it."""
    (raw,) = split_batch(PAIRED[0], 1 << 20).events
    event = decode_event(raw)
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.next_tokens, event.block_size) == (FIRST[:12], [104, 108, 112], 4)


@pytest.mark.parametrize(("length", "cached"), [(5, 0), (6, 4), (9, 4), (10, 8), (13, 8), (14, 12), (30, 12)])
def test_a_page_is_found_only_with_the_token_behind_it(length: int, cached: int) -> None:
    """The engine looks up all tokens but the last, and finds a page with its 4 tokens and the next one."""
    prompt = [*FIRST, 7, *range(1000, 1100)][:length]
    assert Followed(PAIRED[:1]).cached_tokens(prompt) == cached


@pytest.mark.parametrize("block_tokens", [4, 2, 1, 8])
def test_a_prompt_that_goes_on_differently_loses_the_page_before(block_tokens: int) -> None:
    """With the same first 8 tokens and another ninth, the second page is another page than the stored one."""
    prompt = [*FIRST[:8], 77, 78, 79, 80, 81]
    assert Followed(PAIRED[:1], block_tokens).cached_tokens(prompt) == (4 if block_tokens < 8 else 0)


def test_sequences_that_share_a_page_are_found_with_either_next_token() -> None:
    """After both captured sequences, each prompt finds its own pages."""
    followed = Followed(PAIRED)
    assert followed.cached_tokens([*FIRST, 7, 7]) == 12
    assert followed.cached_tokens([*FIRST[:8], 999, 500, 501, 502, 503, 504]) == 12


def test_removed_pages_are_no_longer_found() -> None:
    """A removal ends the page together with the token behind it; the pages before it stay."""
    followed = Followed(PAIRED[:1])
    (raw,) = split_batch(PAIRED[0], 1 << 20).events
    event = decode_event(raw)
    assert isinstance(event, BlockStored)
    removal = {"type": "BlockRemoved", "block_hashes": event.block_hashes[1:], "medium": "GPU"}
    assert followed.apply(msgspec.msgpack.encode([0.0, [removal], None])) is None
    assert followed.cached_tokens([*FIRST, 7, 7]) == 4


@pytest.mark.parametrize(
    "tokens", [[[1, 2], [3, 4]], [[1, 2], [2]], [[1, 2, 3]], [[1, -2]], [[1, 2**40]], [1, [1, 2]]]
)
def test_malformed_pairs_are_rejected(tokens: list[object]) -> None:
    """Pairs must overlap, have two tokens, and be tokens."""
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": tokens, "block_size": 2}
    with pytest.raises(PayloadError) as rejected:
        decode_event(msgspec.msgpack.encode(event))
    assert rejected.value.reason == "broken_event"


class RadixCache:
    """Pages of SGLang with EAGLE: each is known by all tokens up to the one behind it."""

    def __init__(self, page: int) -> None:
        self.page, self.pages = page, dict[tuple[int, ...], int]()

    def store(self, tokens: list[int]) -> bytes:
        """Store a sequence; return the payload of the new pages, which may be empty."""
        found = self.cached(tokens)
        ends = range(found + self.page, len(tokens), self.page)
        hashes = [self.pages.setdefault(tuple(tokens[: end + 1]), len(self.pages) + 1) for end in ends]
        last = found + self.page * len(hashes)
        pairs = [list(pair) for pair in itertools.pairwise(tokens[found : last + 1])]
        parent = self.pages[tuple(tokens[: found + 1])] if found else None
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": pairs,
        }
        events = [{**event, "block_size": self.page, "lora_id": None, "medium": "GPU"}] if hashes else []
        return msgspec.msgpack.encode([0.0, events, None])

    def cached(self, tokens: list[int]) -> int:
        """Return the tokens found of a sequence."""
        ends = range(self.page, len(tokens), self.page)
        return self.page * len(
            list(itertools.takewhile(lambda end: tuple(tokens[: end + 1]) in self.pages, ends))
        )


_sequences = st.lists(st.integers(1, 2), min_size=1, max_size=14)


@given(st.lists(_sequences, max_size=8), _sequences, st.sampled_from([2, 4]))
def test_predictions_equal_a_model_of_the_cache(stored: list[list[int]], asked: list[int], page: int) -> None:
    """Whatever was stored, the predicted hit is what the cache finds of all tokens but the last."""
    cache, followed = RadixCache(page), Followed(block_tokens=2)
    for tokens in stored:
        assert followed.apply(cache.store(tokens)) is None
    assert followed.cached_tokens(asked) == cache.cached(asked[:-1])
