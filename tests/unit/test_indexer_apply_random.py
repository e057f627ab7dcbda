"""The view of a pod against a naive mirror, under random events of a well-behaved engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.events import AllBlocksCleared, BlockRemoved, KVEvent
from tests.unit.indexer_support import OnePod, stored

# Block tokens of three prompts that share heads; an engine hash stands for a whole prefix.
PROMPTS = ["abcdef", "abxy", "q"]
PREFIXES = sorted({prompt[:end] for prompt in PROMPTS for end in range(1, len(prompt) + 1)})


def tokens(prefix: str) -> list[int]:
    """A prefix's tokens: 4 for each of its letters."""
    return [ord(letter) for letter in prefix for _ in range(4)]


@dataclass
class Engine:
    """Physical copies by (prefix, tier), and the events that a real engine would tell of them."""

    copies: Counter[tuple[str, str]] = field(default_factory=Counter)

    def store(self, prompt: str, start: int, stop: int, medium: str) -> list[KVEvent]:
        """A run of new blocks; it needs its parent in the cache."""
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
        """A copy of a block to host memory."""
        if not self.copies[prefix, "GPU"]:
            return []
        self.copies[prefix, "CPU"] += 1
        return [stored([hash(prefix)], [], medium="CPU", block_size=0)]

    def remove(self, prefix: str, medium: str) -> list[KVEvent]:
        """One copy of a block goes."""
        if not self.copies[prefix, medium]:
            return []
        self.copies[prefix, medium] -= 1
        return [BlockRemoved([hash(prefix)], medium)]

    def clear(self) -> list[KVEvent]:
        """All blocks go."""
        self.copies.clear()
        return [AllBlocksCleared()]

    def cached(self, prompt: str) -> dict[str, int]:
        """Blocks of the prompt that could be served, by tier."""
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


@given(st.lists(steps, max_size=60))
@settings(deadline=None)
def test_the_index_equals_the_engine(history: list[tuple[str, ...]]) -> None:
    """Whatever an engine stores, copies, removes and clears, the index tells the engine's own prefixes."""
    engine, pod = Engine(), OnePod()
    for name, *arguments in history:
        applied = pod.apply(*getattr(engine, name)(*arguments))
        assert not applied.skipped
        for prompt in PROMPTS:
            assert pod.tiers(tokens(prompt)) == engine.cached(prompt)
    assert pod.index.stats().blocks == len({prefix for (prefix, _), n in engine.copies.items() if n})
