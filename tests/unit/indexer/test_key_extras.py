"""Extra keys: an engine's events and a request's items are packed to the same bytes."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import TokenError
from indexer.keys import MultimodalItem, extras_of_prompt, pack, read_extras
from indexer.wire.events import BlockStored
from tests.support.indexer.views import OnePod, read_json, stored

PLACEHOLDER = 151_655


def engine_entries(
    items: list[MultimodalItem], block_size: int, blocks: int
) -> list[list[tuple[str, int]] | None]:
    """Return extra keys as in vLLM's events: each block lists the items that it overlaps, with offsets."""
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
    """Return an image item."""
    return MultimodalItem(identifier, offset, length)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[MultimodalItem], int]:
    """Draw items that do not overlap, and the length of their prompt."""
    gaps = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), max_size=5))
    items: list[MultimodalItem] = []
    end = 0
    for number, (gap, length) in enumerate(gaps):
        items.append(item(draw(st.sampled_from(["a", "b", f"c{number}"])), end + gap, length))
        end += gap + length
    return items, end + draw(st.integers(0, 80))


@given(prompts(), st.sampled_from([(16, 16), (64, 16), (16, 64), (32, 32), (8, 64)]))
@settings(deadline=None)
def test_a_prompts_extras_equal_those_of_the_events(
    prompt: tuple[list[MultimodalItem], int], sizes: tuple[int, int]
) -> None:
    """For any block sizes of engine and index the request's extras equal those of the events."""
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
    """Prompts with equal placeholders share keys up to the first block with a different item."""
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
    """Return the items of an llm-d vector, without hashes that lack an offset and vice versa."""
    return [
        MultimodalItem(identifier, place["Offset"], place["Length"])
        for modality, places in vector["mm_placeholders"].items()
        for identifier, place in zip(vector["mm_hashes"][modality], places, strict=False)
    ]


@pytest.mark.parametrize("vector", read_json("llmd_extra_features.json.gz"), ids=lambda vector: vector["id"])
def test_items_count_from_the_block_in_which_llmd_has_them_first(vector: dict[str, Any]) -> None:
    """In each of llm-d's cases the items count in the same order in the block in which they begin.

    llm-d repeats an item in every block that it overlaps. Here it counts once: later blocks depend on it by
    their chain, and events do not report where it ends.
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


def test_kinds_of_extras_are_not_confused() -> None:
    """Texts, items, digests and their offsets are packed unambiguously, also when concatenated."""
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


def test_an_adapters_name_is_not_an_image() -> None:
    """The adapter's name, first in every entry, is part of the root key but not of any block's extras."""
    event = BlockStored([1, 2], None, [0] * 8, 4, lora_name="sql", extra_keys=[["sql"], ["sql", ["a", 0]]])
    extras = read_extras(event, starts_prompt=True)
    assert extras.of_index_blocks(1, 4) == [b"", pack([["a", 0]], 0, 4)]
    assert extras.cache_salt is None


def test_an_item_before_its_prompt_is_rejected() -> None:
    """An item that begins before a run is rejected if the run starts a prompt, but not if it has a parent."""
    event = BlockStored([1, 2], None, [0] * 8, 4, extra_keys=[None, [["a", -5]]])
    with pytest.raises(TokenError, match="multimodal item begins at token -1 of its prompt"):
        read_extras(event, starts_prompt=True)
    assert not any(read_extras(event, starts_prompt=False).of_index_blocks(1, 4))
    with pytest.raises(TokenError, match="offset must be within"):
        extras_of_prompt([item("a", -1, 4)], 4, 8)


def test_a_partial_block_has_no_extras() -> None:
    """An item after the last full block changes no key."""
    assert extras_of_prompt([item("a", 9, 4)], 4, 11) == ()
    assert [*chain(*extras_of_prompt([item("a", 3, 40)], 4, 11))] == [*pack([["a", 3]], 0, 4)]
