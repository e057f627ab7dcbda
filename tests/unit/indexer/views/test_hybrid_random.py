"""View of a hybrid pod against a naive model of its engine, whose groups evict independently."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.wire.events import AllBlocksCleared, BlockRemoved, KVEvent
from tests.support.indexer.views import OnePod, stored

PROMPTS = ["abcdefgh", "abcxyz", "q"]
PREFIXES = sorted({prompt[:end] for prompt in PROMPTS for end in range(1, len(prompt) + 1)})
# Blocks of 8 tokens; a window of 17 tokens needs the 2 blocks before a prefix's end.
BLOCK_SIZE, NEEDED = 8, 2
FULL = {"group_idx": 1, "kv_cache_spec_kind": "full_attention", "block_size": BLOCK_SIZE}
WINDOW = {
    "group_idx": 0,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 17,
    "block_size": BLOCK_SIZE,
}


def tokens(prefix: str) -> list[int]:
    """Return a prefix's tokens, one block per letter."""
    return [ord(letter) for letter in prefix for _ in range(BLOCK_SIZE)]


@dataclass
class Engine:
    """Model engine: physical copies by (group, prefix), and the events that report them."""

    copies: Counter[tuple[int, str]] = field(default_factory=Counter)

    def store(self, prompt: str, start: int, stop: int, kept: int, window_first: bool) -> list[KVEvent]:
        """Store a request's new blocks: all in the full group, the last few in the window group."""
        start, stop = min(start, len(prompt)), min(stop, len(prompt))
        while start and not self.copies[1, prompt[:start]]:
            start -= 1
        prefixes = [prompt[:end] for end in range(start + 1, stop + 1)]
        if not prefixes:
            return []
        parent = hash(prompt[:start]) if start else None
        in_window = prefixes[len(prefixes) - min(kept, len(prefixes)) :]
        self.copies.update((1, prefix) for prefix in prefixes)
        self.copies.update((0, prefix) for prefix in in_window)
        run = tokens(prompt[start:stop])
        events: list[KVEvent] = [
            stored([hash(prefix) for prefix in in_window], run, parent, **WINDOW),
            stored([hash(prefix) for prefix in prefixes], run, parent, **FULL),
        ]
        return events if window_first else events[::-1]

    def remove(self, prefix: str, group: int) -> list[KVEvent]:
        """Remove one copy of a block from a group."""
        if not self.copies[group, prefix]:
            return []
        self.copies[group, prefix] -= 1
        return [BlockRemoved([hash(prefix)], "GPU", group)]

    def clear(self) -> list[KVEvent]:
        """Remove all blocks."""
        self.copies.clear()
        return [AllBlocksCleared()]

    def usable(self, prompt: str) -> int:
        """Return the prefix in blocks that the engine can resume; it never includes the last token."""
        for end in range(len(prompt) - 1, 0, -1):
            window = range(max(1, end - NEEDED + 1), end + 1)
            if all(self.copies[1, prompt[:block]] for block in range(1, end + 1)) and all(
                self.copies[0, prompt[:block]] for block in window
            ):
                return end
        return 0


steps = st.one_of(
    st.tuples(
        st.just("store"),
        st.sampled_from(PROMPTS),
        st.integers(0, 8),
        st.integers(1, 8),
        st.integers(0, 4),
        st.booleans(),
    ),
    st.tuples(st.just("remove"), st.sampled_from(PREFIXES), st.sampled_from([0, 1])),
    st.tuples(st.just("clear")),
)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("block_tokens", [8, 4])
@given(st.lists(steps, max_size=50))
@settings(deadline=None)
def test_predictions_equal_what_the_engine_can_resume(
    block_tokens: int, flat: bool, history: list[tuple]
) -> None:
    """For any stores and evictions the prediction is the longest prefix that the engine can resume."""
    engine, pod = Engine(), OnePod(block_tokens=block_tokens, flat=flat)
    # The first store of an epoch reports both groups.
    pod.apply(*engine.store("zz", 0, 2, 2, window_first=True))
    for name, *arguments in history:
        pod.apply(*getattr(engine, name)(*arguments))
        for prompt in PROMPTS:
            found = pod.match(pod.keys(tokens(prompt)), len(prompt) * BLOCK_SIZE).cached_blocks
            assert found * block_tokens == engine.usable(prompt) * BLOCK_SIZE
    assert pod.view.orphans == 0
