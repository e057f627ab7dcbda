"""Every index backend against a naive mirror, under random histories."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.contract.test_index_contract import BACKENDS, WEIGHTS

PODS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
TIERS = ("gpu", "cpu", "other")
# Chains that share heads, as prompts do.
CHAINS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 14, 15], [21, 22], [1, 32, 33, 34])

pods = st.sampled_from(PODS)
tiers = st.sampled_from(TIERS)
chains = st.sampled_from(CHAINS)


class IndexMachine(RuleBasedStateMachine):
    """An index and a mirror made of one counter."""

    backend = ""

    @initialize(capacity=st.sampled_from([4, 10_000]))
    def begin(self, capacity: int) -> None:
        """Begins empty, roomy or nearly without room."""
        self.capacity = capacity
        self.index = BACKENDS[self.backend](capacity)
        self.copies: Counter[tuple[str, str, int]] = Counter()

    @rule(pod=pods, tier=tiers, chain=chains, start=st.integers(0, 5), stop=st.integers(0, 6))
    def store(self, pod: str, tier: str, chain: list[int], start: int, stop: int) -> None:
        """Part of a chain is stored."""
        self.index.add(pod, tier, chain[start:stop])
        self.copies.update((pod, tier, key) for key in chain[start:stop])

    @rule(
        pod=pods, tier=tiers, chain=chains, order=st.sampled_from(["head", "tail", "random"]), data=st.data()
    )
    def remove(self, pod: str, tier: str, chain: list[int], order: str, data: st.DataObject) -> None:
        """Part of a chain is removed, from either end or at random."""
        keys = chain if order == "head" else chain[::-1]
        if order == "random":
            keys = data.draw(st.permutations(chain))
        for key in keys[: data.draw(st.integers(0, len(keys)))]:
            ended = self.index.remove(pod, tier, [key])
            held = self.copies[pod, tier, key]
            self.copies[pod, tier, key] = max(0, held - 1)
            if self.capacity > len(CHAINS) * 10:
                assert ended == (held == 1)

    @rule(pod=pods)
    def clear(self, pod: str) -> None:
        """A pod's cache is emptied."""
        self.index.clear_pod(pod)
        for held in tuple(self.copies):
            if held[0] == pod:
                del self.copies[held]

    @rule(chain=chains, assumed=st.dictionaries(pods, st.sets(st.integers(0, 5))))
    def match(self, chain: list[int], assumed: dict[str, set[int]]) -> None:
        """All pods are matched."""
        found = self.index.match(chain, PODS, assumed)
        assert found.keys() == set(PODS)
        for pod in PODS:
            expected = self.expected(chain, pod, assumed.get(pod, set()))
            if self.capacity > len(CHAINS) * 10:
                assert Counter(found[pod].blocks_by_tier) == Counter(expected)
            assert found[pod].blocks <= len(expected), "held less, told more"
            assert found[pod].blocks == sum(found[pod].blocks_by_tier.values())
            assert found[pod].weighted_blocks == pytest.approx(WEIGHTS.sum(found[pod].blocks_by_tier))

    def expected(self, chain: list[int], pod: str, assumed: set[int]) -> list[str]:
        """The tier of each block of the unbroken prefix."""
        prefix = []
        for position, key in enumerate(chain):
            held = [tier for tier in TIERS if self.copies[pod, tier, key] > 0]
            if position not in assumed and not held:
                break
            prefix.append("gpu" if position in assumed else held[0])
        return prefix

    @invariant()
    def sizes_agree(self) -> None:
        """The index tells its true size."""
        stats = self.index.stats()
        assert stats.blocks <= self.capacity
        if self.capacity > len(CHAINS) * 10:
            held = [key for key, copies in self.copies.items() if copies > 0]
            assert stats.blocks == len({key for _, _, key in held})
            assert stats.holdings == len({(pod, key) for pod, _, key in held})


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_equals_its_naive_mirror(backend: str) -> None:
    """Whatever is stored, removed and cleared, an index tells what the mirror tells, or less when full."""
    machine = type("Machine", (IndexMachine,), {"backend": backend})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
