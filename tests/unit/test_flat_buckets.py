"""Tables of the flat index: whatever comes, goes and grows, each entry is found from its home."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from indexer.index.hash_table import behind, delete, empty_table, home_of, insert, room_for
from tests.support.depth import examples

MOST = 5_000
# Of few hashes entries pile up; the least and the largest ones meet around the table's end.
few_hashes = st.sampled_from([0, 1, 0xFFFF_FFFF, 0xFFFF_FFFE, 0x8000_0000])
hashes = few_hashes | st.integers(0, 0xFFFF_FFFF)

Entry = tuple[int, int]


def buckets_of(table: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The buckets in use, without what is reserved."""
    return table[8 : 8 + int(table[0])]


def is_growing(table: NDArray[np.uint64]) -> bool:
    """Whether some entries have not moved yet."""
    return int(table[2]) > 0


def found(table: NDArray[np.uint64], bits: int) -> list[Entry]:
    """All entries with these bits that are found from their home."""
    entries = []
    place = home_of(np.uint64(bits), table)
    while table[place]:
        if int(table[place]) >> 32 == bits:
            entries.append((bits, int(table[place]) & 0xFFFF_FFFF))
        place = behind(place, table)
    return entries


def holds(table: NDArray[np.uint64], held: list[Entry]) -> bool:
    """Whether the table holds these entries, each to be found, and nothing else."""
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
    """At every stage of every growth all entries are found, none twice, whatever comes and goes meanwhile."""
    rng = np.random.default_rng(seed)
    table = empty_table(MOST)
    held: list[Entry] = []
    for number, (more, chosen, fewer) in enumerate(turns):
        bits = [*rng.integers(0, 1 << 32, more, np.uint64).tolist(), *chosen][: MOST - len(held)]
        room_for(table, len(held) + len(bits), usual)
        for place, each in enumerate(bits):
            held.append((each, number * 10_000 + place + 1))
            insert(table, np.uint64(each), held[-1][1])
        for _ in range(min(fewer, len(held) - 1)):
            place = int(rng.integers(len(held)))
            held[place], held[-1] = held[-1], held[place]
            each, gone = held.pop()
            delete(table, np.uint64(each), gone)
        assert holds(table, held)


def test_a_table_grows_bit_by_bit_and_no_more_than_it_must() -> None:
    """A call moves a dozen entries at most for each new one; half to three quarters of it are full."""
    rng = np.random.default_rng(2)
    table = empty_table(1 << 20)
    run, held, growing = 500, [], 0
    for hashes_of_run in rng.integers(0, 1 << 32, (130, run), np.uint64):
        before = table.copy()
        room_for(table, len(held) + run, 1 << 20)
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


def test_a_table_does_not_grow_beyond_what_will_be() -> None:
    """With as many entries as there will mostly be three quarters are full."""
    table = empty_table(MOST)
    room_for(table, 3000, 3000)
    assert len(buckets_of(table)) == 4001
    room_for(table, 3001, 3000)
    assert len(buckets_of(table)) > 4001


@pytest.mark.parametrize("bits", [0, 0x8000_0000, 0xFFFF_FFFF])
def test_entries_of_one_hash_are_all_found(bits: int) -> None:
    """However long a run of entries is, and wherever it lies, also around the end, growing keeps it whole."""
    table = empty_table(MOST)
    held: list[Entry] = []
    while len(held) < 1500:
        room_for(table, len(held) + 50, MOST)
        for _ in range(50):
            held.append((bits, len(held) + 1))
            insert(table, np.uint64(bits), len(held))
        assert holds(table, held)
