"""Random histories: the index equals the reference, and the reference a naive model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from indexer.wire.tiers import SPECULATIVE_TIER
from tests.support.depth import examples
from tests.support.indexer.held_copies import references
from tests.support.indexer.index_backends import BACKENDS, TIERS, keys
from tests.support.indexer.reference_index import ReferenceIndex

# More than the bits of a machine word.
PODS = tuple(f"10.0.0.{number}:8000" for number in range(80))
# Chains with common prefixes, as prompts have.
CHAINS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 14, 15], [21, 22], [1, 32, 33, 34], list(range(40, 60)))
KEYS = sorted({key for chain in CHAINS for key in chain})
# A large index evicts nothing unless it is asked to.
ROOMY = 10_000

# A few pods get most of the operations.
pods = st.sampled_from(PODS[:3]) | st.sampled_from(PODS)
chains = st.sampled_from(CHAINS)
copies = st.sampled_from([1, 1, 1, 2, 25])
places = st.integers(0, 20)


class IndexMachine(RuleBasedStateMachine):
    """Index and reference with the same history, and a model: one counter that never evicts."""

    @initialize(capacity=st.sampled_from([ROOMY, ROOMY, 1, 4, 11]), speculative=st.booleans())
    def begin(self, capacity: int, speculative: bool) -> None:
        """Start empty, with a large or small capacity, with or without speculative blocks."""
        self.tiers = [tier for tier in TIERS.names if speculative or tier != SPECULATIVE_TIER]
        # Whether the reference must equal the model, which never evicts.
        self.is_mirror = capacity == ROOMY
        self.index = BACKENDS["flat"](capacity)
        self.reference = ReferenceIndex(capacity, TIERS)
        self.mirror: Counter[tuple[str, str, int]] = Counter()

    @rule(pod=pods, data=st.data(), chain=chains, start=places, stop=places, repeated=copies)
    def store(
        self, pod: str, data: st.DataObject, chain: list[int], start: int, stop: int, repeated: int
    ) -> None:
        """Store some copies of a part of a chain."""
        self.add(pod, data.draw(st.sampled_from(self.tiers)), np.repeat(keys(chain[start:stop]), repeated))
        self.sizes_agree()

    @rule(first=places, more=st.integers(1, 80), data=st.data(), chain=chains)
    def store_everywhere(self, first: int, more: int, data: st.DataObject, chain: list[int]) -> None:
        """Store one chain for many pods."""
        tier = data.draw(st.sampled_from(self.tiers))
        for pod in PODS[first : first + more]:
            self.add(pod, tier, keys(chain))
        self.sizes_agree()

    @rule(
        pod=pods,
        data=st.data(),
        chain=chains,
        order=st.sampled_from(["head", "tail", "random"]),
        repeated=copies,
        at_once=st.booleans(),
    )
    def remove(
        self, pod: str, data: st.DataObject, chain: list[int], order: str, repeated: int, at_once: bool
    ) -> None:
        """Remove a part of a chain from one tier, from either end or at random."""
        tier = data.draw(st.sampled_from(self.tiers))
        gone = {"head": chain, "tail": chain[::-1]}.get(order) or data.draw(st.permutations(chain))
        gone = np.repeat(keys(gone[: data.draw(st.integers(1, len(chain)))]), repeated).tolist()
        for part in [gone] if at_once else [[key] for key in gone]:
            ended = self.index.remove(pod, tier, keys(part))
            expected = self.reference.remove(pod, tier, keys(part))
            assert ended == expected
        for key in gone:
            self.mirror[pod, tier, key] = max(0, self.mirror[pod, tier, key] - 1)

    @rule(pod=pods)
    def clear(self, pod: str) -> None:
        """Clear a pod's cache, which starts a new epoch."""
        cleared = self.index.clear_pod(pod)
        assert cleared == self.reference.clear_pod(pod)
        assert not self.index.held(keys(KEYS), pod).any()
        for held in [held for held in self.mirror if held[0] == pod]:
            del self.mirror[held]

    @rule(chain=chains, asked=st.sets(pods) | st.just(frozenset(PODS)))
    def match(self, chain: list[int], asked: set[str]) -> None:
        """Match some pods or all."""
        found = self.index.match(keys(chain), frozenset(asked))
        expected = self.reference.match(keys(chain), sorted(asked))
        assert found.keys() == asked
        for pod in asked:
            match = found[pod]
            mirrored = self.prefix(pod, chain)
            assert match == expected[pod]
            if self.is_mirror:
                assert match.blocks_by_tier == Counter(mirrored)
            assert match.cached_blocks <= len(mirrored), "reports more than it holds"
            assert match.cached_blocks == sum(match.blocks_by_tier.values())

    @rule(some=st.sets(pods, min_size=1))
    def count_copies(self, some: set[str]) -> None:
        """Compare the number of copies."""
        assert references(self.index, some) == references(self.reference, some)

    def teardown(self) -> None:
        """Compare the blocks of every pod at the end."""
        if not hasattr(self, "index"):
            return
        for pod in PODS:
            held = self.index.held(keys(KEYS), pod)
            assert held.tolist() == self.reference.held(keys(KEYS), pod).tolist()
            mirrored = [self.bits(pod, key) for key in KEYS]
            assert not any(bits & ~more for bits, more in zip(held.tolist(), mirrored, strict=True))
            if self.is_mirror:
                assert held.tolist() == mirrored
        self.sizes_agree()

    def add(self, pod: str, tier: str, added: np.ndarray) -> None:
        """Add to index, reference and model."""
        self.index.add(pod, tier, added)
        self.reference.add(pod, tier, added)
        self.mirror.update((pod, tier, key) for key in added.tolist())

    def sizes_agree(self) -> None:
        """Check that the index reports its true size."""
        stats, expected = self.index.stats(), self.reference.stats()
        assert stats.blocks <= stats.capacity_blocks
        if self.is_mirror:
            held = {(pod, key) for (pod, _, key), copies in self.mirror.items() if copies}
            assert (stats.blocks, stats.holdings) == (len({key for _, key in held}), len(held))
        assert (stats.blocks, stats.holdings) == (expected.blocks, expected.holdings)
        assert stats.evicted_blocks == expected.evicted_blocks

    def bits(self, pod: str, key: int) -> int:
        """Return the tiers in which a pod holds a block according to the model."""
        return sum(1 << number for number, tier in enumerate(TIERS.names) if self.mirror[pod, tier, key])

    def prefix(self, pod: str, chain: Sequence[int]) -> list[str]:
        """Return the best tier of each block of the unbroken prefix according to the model."""
        tiers = []
        for key in chain:
            held = [tier for tier in TIERS.names if self.mirror[pod, tier, key]]
            if not held:
                break
            tiers.append(held[0])
        return tiers


@pytest.mark.hypothesis
def test_an_index_equals_the_reference() -> None:
    """After any sequence of stores, removals, clears and evictions the index equals the reference."""
    run_state_machine_as_test(
        IndexMachine,
        settings=settings(
            max_examples=examples(50),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
