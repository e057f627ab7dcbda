"""Images, sounds and films within a prompt's token ids, as vLLM's token-in-token-out protocol tells of them.

What that tells comes in (MultiModalFeatures of entrypoints/scale_out/token_in_token_out/protocol.py in 0.32;
the fields that are read have been the same since 0.18), checked items go out. Knows no HTTP and no keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec

from indexer.extras import MultimodalItem
from tokenization import TokenIds

# What the placeholders within one prompt stand for, in its order.
PromptMedia: TypeAlias = tuple[MultimodalItem, ...]


class Place(msgspec.Struct):
    """Where an item's placeholder tokens stand."""

    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(gt=0)]


class MediaFeatures(msgspec.Struct):
    """By modality the hashes of its items and their places, in the same order."""

    mm_hashes: dict[str, list[str]] | None = None
    mm_placeholders: dict[str, list[Place]] | None = None


def known_part(ids: TokenIds, features: MediaFeatures | None) -> tuple[TokenIds, PromptMedia]:
    """A prompt's ids as far as they are known, and the items within them.

    Placeholders are the same for every image; the hashes, which are in the engine's events too, tell them
    apart. Where there are none, or where items lie within one another (a film and its sound, of which events
    do not name both in every block), the prompt is known up to its first item.

    Raises:
        ValueError: What is told of the items cannot be.
    """
    features = features or MediaFeatures()
    items = tuple(sorted(_items(features), key=lambda item: item.offset))
    if items and max(item.offset + item.length for item in items) > len(ids):
        raise ValueError(f"mm_placeholders: an item is not within the prompt's {len(ids)} tokens")
    nested = any(second.offset < first.offset + first.length for first, second in pairwise(items))
    if items and (features.mm_hashes is None or nested):
        # A view would keep all of them where this is kept.
        return ids[: items[0].offset].copy(), ()
    return ids, items


def _items(features: MediaFeatures) -> Iterator[MultimodalItem]:
    """The items, with empty hashes where none are told."""
    places, hashes = features.mm_placeholders or {}, features.mm_hashes
    if hashes is None:
        hashes = {modality: [""] * len(items) for modality, items in places.items()}
    told = [{modality: len(items) for modality, items in side.items()} for side in (places, hashes)]
    if told[0] != told[1]:
        raise ValueError("mm_hashes and mm_placeholders: must have as many items of the same modalities")
    for modality, items in places.items():
        for identifier, place in zip(hashes[modality], items, strict=True):
            yield MultimodalItem(identifier, place.offset, place.length)
