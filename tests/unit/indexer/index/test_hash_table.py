"""Hash table of the flat index: insertion, deletion and incremental growth."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexer.index.hash_table import behind, delete, empty_table, grow_table, home_of, insert
from tests.support.depth import examples

MOST = 5_000
# Few distinct hashes make entries pile up; the least and the largest ones meet around the table's end.
few_hashes = st.sampled_from([0, 1, 0xFFFF_FFFF, 0xFFFF_FFFE, 0x8000_0000])
hashes = few_hashes | st.integers(0, 0xFFFF_FFFF)

Entry = tuple[int, int]


def buckets_of(table: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the buckets in use, without reserved ones."""
    return table[8 : 8 + int(table[0])]


def is_growing(table: NDArray[np.uint64]) -> bool:
    """Return whether some entries have not moved yet."""
    return int(table[2]) > 0


def found(table: NDArray[np.uint64], bits: int) -> list[Entry]:
    """Return all entries with these bits that are reachable from their home bucket."""
    entries = []
    place = home_of(np.uint64(bits), table)
    while table[place]:
        if int(table[place]) >> 32 == bits:
            entries.append((bits, int(table[place]) & 0xFFFF_FFFF))
        place = behind(place, table)
    return entries


def holds(table: NDArray[np.uint64], held: list[Entry]) -> bool:
    """Return whether the table contains exactly these entries and finds each of them."""
    each = Counter(entry for bits in {bits for bits, _ in held} for entry in found(table, bits))
    return each == Counter(held) and np.count_nonzero(table[8:]) == len(held)


@given(
    seed=st.integers(0, 1000),
    turns=st.lists(
        st.tuples(st.integers(1, 600), st.lists(hashes, max_size=20), st.integers(0, 100)),
        min_size=1,
        max_size=10,
    ),
    usual=st.sampled_from([100, 2000, MOST]),
)
@settings(max_examples=examples(25), deadline=None)
def test_a_table_grows_under_its_entries(
    seed: int, turns: list[tuple[int, list[int], int]], usual: int
) -> None:
    """During growth every entry is found exactly once, also with concurrent insertions and deletions."""
    rng = np.random.default_rng(seed)
    table = empty_table(MOST)
    held: list[Entry] = []
    for number, (more, chosen, fewer) in enumerate(turns):
        bits = [*rng.integers(0, 1 << 32, more, np.uint64).tolist(), *chosen][: MOST - len(held)]
        grow_table(table, len(held) + len(bits), usual)
        for place, each in enumerate(bits):
            held.append((each, number * 10_000 + place + 1))
            insert(table, np.uint64(each), held[-1][1])
        for _ in range(min(fewer, len(held) - 1)):
            place = int(rng.integers(len(held)))
            held[place], held[-1] = held[-1], held[place]
            each, gone = held.pop()
            delete(table, np.uint64(each), gone)
        assert holds(table, held)


def test_a_table_grows_incrementally_and_no_more_than_needed() -> None:
    """A call moves at most a dozen entries per new one, and the load stays between 1/2 and 3/4."""
    rng = np.random.default_rng(2)
    table = empty_table(1 << 20)
    run, held, growing = 500, [], 0
    for hashes_of_run in rng.integers(0, 1 << 32, (130, run), np.uint64):
        before = table.copy()
        grow_table(table, len(held) + run, 1 << 20)
        # An entry that moves changes two buckets.
        moved = np.count_nonzero(before[8:] != table[8:]) / 2
        growing += is_growing(table)
        assert len(held) < 20_000 or moved < 12 * run + 1024
        for bits in hashes_of_run:
            held.append((int(bits), len(held) + 1))
            insert(table, bits, len(held))
        assert len(held) < 20_000 or 0.5 < len(held) / len(buckets_of(table)) < 0.76
    assert growing > 10, "it grew at once"
    assert holds(table, held)


def test_a_table_does_not_grow_beyond_its_usual_size() -> None:
    """With the usual maximum of entries the load is three quarters."""
    table = empty_table(MOST)
    grow_table(table, 3000, 3000)
    assert len(buckets_of(table)) == 4001
    grow_table(table, 3001, 3000)
    assert len(buckets_of(table)) > 4001


@pytest.mark.parametrize("bits", [0, 0x8000_0000, 0xFFFF_FFFF])
def test_entries_of_one_hash_are_all_found(bits: int) -> None:
    """Entries of one hash are all found during growth, also across the table's end."""
    table = empty_table(MOST)
    held: list[Entry] = []
    while len(held) < 1500:
        grow_table(table, len(held) + 50, MOST)
        for _ in range(50):
            held.append((bits, len(held) + 1))
            insert(table, np.uint64(bits), len(held))
        assert holds(table, held)
