"""Prompts that are given as token ids, and media items within them.

Media items within given token ids are described as in vLLM's token-in-token-out protocol (MultiModalFeatures
of entrypoints/scale_out/token_in_token_out/protocol.py in 0.32; these fields have not changed since 0.18).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from indexer.keys import MultimodalItem
from router.prompts.request import (
    LONGER_THAN_CONTEXT,
    MEDIA,
    PROMPTS_MAX,
    TOO_MANY_PROMPTS,
    PromptMedia,
    PromptTokens,
    RouteRequest,
    known,
    unknown,
)
from tokenization import ExpandedPrompt, TokenIds

# Fields of bodies with token ids: vLLM's /inference/v1/generate, and SGLang's /generate.
_FEATURES = "features"
_PLACED_BY_ENGINE = ("content_parts", "image_data", "audio_data", "video_data")
_WITH_MEDIA = frozenset((_FEATURES, *_PLACED_BY_ENGINE))
# Estimated tokens of media of unknown size and the text behind it: about one image.
MEDIA_TOKENS = 1000


def rejected_early(request: RouteRequest, context_tokens: int | None) -> PromptTokens | None:
    """Return a degraded result for a completion that is too long or has too many prompts, else None."""
    prompt = request.body.get("prompt")
    if type(prompt) is not list or not prompt:
        return None
    first = type(prompt[0])
    if first in (str, list):
        return unknown(request, TOO_MANY_PROMPTS) if len(prompt) > PROMPTS_MAX else None
    if first is not int or context_tokens is None or "truncate_prompt_tokens" in request.body:
        return None
    return PromptTokens((), len(prompt), LONGER_THAN_CONTEXT) if len(prompt) > context_tokens else None


def given_token_ids(request: RouteRequest) -> PromptTokens | None:
    """Return the prompts of a completions request that are given as token ids; None if they are not."""
    if "truncate_prompt_tokens" in request.body:
        return None
    prompt = request.body.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return None
    lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    if any(set(map(type, ids)) - {int} for ids in lists):
        return None
    try:
        prompts = tuple(np.frombuffer(array("I", ids), np.uint32) for ids in lists)
    except (OverflowError, ValueError):
        return None
    if request.body.keys() & _WITH_MEDIA:
        return _with_media(request, prompts)
    return known(prompts)


def with_features(prompts: Sequence[TokenIds], features: Sequence[MediaFeatures | None]) -> PromptTokens:
    """Return prompts with the media items that `features` describes, up to the first item without a hash.

    Raises:
        ValueError: The description of the items is inconsistent.
    """
    return _known_parts(list(map(_known_part, prompts, features)), sum(map(len, prompts)))


def _known_parts(parts: Sequence[tuple[TokenIds, PromptMedia]], total: int) -> PromptTokens:
    """Return the result for (known token ids, media items) per prompt, with `total` tokens in all."""
    prompts, media = tuple(ids for ids, _ in parts), tuple(items for _, items in parts)
    partial = MEDIA if sum(map(len, prompts)) < total else None
    return PromptTokens(prompts, total, partial=partial, media=media if any(media) else ())


def with_images(prompt: ExpandedPrompt) -> PromptTokens:
    """Return a chat's token ids up to the first image without a hash, with the images before it.

    An image may share its first token with the last one of the previous image, when newlines merge. A block
    with that token ends after the previous image starts, so vLLM's events name both images in it.
    """
    items: list[MultimodalItem] = []
    end = 0
    ids = prompt.ids
    for image in prompt.images:
        if image.uuid is None or image.offset < end - 1:
            ids = ids[: image.offset]
            break
        end = image.offset + image.length
        items.append(MultimodalItem(image.uuid, image.offset, image.length))
    total = len(prompt.ids) + prompt.text_tokens + MEDIA_TOKENS * prompt.unknown_images
    return _known_parts([(ids, tuple(items))], total)


def _with_media(request: RouteRequest, prompts: tuple[TokenIds, ...]) -> PromptTokens:
    """Return given token ids with media items, whose positions only vLLM's `features` describe."""
    if any(request.body.get(name) for name in _PLACED_BY_ENGINE):
        return unknown(request, "unsupported_prompt")
    try:
        features = msgspec.convert(request.body.get(_FEATURES), MediaFeatures | None)
        return with_features(prompts, [features] * len(prompts))
    except ValueError:
        # The engine will reject the request with a better error.
        return unknown(request, "unsupported_prompt")


class _Place(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(gt=0)]


class MediaFeatures(msgspec.Struct):
    """Hashes and placeholder ranges of media items by modality, in the same order."""

    mm_hashes: dict[str, list[str]] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None


# Prepares the type for `msgspec.convert`, see CONTRIBUTING.md.
msgspec.json.Decoder(MediaFeatures)


def _known_part(ids: TokenIds, features: MediaFeatures | None) -> tuple[TokenIds, PromptMedia]:
    """Return the known prefix of a prompt's token ids, and the media items within it."""
    features = features or MediaFeatures()
    items = tuple(sorted(_items(features), key=lambda item: item.offset))
    if items and max(item.offset + item.length for item in items) > len(ids):
        raise ValueError(f"mm_placeholders: an item is not within the prompt's {len(ids)} tokens")
    nested = any(second.offset < first.offset + first.length for first, second in pairwise(items))
    if items and (features.mm_hashes is None or nested):
        # Only hashes tell images apart, and events do not name overlapping items (a video and its audio) in
        # every block. Copy, because a slice would keep all ids in memory.
        return ids[: items[0].offset].copy(), ()
    return ids, items


def _items(features: MediaFeatures) -> Iterator[MultimodalItem]:
    """Yield the items, with empty hashes if none are given."""
    places, hashes = features.mm_placeholders or {}, features.mm_hashes
    if hashes is None:
        hashes = {modality: [""] * len(items) for modality, items in places.items()}
    counts = [{modality: len(items) for modality, items in side.items()} for side in (places, hashes)]
    if counts[0] != counts[1]:
        raise ValueError("mm_hashes and mm_placeholders: must have as many items of the same modalities")
    for modality, items in places.items():
        for identifier, place in zip(hashes[modality], items, strict=True):
            yield MultimodalItem(identifier, place.offset, place.length)
