"""Typed extras: what an engine's events tell of a block, and the same bytes from a request's items."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import TokenError
from indexer.keys import MultimodalItem, extras_of_prompt, pack, read_extras
from indexer.wire.events import BlockStored
from tests.unit.indexer_support import OnePod, read_json, stored

PLACEHOLDER = 151_655


def engine_entries(
    items: list[MultimodalItem], block_size: int, blocks: int
) -> list[list[tuple[str, int]] | None]:
    """Extra keys as vLLM's events carry them: each block names the items that it overlaps, with offsets."""
    entries: list[list[tuple[str, int]] | None] = []
    for start in range(0, blocks * block_size, block_size):
        found = [
            (item.identifier, item.offset - start)
            for item in sorted(items, key=lambda item: item.offset)
            if item.offset < start + block_size and item.offset + item.length > start
        ]
        entries.append(found or None)
    return entries


def item(identifier: str, offset: int, length: int) -> MultimodalItem:
    """One image."""
    return MultimodalItem(identifier, offset, length)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[MultimodalItem], int]:
    """Items that do not overlap, and the length of their prompt."""
    gaps = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), max_size=5))
    items: list[MultimodalItem] = []
    end = 0
    for number, (gap, length) in enumerate(gaps):
        items.append(item(draw(st.sampled_from(["a", "b", f"c{number}"])), end + gap, length))
        end += gap + length
    return items, end + draw(st.integers(0, 80))


@given(prompts(), st.sampled_from([(16, 16), (64, 16), (16, 64), (32, 32), (8, 64)]))
@settings(deadline=None)
def test_a_prompt_finds_what_an_engines_events_told(
    prompt: tuple[list[MultimodalItem], int], sizes: tuple[int, int]
) -> None:
    """Whatever the block sizes of engine and index, the request's extras are those of the events."""
    (items, prompt_tokens), (block_size, block_tokens) = prompt, sizes
    blocks = prompt_tokens // block_size
    pod = OnePod(block_tokens=block_tokens)
    tokens = [PLACEHOLDER] * prompt_tokens
    if blocks:
        keys = [list(entry) if entry else None for entry in engine_entries(items, block_size, blocks)]
        run = stored(
            list(range(1, blocks + 1)),
            tokens[: blocks * block_size],
            block_size=block_size,
            extra_keys=[entry and [list(pair) for pair in entry] for entry in keys],
        )
        assert not pod.apply(run).skipped
    found = pod.match(pod.keys(tokens, extras=extras_of_prompt(items, block_tokens, prompt_tokens)))
    assert found.cached_blocks == blocks * block_size // block_tokens


@given(prompts(), prompts())
@settings(deadline=None)
def test_other_items_have_other_keys_from_where_they_begin(
    first: tuple[list[MultimodalItem], int], second: tuple[list[MultimodalItem], int]
) -> None:
    """Prompts of equal placeholders agree up to the first block in which an item differs, and never after."""
    pod = OnePod(block_tokens=16)
    tokens = [PLACEHOLDER] * 160
    keys = [
        pod.keys(tokens, extras=extras_of_prompt(items, 16, 160)).tolist() for items, _ in (first, second)
    ]
    begins = [{(item.identifier, item.offset) for item in items} for items, _ in (first, second)]
    differs = min((offset // 16 for _, offset in begins[0] ^ begins[1]), default=10)
    same = min(differs, 10)
    assert keys[0][:same] == keys[1][:same]
    assert not set(keys[0][same:]) & set(keys[1][same:])


def as_items(vector: dict[str, Any]) -> list[MultimodalItem]:
    """The items of one of llm-d's vectors: a hash without a place, or a place without a hash, is none."""
    return [
        MultimodalItem(identifier, place["Offset"], place["Length"])
        for modality, places in vector["mm_placeholders"].items()
        for identifier, place in zip(vector["mm_hashes"][modality], places, strict=False)
    ]


@pytest.mark.parametrize("vector", read_json("llmd_extra_features.json.gz"), ids=lambda vector: vector["id"])
def test_items_count_from_the_block_in_which_llmd_has_them_first(vector: dict[str, Any]) -> None:
    """Each of llm-d's cases: the same items, in the same order, in the block in which they begin.

    llm-d repeats an item in every block that it overlaps. Here it is named once: the chain carries it on, and
    an event does not tell where it ends.
    """
    extras = extras_of_prompt(as_items(vector), vector["block_size"], vector["num_tokens"])
    begun: set[str] = set()
    for block, named in enumerate(vector["out"] or []):
        new = [identifier for identifier in named or [] if identifier not in begun]
        begun.update(new)
        places = [place for place in as_items(vector) if place.identifier in new]
        expected = b"".join(
            pack([[place.identifier, place.offset - block * vector["block_size"]]], 0, vector["block_size"])
            for identifier in new
            for place in places
            if place.identifier == identifier
        )
        assert (extras[block] if extras else b"") == expected
        assert bool(expected) == bool(new)


def test_nothing_stands_for_a_thing_of_another_kind() -> None:
    """Texts, items, digests and their places each have their own form, also when they are joined."""
    packed = [
        pack(items, start, 16)
        for items, start in [
            ([], 0),
            (["a"], 0),
            (["a"], 16),
            ([b"a"], 0),
            ([b"a"], -16),
            ([["a", 0]], 0),
            ([["a", 1]], 0),
            ([["a", 0], ["b", 2]], 0),
            ([["ab", 0]], 0),
            (["a", "b"], 0),
            (["ab"], 0),
        ]
    ]
    assert len(set(packed)) == len(packed)
    assert not [(one, other) for one, other in pairwise(packed[1:]) if one == other]


def test_an_adapters_name_is_no_image() -> None:
    """The adapter's name leads every entry of its blocks; it is part of the root and of no block."""
    event = BlockStored([1, 2], None, [0] * 8, 4, lora_name="sql", extra_keys=[["sql"], ["sql", ["a", 0]]])
    extras = read_extras(event, starts_prompt=True)
    assert extras.of_index_blocks(1, 4) == [b"", pack([["a", 0]], 0, 4)]
    assert extras.cache_salt is None


def test_an_item_in_front_of_its_prompt_is_refused() -> None:
    """A run from a prompt's start cannot continue an item; one with a parent can."""
    event = BlockStored([1, 2], None, [0] * 8, 4, extra_keys=[None, [["a", -5]]])
    with pytest.raises(TokenError, match="multimodal item begins at token -1 of its prompt"):
        read_extras(event, starts_prompt=True)
    assert not any(read_extras(event, starts_prompt=False).of_index_blocks(1, 4))
    with pytest.raises(TokenError, match="offset must be within"):
        extras_of_prompt([item("a", -1, 4)], 4, 8)


def test_a_partial_block_has_no_extras() -> None:
    """An item behind the last full block touches no key."""
    assert extras_of_prompt([item("a", 9, 4)], 4, 11) == ()
    assert [*chain(*extras_of_prompt([item("a", 3, 40)], 4, 11))] == [*pack([["a", 3]], 0, 4)]
