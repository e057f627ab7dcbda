"""What every index backend must do; see indexer.index.Index. A new backend is one more line in BACKENDS."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from indexer.index import Index
from indexer.reference_index import ReferenceIndex
from indexer.tiers import TierWeights

WEIGHTS = TierWeights({"gpu": 1.0, "cpu": 0.8})
BACKENDS: dict[str, Callable[[int], Index]] = {
    "reference": lambda capacity: ReferenceIndex(capacity, WEIGHTS),
}
CHAIN = list(range(101, 111))
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Index]:
    """Makes an index of the backend under test with the given capacity."""
    return BACKENDS[request.param]


@pytest.fixture
def index(make: Callable[[int], Index]) -> Index:
    """An index that nothing here fills up."""
    return make(1000)


def test_a_prefix_ends_at_the_first_hole(index: Index) -> None:
    """Blocks behind a missing one do not count."""
    index.add(A, "gpu", [*CHAIN[:3], *CHAIN[4:]])
    assert index.match(CHAIN, [A])[A].blocks == 3


def test_without_the_first_block_nothing_matches(index: Index) -> None:
    """A pod that lost the head of a chain cannot use the rest."""
    index.add(A, "gpu", CHAIN)
    index.remove(A, "gpu", CHAIN[:1])
    assert index.match(CHAIN, [A])[A].blocks == 0


def test_every_asked_pod_is_answered_for(index: Index) -> None:
    """The answer has the asked pods, known or not, and no others."""
    index.add(A, "gpu", CHAIN[:2])
    index.add(B, "gpu", CHAIN)
    assert {pod: match.blocks for pod, match in index.match(CHAIN, [A, "unknown"]).items()} == {
        A: 2,
        "unknown": 0,
    }


def test_pods_are_matched_independently(index: Index) -> None:
    """A pod that drops out early does not shorten another one's match."""
    index.add(A, "gpu", CHAIN[:1])
    index.add(B, "gpu", CHAIN)
    found = index.match(CHAIN, [A, B])
    assert (found[A].blocks, found[B].blocks) == (1, len(CHAIN))


def test_no_keys_match_nothing(index: Index) -> None:
    """A prompt without a full block has no cached prefix."""
    match = index.match([], [A])[A]
    assert (match.blocks, dict(match.blocks_by_tier), match.weighted_blocks) == (0, {}, 0.0)


def test_each_physical_copy_counts(index: Index) -> None:
    """A block announced twice is held until it was removed twice."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "gpu", CHAIN[-1:])
    assert index.remove(A, "gpu", CHAIN[-1:]) == 0
    assert index.match(CHAIN, [A])[A].blocks == len(CHAIN)
    assert index.remove(A, "gpu", CHAIN[-1:]) == 1
    assert index.match(CHAIN, [A])[A].blocks == len(CHAIN) - 1


def test_a_key_named_twice_in_one_call_counts_twice(index: Index) -> None:
    """Copies are counted within a call as between calls."""
    index.add(A, "gpu", [7, 7])
    assert index.remove(A, "gpu", [7, 7]) == 1
    assert index.match([7], [A])[A].blocks == 0


def test_what_is_not_held_is_removed_without_harm(index: Index) -> None:
    """Removing an unknown block, tier or pod changes nothing."""
    index.add(A, "gpu", CHAIN[:1])
    assert index.remove(A, "cpu", CHAIN[:1]) == index.remove(B, "gpu", CHAIN[:1]) == 0
    assert index.remove(A, "gpu", CHAIN[1:]) == 0
    assert index.match(CHAIN, [A])[A].blocks == 1
    assert index.stats().blocks == 1


def test_the_fastest_tier_counts(index: Index) -> None:
    """A block held in two tiers is counted once, in the one with the higher weight."""
    index.add(A, "cpu", CHAIN[:4])
    index.add(A, "gpu", CHAIN[:1])
    match = index.match(CHAIN, [A])[A]
    assert dict(match.blocks_by_tier) == {"gpu": 1, "cpu": 3}
    assert match.weighted_blocks == pytest.approx(1.0 + 3 * 0.8)


def test_a_weighted_score_is_never_rounded(index: Index) -> None:
    """One block in host memory is worth 0.8 blocks, not 0."""
    index.add(A, "cpu", CHAIN[:1])
    assert index.match(CHAIN, [A])[A].weighted_blocks == pytest.approx(0.8)


def test_an_unknown_tier_is_credited_as_the_slowest_one(index: Index) -> None:
    """A medium that nobody gave a weight is not better than host memory, and loses against it."""
    index.add(A, "other", CHAIN[:2])
    index.add(A, "cpu", CHAIN[:1])
    match = index.match(CHAIN, [A])[A]
    assert dict(match.blocks_by_tier) == {"cpu": 1, "other": 1}
    assert match.weighted_blocks == pytest.approx(1.6)


def test_tiers_are_removed_apart(index: Index) -> None:
    """A block that leaves device memory is still held in host memory."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "cpu", CHAIN[:5])
    assert index.remove(A, "gpu", CHAIN) == len(CHAIN)
    assert dict(index.match(CHAIN, [A])[A].blocks_by_tier) == {"cpu": 5}


def test_assumed_blocks_count_as_held_on_the_gpu(index: Index) -> None:
    """Assumed positions fill holes and outrank a slower tier, of their own pod only."""
    for pod in (A, B):
        index.add(pod, "cpu", [*CHAIN[:2], *CHAIN[3:5]])
    found = index.match(CHAIN, [A, B], {A: {1, 2}, "not asked": {0, 1}})
    assert dict(found[A].blocks_by_tier) == {"cpu": 3, "gpu": 2}
    assert found[B].blocks == 2


def test_assumed_blocks_are_not_remembered(index: Index) -> None:
    """What was assumed in one call is not held in the next."""
    assert index.match(CHAIN, [A], {A: set(range(10))})[A].blocks == 10
    assert index.match(CHAIN, [A])[A].blocks == 0
    assert index.stats().blocks == 0


def test_clearing_a_pod_spares_the_others(index: Index) -> None:
    """One pod's blocks go in all tiers; another's stay."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "cpu", CHAIN)
    index.add(B, "gpu", CHAIN[:4])
    assert index.clear_pod(A) == len(CHAIN)
    found = index.match(CHAIN, [A, B])
    assert (found[A].blocks, found[B].blocks) == (0, 4)
    assert index.clear_pod(A) == 0


def test_sizes_are_told(index: Index) -> None:
    """Blocks are counted once, holdings per pod, and both go back to 0."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "cpu", CHAIN)
    index.add(B, "gpu", CHAIN[:4])
    stats = index.stats()
    assert (stats.blocks, stats.holdings, stats.capacity_blocks, stats.evicted_blocks) == (10, 14, 1000, 0)
    index.clear_pod(A)
    index.remove(B, "gpu", CHAIN[:4])
    stats = index.stats()
    assert (stats.blocks, stats.holdings) == (0, 0)


def test_the_capacity_holds(make: Callable[[int], Index]) -> None:
    """However much is added, no more blocks than the capacity are kept, and the loss is told."""
    index = make(64)
    for start in range(0, 6400, 64):
        index.add(A, "gpu", range(start, start + 64))
        assert index.stats().blocks <= 64
    assert index.stats().evicted_blocks == 6400 - 64


def test_what_is_matched_outlives_what_is_not(make: Callable[[int], Index]) -> None:
    """When the index is full, the least recently used blocks go."""
    index = make(100)
    index.add(A, "gpu", CHAIN)
    for start in range(1000, 2000, 10):
        index.match(CHAIN, [A])
        index.add(B, "gpu", range(start, start + 10))
    assert index.match(CHAIN, [A])[A].blocks == len(CHAIN)


def test_a_full_index_drops_the_tail_of_a_chain_first(make: Callable[[int], Index]) -> None:
    """A chain that loses blocks keeps a usable head."""
    index = make(20)
    index.add(A, "gpu", CHAIN)
    index.add(B, "gpu", range(1000, 1014))
    assert index.match(CHAIN, [A])[A].blocks == 6


def test_an_evicted_block_may_still_be_removed(make: Callable[[int], Index]) -> None:
    """A removal of what the capacity took is a no-op, and so is the second copy's."""
    index = make(1)
    index.add(A, "gpu", [1])
    index.add(A, "gpu", [2])
    assert index.remove(A, "gpu", [1]) == 0
    assert index.match([2], [A])[A].blocks == 1


def test_threads_do_not_disturb_each_other(index: Index) -> None:
    """Writers of different pods and readers leave exactly what each writer left."""
    errors: list[BaseException] = []

    def write(pod: str, keep: int) -> None:
        try:
            for _ in range(50):
                index.add(pod, "gpu", CHAIN)
                index.clear_pod(pod)
                index.add(pod, "gpu", CHAIN[:keep])
                index.match(CHAIN, [A, B])
                index.remove(pod, "gpu", CHAIN[:keep])
            index.add(pod, "gpu", CHAIN[:keep])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=arguments) for arguments in ((A, 3), (B, 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {pod: match.blocks for pod, match in index.match(CHAIN, [A, B]).items()} == {A: 3, B: 7}
