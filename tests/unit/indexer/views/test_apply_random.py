"""Pod view against a naive model of a correct engine with random events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.views.hybrid import group_holder
from indexer.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from tests.support.indexer.decoding import EventBatch
from tests.support.indexer.held_copies import references
from tests.support.indexer.plain_view import apply_batch
from tests.support.indexer.views import POD, OnePod, stored

# Blocks of three prompts with common prefixes; an engine hash stands for a whole prefix.
PROMPTS = ["abcdef", "abxy", "q"]
PREFIXES = sorted({prompt[:end] for prompt in PROMPTS for end in range(1, len(prompt) + 1)})


def tokens(prefix: str) -> list[int]:
    """Return a prefix's tokens, 4 per letter."""
    return [ord(letter) for letter in prefix for _ in range(4)]


@dataclass
class Engine:
    """Model engine: physical copies by (prefix, tier), and the events that a real engine would publish."""

    copies: Counter[tuple[str, str]] = field(default_factory=Counter)

    def store(self, prompt: str, start: int, stop: int, medium: str) -> list[KVEvent]:
        """Store a run of new blocks whose parent must be cached."""
        start, stop = min(start, len(prompt)), min(stop, len(prompt))
        while start and not self.copies[prompt[:start], "GPU"]:
            start -= 1
        prefixes = [prompt[:end] for end in range(start + 1, stop + 1)]
        if not prefixes:
            return []
        self.copies.update((prefix, medium) for prefix in prefixes)
        parent = hash(prompt[:start]) if start else None
        return [stored([hash(p) for p in prefixes], tokens(prompt[start:stop]), parent, medium=medium)]

    def offload(self, prefix: str) -> list[KVEvent]:
        """Copy a block to host memory."""
        if not self.copies[prefix, "GPU"]:
            return []
        self.copies[prefix, "CPU"] += 1
        return [stored([hash(prefix)], [], medium="CPU", block_size=0)]

    def remove(self, prefix: str, medium: str) -> list[KVEvent]:
        """Remove one copy of a block."""
        if not self.copies[prefix, medium]:
            return []
        self.copies[prefix, medium] -= 1
        return [BlockRemoved([hash(prefix)], medium)]

    def clear(self) -> list[KVEvent]:
        """Remove all blocks."""
        self.copies.clear()
        return [AllBlocksCleared()]

    def cached(self, prompt: str) -> dict[str, int]:
        """Return the cached prefix of a prompt in blocks by tier."""
        tiers: Counter[str] = Counter()
        for end in range(1, len(prompt) + 1):
            held = [
                tier for medium, tier in (("GPU", "gpu"), ("CPU", "cpu")) if self.copies[prompt[:end], medium]
            ]
            if not held:
                break
            tiers[held[0]] += 1
        return dict(tiers)


media = st.sampled_from(["GPU", "CPU"])
steps = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(PROMPTS), st.integers(0, 6), st.integers(1, 6), media),
    st.tuples(st.just("offload"), st.sampled_from(PREFIXES)),
    st.tuples(st.just("remove"), st.sampled_from(PREFIXES), media),
    st.tuples(st.just("clear")),
)


@pytest.mark.parametrize("flat", [False, True])
@given(st.lists(steps, max_size=60))
@settings(deadline=None)
def test_the_index_equals_the_engine(flat: bool, history: list[tuple[str, ...]]) -> None:
    """After any stores, copies, removals and clears the index matches the engine's cached prefixes."""
    engine, pod = Engine(), OnePod(flat=flat)
    for name, *arguments in history:
        applied = pod.apply(*getattr(engine, name)(*arguments))
        assert not applied.skipped
        for prompt in PROMPTS:
            assert pod.tiers(tokens(prompt)) == engine.cached(prompt)
    assert pod.index.stats().blocks == len({prefix for (prefix, _), n in engine.copies.items() if n})


FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
WINDOW = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}


def one_block(prefix: str, **fields: object) -> KVEvent:
    """Return a store of only the prefix's last block."""
    parent = hash(prefix[:-1]) if prefix[:-1] else None
    return stored([hash(prefix)], tokens(prefix[-1]), parent, **fields)


def masked(prompt: str, kept: int) -> KVEvent:
    """Return a window group's store of a prompt of which it keeps the last blocks."""
    prefixes = [prompt[:end] for end in range(1, len(prompt) + 1)]
    return stored([hash(prefix) for prefix in prefixes[-kept:]], tokens(prompt), **WINDOW)


INDEPENDENT = [
    *(one_block(prefix, **FULL) for prefix in PREFIXES),
    *(one_block(prefix, medium="CPU", **FULL) for prefix in PREFIXES[:4]),
    *(masked(prompt, 2) for prompt in PROMPTS[:2]),
    masked(PROMPTS[2], 1),
    one_block(PREFIXES[1], **FULL),
]


@given(st.permutations(INDEPENDENT), st.sampled_from([2, 4, 8]), st.booleans())
@settings(deadline=None)
def test_the_order_of_independent_stores_does_not_matter(
    events: list[KVEvent], block_tokens: int, as_one_batch: bool
) -> None:
    """Children before parents or windows before full attention lead to the same index."""
    pod, ordered = OnePod(block_tokens=block_tokens), OnePod(block_tokens=block_tokens)
    for view, batches in (
        (pod, [events] if as_one_batch else [[e] for e in events]),
        (ordered, [INDEPENDENT]),
    ):
        for batch in batches:
            view.apply(*batch)
    assert pod.view.orphans == ordered.view.orphans == 0
    holders = [POD, group_holder(POD, 0)]
    assert references(pod.index, holders) == references(ordered.index, holders)


hashes = st.lists(st.one_of(st.integers(0, 5), st.sampled_from([b"a", b"b"])), max_size=4)
groups = st.sampled_from([None, 0, 1, 2])
hostile = st.one_of(
    st.builds(
        BlockStored,
        hashes,
        st.one_of(st.none(), st.integers(0, 5), st.just(b"a")),
        st.lists(st.integers(0, 3), max_size=16),
        st.sampled_from([0, 1, 2, 3, 4, 8]),
        lora_id=st.sampled_from([None, 0, 1]),
        lora_name=st.sampled_from([None, "", "x"]),
        medium=st.sampled_from([None, "GPU", "CPU", "?"]),
        extra_keys=st.one_of(
            st.none(),
            st.lists(
                st.sampled_from([None, [], ["x"], [b"x"], [["x", 1]], [["x", -3]], [1.5], [["x"]], [None]]),
                max_size=4,
            ),
        ),
        group_idx=groups,
        kv_cache_spec_kind=st.sampled_from([None, "full_attention", "sliding_window", "mamba", "?"]),
        kv_cache_spec_sliding_window=st.sampled_from([None, -1, 0, 1, 9, 2**40]),
        cache_salt=st.sampled_from([None, "", "x"]),
    ),
    st.builds(BlockRemoved, hashes, st.sampled_from([None, "GPU", "CPU"]), groups),
    st.just(AllBlocksCleared()),
)


@pytest.mark.parametrize("block_tokens", [1, 4, 8])
@given(st.lists(st.lists(hostile, max_size=8), max_size=8))
@settings(deadline=None)
def test_no_event_breaks_a_view(block_tokens: int, batches: list[list[KVEvent]]) -> None:
    """Arbitrary events raise nothing, orphans stay bounded, and a clear leaves no block."""
    pod = OnePod(
        block_tokens=block_tokens,
        engine_hashes_per_pod=3,
        orphan_tokens_per_pod=64,
    )
    for events in batches:
        pod.apply(*events)
        pod.match(pod.keys([0, 1, 2, 3] * 4), 16)
        assert pod.view.orphans <= 4
    apply_batch(pod.view, EventBatch(0.0, (AllBlocksCleared(),)))
    assert (pod.index.stats().blocks, pod.view.orphans) == (0, 0)
