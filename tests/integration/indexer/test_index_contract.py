"""Contract of an index; see indexer.index.index.FlatIndex."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.indexer.held_copies import references
from tests.support.indexer.index_backends import TIERS, Index, keys

CHAIN = keys(range(101, 111))
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def test_a_prefix_ends_at_the_first_hole(index: Index) -> None:
    """Blocks after a missing one do not count."""
    index.add(A, "gpu", np.delete(CHAIN, 3))
    assert index.match(CHAIN, [A])[A].cached_blocks == 3


def test_without_the_first_block_nothing_matches(index: Index) -> None:
    """A pod that lost the head of a chain cannot use the rest."""
    index.add(A, "gpu", CHAIN)
    index.remove(A, "gpu", CHAIN[:1])
    assert index.match(CHAIN, [A])[A].cached_blocks == 0


def test_every_asked_pod_is_answered_for(index: Index) -> None:
    """A match contains exactly the queried pods, known or not."""
    index.add(A, "gpu", CHAIN[:2])
    index.add(B, "gpu", CHAIN)
    assert {pod: match.cached_blocks for pod, match in index.match(CHAIN, [A, "unknown"]).items()} == {
        A: 2,
        "unknown": 0,
    }


def test_pods_are_matched_independently(index: Index) -> None:
    """A pod that drops out early does not shorten another one's match."""
    index.add(A, "gpu", CHAIN[:1])
    index.add(B, "gpu", CHAIN)
    found = index.match(CHAIN, [A, B])
    assert (found[A].cached_blocks, found[B].cached_blocks) == (1, len(CHAIN))


def test_no_keys_match_nothing(index: Index) -> None:
    """A prompt without a full block has no cached prefix."""
    match = index.match(CHAIN[:0], [A])[A]
    assert (match.cached_blocks, dict(match.blocks_by_tier), match.weighted_blocks) == (0, {}, 0.0)


def test_each_physical_copy_counts(index: Index) -> None:
    """A block stored twice is held until it is removed twice."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "gpu", CHAIN[-1:])
    assert index.remove(A, "gpu", CHAIN[-1:]) == 0
    assert index.match(CHAIN, [A])[A].cached_blocks == len(CHAIN)
    assert index.remove(A, "gpu", CHAIN[-1:]) == 1
    assert index.match(CHAIN, [A])[A].cached_blocks == len(CHAIN) - 1


def test_a_new_block_does_not_inherit_the_copies_of_one_that_left(make: Callable[[int], Index]) -> None:
    """A block in the slot of an evicted block with several copies starts with one copy."""
    index = make(2)
    for chain in ([1, 2], [1, 2], [1, 3]):
        index.add(A, "gpu", keys(chain))
    assert references(index, [A]) == {(A, "gpu", 1): 3, (A, "gpu", 3): 1}


def test_a_key_named_twice_in_one_call_counts_twice(index: Index) -> None:
    """Copies are counted within a call as between calls."""
    index.add(A, "gpu", keys([7, 7]))
    assert index.remove(A, "gpu", keys([7, 7])) == 1
    assert index.match(keys([7]), [A])[A].cached_blocks == 0


def test_removing_what_is_not_held_changes_nothing(index: Index) -> None:
    """Removing an unknown block, tier or pod changes nothing."""
    index.add(A, "gpu", CHAIN[:1])
    assert index.remove(A, "cpu", CHAIN[:1]) == index.remove(B, "gpu", CHAIN[:1]) == 0
    assert index.remove(A, "gpu", CHAIN[1:]) == 0
    assert index.match(CHAIN, [A])[A].cached_blocks == 1
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


def test_an_unknown_tier_has_the_weight_of_the_slowest_one(index: Index) -> None:
    """A medium without a weight has the weight of host memory and ranks after it."""
    index.add(A, "other", CHAIN[:2])
    index.add(A, "cpu", CHAIN[:1])
    match = index.match(CHAIN, [A])[A]
    assert dict(match.blocks_by_tier) == {"cpu": 1, "other": 1}
    assert match.weighted_blocks == pytest.approx(1.6)


def test_tiers_are_removed_separately(index: Index) -> None:
    """A block that leaves device memory is still held in host memory."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "cpu", CHAIN[:5])
    assert index.remove(A, "gpu", CHAIN) == len(CHAIN)
    assert dict(index.match(CHAIN, [A])[A].blocks_by_tier) == {"cpu": 5}


def test_speculative_blocks_count_as_the_best_tier(index: Index) -> None:
    """Speculative blocks fill holes and outrank a slower tier of their pod until they are removed."""
    for pod in (A, B):
        index.add(pod, "cpu", keys([101, 102, 104, 105]))
    index.add(A, "speculative", CHAIN[1:3])
    found = index.match(CHAIN, [A, B])
    assert dict(found[A].blocks_by_tier) == {"cpu": 3, "speculative": 2}
    assert found[A].weighted_blocks == pytest.approx(2 + 3 * 0.8)
    assert found[B].cached_blocks == 2
    assert index.remove(A, "speculative", CHAIN[1:3]) == 2
    assert index.match(CHAIN, [A])[A].cached_blocks == 2


def test_confirmed_blocks_outrank_speculative_ones(index: Index) -> None:
    """A block that is speculative and held on the GPU counts as held."""
    index.add(A, "speculative", CHAIN)
    index.add(A, "gpu", CHAIN[:4])
    assert dict(index.match(CHAIN, [A])[A].blocks_by_tier) == {"gpu": 4, "speculative": 6}


def test_a_table_agrees_with_its_arrays(index: Index) -> None:
    """The mapping and the arrays of a match have the same values."""
    index.add(A, "gpu", CHAIN[:3])
    index.add(A, "cpu", CHAIN[3:5])
    index.add(B, "other", CHAIN)
    for pods in ([A, B, "unknown", A], frozenset({A, B, "unknown"})):
        found = index.match(CHAIN, pods)
        assert set(found) == set(pods)
        assert len(found) == 3
        assert found.cached_blocks.dtype == found.blocks_by_tier.dtype == np.int32
        assert found.blocks_by_tier.shape == (3, len(TIERS.names))
        assert (found.blocks_by_tier.sum(axis=1) == found.cached_blocks).all()
        for pod, match in found.items():
            counts = found.blocks_by_tier[found.rows[pod]].tolist()
            assert match.cached_blocks == found.cached_blocks[found.rows[pod]]
            assert match.weighted_blocks == pytest.approx(TIERS.weighted(counts))
            assert {name: n for name, n in zip(TIERS.names, counts, strict=True) if n} == dict(
                match.blocks_by_tier
            )


def test_held_blocks_have_a_bit_per_tier(index: Index) -> None:
    """Each block has a bit for each tier that holds it, also after holes."""
    index.add(A, "gpu", CHAIN[[0, 2]])
    index.add(A, "cpu", CHAIN[[2, 3]])
    index.add(B, "gpu", CHAIN)
    gpu, cpu = (1 << TIERS.number(tier) for tier in ("gpu", "cpu"))
    held = index.held(CHAIN, A)
    assert held.dtype == np.uint8
    assert held.tolist() == [gpu, 0, gpu | cpu, cpu, 0, 0, 0, 0, 0, 0]
    assert not index.held(CHAIN, "unknown").any()
    assert index.held(CHAIN[:0], A).shape == (0,)


def test_any_text_names_a_pod(index: Index) -> None:
    """A holder's name may contain any character that JSON allows."""
    for pod in ("", "a b:{}*\n", "10.0.0.1:8000#1", "ü\ud800\0"):
        index.add(pod, "gpu", CHAIN)
        assert index.match(CHAIN, [pod, A])[pod].cached_blocks == len(CHAIN)
        assert index.clear_pod(pod) == len(CHAIN)


def test_no_key_is_special(index: Index) -> None:
    """The lowest and the highest key are stored and matched like any other."""
    extremes = keys([0, (1 << 64) - 1, 1, 1 << 63])
    index.add(A, "gpu", extremes)
    assert index.match(extremes, [A])[A].cached_blocks == 4
    assert index.remove(A, "gpu", extremes) == 4
    assert index.stats().blocks == 0


def test_any_number_of_pods_hold_a_block(index: Index) -> None:
    """The hundredth holder of a block matches like the first."""
    pods = [f"10.0.1.{number}:8000" for number in range(100)]
    for held, pod in enumerate(pods):
        index.add(pod, "gpu", CHAIN[: 1 + held % 10])
    found = index.match(CHAIN, pods)
    assert [found[pod].cached_blocks for pod in pods] == [1 + held % 10 for held in range(100)]
    assert index.stats().holdings == sum(1 + held % 10 for held in range(100))
    for pod in pods[:99]:
        index.clear_pod(pod)
    assert index.match(CHAIN, pods).cached_blocks.sum() == 10
    assert index.stats().holdings == 10


def test_a_pod_that_stored_nothing_holds_nothing(index: Index) -> None:
    """A new pod does not appear to hold blocks that 64 other pods hold."""
    for number in range(64):
        index.add(f"10.0.1.{number}:8000", "gpu", CHAIN)
    assert references(index, [A]) == {}


def test_a_few_pods_continue_from_blocks_that_many_hold(index: Index) -> None:
    """A prefix continues from blocks with many holders to blocks with few; each counts in its tier."""
    pods = [f"10.0.1.{number}:8000" for number in range(10)]
    for pod in pods:
        index.add(pod, "gpu", CHAIN[:2])
    index.add(pods[3], "gpu", CHAIN[2:4])
    index.add(pods[7], "cpu", CHAIN[2:3])
    found = index.match(CHAIN, pods)
    assert [found[pod].cached_blocks for pod in pods] == [2, 2, 2, 4, 2, 2, 2, 3, 2, 2]
    assert dict(found[pods[3]].blocks_by_tier) == {"gpu": 4}
    assert dict(found[pods[7]].blocks_by_tier) == {"gpu": 2, "cpu": 1}


def test_long_chains_are_like_short_ones(make: Callable[[int], Index]) -> None:
    """A call that is processed in parts has the same effect as several short ones."""
    index = make(20_000)
    chain = keys(range(5000, 8000))
    index.add(A, "gpu", chain)
    index.add(B, "cpu", chain[:1024])
    index.add(B, "gpu", chain[1025:])
    found = index.match(chain, [A, B])
    assert (found[A].cached_blocks, found[B].cached_blocks) == (3000, 1024)
    assert np.count_nonzero(index.held(chain, B)) == 2999
    assert index.remove(A, "gpu", chain[1500:]) == 1500
    assert index.match(chain, [A])[A].cached_blocks == 1500
    assert index.clear_pod(B) == 2999
    assert index.stats().holdings == 1500


def test_clearing_a_pod_spares_the_others(index: Index) -> None:
    """Clearing removes one pod's blocks from all tiers and keeps those of other pods."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "cpu", CHAIN)
    index.add(B, "gpu", CHAIN[:4])
    assert index.clear_pod(A) == len(CHAIN)
    found = index.match(CHAIN, [A, B])
    assert (found[A].cached_blocks, found[B].cached_blocks) == (0, 4)
    assert index.clear_pod(A) == 0


def test_sizes_are_reported(index: Index) -> None:
    """A block counts once, its holdings count per pod, and both return to 0."""
    index.add(A, "gpu", CHAIN)
    index.add(A, "cpu", CHAIN)
    index.add(B, "gpu", CHAIN[:4])
    stats = index.stats()
    assert (stats.blocks, stats.holdings, stats.evicted_blocks) == (10, 14, 0)
    assert stats.capacity_blocks >= 1000
    index.clear_pod(A)
    index.remove(B, "gpu", CHAIN[:4])
    stats = index.stats()
    assert (stats.blocks, stats.holdings) == (0, 0)


def test_the_capacity_holds(make: Callable[[int], Index]) -> None:
    """The index never keeps more blocks than its capacity, and counts the evicted ones."""
    index = make(64)
    capacity = index.stats().capacity_blocks
    for start in range(0, 6400, 64):
        index.add(A, "gpu", keys(range(start, start + 64)))
        assert index.stats().blocks <= capacity
    stats = index.stats()
    assert stats.blocks > 50
    assert stats.evicted_blocks == 6400 - stats.blocks


def test_a_call_above_the_capacity_keeps_its_first_blocks(make: Callable[[int], Index]) -> None:
    """Blocks of one call never evict one another; the end of the call is dropped."""
    index = make(40)
    index.add(B, "gpu", CHAIN)
    capacity = index.stats().capacity_blocks
    long = keys(range(1000, 1000 + 2 * capacity))
    index.add(A, "gpu", long)
    stats = index.stats()
    assert stats.blocks <= capacity
    assert stats.evicted_blocks == 2 * capacity + 10 - stats.blocks
    assert np.count_nonzero(index.held(long, A)) == index.match(long, [A])[A].cached_blocks > 0


def test_matched_blocks_are_evicted_last(make: Callable[[int], Index]) -> None:
    """A full index evicts the least recently used blocks."""
    index = make(100)
    index.add(A, "gpu", CHAIN)
    for start in range(1000, 2000, 10):
        index.match(CHAIN, [A])
        index.add(B, "gpu", keys(range(start, start + 10)))
    assert index.match(CHAIN, [A])[A].cached_blocks == len(CHAIN)


def test_a_full_index_drops_the_tail_of_a_chain_first(make: Callable[[int], Index]) -> None:
    """Eviction removes a chain's tail first, so the rest stays usable."""
    index = make(20)
    other = keys(range(1000, 1014))
    index.add(A, "gpu", CHAIN)
    index.add(B, "gpu", other)
    for chain, pod in ((CHAIN, A), (other, B)):
        held = index.held(chain, pod)
        assert np.count_nonzero(held) == index.match(chain, [pod])[pod].cached_blocks > 0
    assert index.match(CHAIN, [A])[A].cached_blocks == 6


def test_held_does_not_count_as_use(make: Callable[[int], Index]) -> None:
    """Only adding and matching protect a block from eviction."""
    index = make(20)
    index.add(A, "gpu", CHAIN)
    index.add(B, "gpu", keys(range(1000, 1010)))
    index.held(CHAIN, A)
    references(index, [A])
    index.add(B, "gpu", keys(range(2000, 2010)))
    assert index.match(CHAIN, [A])[A].cached_blocks == 0


def test_an_evicted_block_may_still_be_removed(make: Callable[[int], Index]) -> None:
    """Removing an evicted block is a no-op."""
    index = make(1)
    index.add(A, "gpu", keys([1]))
    index.add(A, "gpu", keys([2]))
    assert index.remove(A, "gpu", keys([1])) == 0
    assert index.match(keys([2]), [A])[A].cached_blocks == 1


def test_threads_do_not_disturb_each_other(index: Index) -> None:
    """Concurrent writers of different pods and readers leave each pod's own blocks."""
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
    assert {pod: match.cached_blocks for pod, match in index.match(CHAIN, [A, B]).items()} == {A: 3, B: 7}
