"""A chat with images, whose ids are known around them: the rendered text and the images in, all ids out.

Knows no HTTP, and nothing of what an image's name means to an engine's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenization.fast_encoder import TokenIds
from tokenization.image_parts import ImagePart, size_of_url
from tokenization.image_rules import ImageRule, joined

# To look into an image costs some 50 us.
_SIZES_MAX = 128
# No model has such a context; a client could ask for any number of images.
_IDS_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Where an image's ids stand.

    Attributes:
        offset: Of the first.
        length: How many; they may share an id with the text, or the image, behind.
        uuid: The client's name for it.
    """

    offset: int
    length: int
    uuid: str | None


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt's ids as far as they are known.

    Attributes:
        ids: All of them, or those in front of the first image that nobody here knows the size of.
        images: Those within `ids`.
        text_tokens: What stands behind `ids` beside images.
        unknown_images: How many images stand behind `ids`.
    """

    ids: TokenIds
    images: tuple[PlacedImage, ...]
    text_tokens: int = 0
    unknown_images: int = 0


def expanded(rule: ImageRule, ids: TokenIds, parts: Sequence[ImagePart]) -> ExpandedPrompt | None:
    """A prompt with its images; None where its text has other places for images than the images'.

    Engines then fill those that come first, or refuse the prompt.

    Args:
        rule: What images become.
        ids: Of the rendered text.
        parts: The images.
    """
    places = np.flatnonzero(ids == rule.placeholder_id).tolist()
    if len(places) != len(parts):
        return None
    known: list[TokenIds] = []
    tokens = len(ids)
    for part in parts[: None if not rule.reads_size else _SIZES_MAX]:
        size = size_of_url(part.url, upright=rule.upright) if rule.reads_size else None
        expansion = rule.expand(size)
        if expansion is None:
            break
        known.append(expansion)
        tokens += len(expansion)
        if tokens > _IDS_MAX:
            return None
    return _placed(rule, ids, parts, places, known)


def _placed(
    rule: ImageRule,
    ids: TokenIds,
    parts: Sequence[ImagePart],
    places: Sequence[int],
    known: Sequence[TokenIds],
) -> ExpandedPrompt:
    """Puts what is known of the first images into their places."""
    pieces: list[TokenIds] = []
    offsets: list[int] = []
    at = tokens = 0
    for place, expansion in zip(places, known, strict=False):
        pieces += ids[at:place], expansion
        offsets.append(tokens + place - at)
        tokens = offsets[-1] + len(expansion)
        at = place + 1
    end = places[len(known)] if len(known) < len(places) else len(ids)
    whole, starts = joined(np.concatenate((*pieces, ids[at:end])), rule.joins, offsets)
    images = tuple(
        PlacedImage(start, len(expansion), part.uuid)
        for start, expansion, part in zip(starts, known, parts, strict=False)
    )
    unknown = len(places) - len(known)
    return ExpandedPrompt(whole, images, len(ids) - end - unknown, unknown)
