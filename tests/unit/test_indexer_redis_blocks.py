"""Reading what lies in Redis, whoever wrote it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexer.redis_blocks import BEST_TIER, PackedBlocks, read_lives, read_references, read_tiers

entries = st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 65_535))


def packed(blocks: list[list[tuple[int, int, int]]]) -> PackedBlocks:
    """Blocks of entries of (life, tier, references), as a script packs them."""
    words = b"".join(
        life.to_bytes(5, "little") + bytes([tier]) + references.to_bytes(2, "little")
        for block in blocks
        for life, tier, references in block
    )
    return PackedBlocks.of(np.array([len(block) for block in blocks], "<u4").tobytes(), words)


@given(
    st.lists(st.lists(entries, max_size=6), max_size=6),
    st.lists(st.integers(1, 6) | st.integers(1 << 33, 1 << 39), unique=True, max_size=5),
    st.integers(0, 3),
)
def test_entries_are_read_one_by_one(
    blocks: list[list[tuple[int, int, int]]], lives: list[int], nobody: int
) -> None:
    """Each entry of an asked life, of a known tier, with references, is one bit, and nothing else is."""
    asked = np.array([*lives, *[0] * nobody], np.int64)
    read = read_tiers(packed(blocks), asked, 8)
    assert read.shape == (len(asked), len(blocks))
    for row, life in enumerate(asked.tolist()):
        for place, block in enumerate(blocks):
            tiers = {tier for who, tier, copies in block if who == life and who and copies and tier < 8}
            assert read[row, place] == sum(1 << tier for tier in tiers)


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=8), st.integers(0, 8))
def test_any_words_are_read(words: list[int], first: int) -> None:
    """Garbage is passed over, or taken for entries; nothing fails."""
    entries = [min(first, len(words)), max(0, len(words) - first)]
    blocks = PackedBlocks(np.array(entries), np.array(words, np.uint64))
    assert read_tiers(blocks, np.array([1, 0, 1 << 39], np.int64), 8).shape == (3, 2)
    assert (read_references(blocks, 1, 8) >= 0).all()


def test_references_are_read_by_tier() -> None:
    """Copies of one life, for each tier and block."""
    blocks = [[(5, 0, 3), (6, 0, 9), (5, 1, 65_535)], [], [(5, 1, 1)]]
    assert read_references(packed(blocks), 5, 3).tolist() == [[3, 0, 0], [65_535, 0, 1], [0, 0, 0]]


def test_a_view_ends_at_its_deadline() -> None:
    """A record counts while somebody keeps it up; one that is no record never does."""
    records = [
        b"7 ab 1001",
        b"8 ab 1000",
        None,
        b"",
        b"7 ab",
        b"x ab 2000",
        b"9 zz 2000",
        b"1" * 40 + b" ab 2000",
    ]
    assert read_lives(records, 1000).tolist() == [7, 0, 0, 0, 0, 0, 0, 0]


@given(st.binary(max_size=40))
def test_any_record_is_read(record: bytes) -> None:
    """Whatever lies there, a life comes out, or none."""
    assert read_lives([record], 0)[0] >= 0


def test_the_best_tier_is_the_one_with_the_least_number() -> None:
    """Of a set of tiers the first counts; of none, none."""
    assert BEST_TIER[[0, 0b1, 0b110, 0b1000_0000]].tolist() == [255, 0, 1, 7]
