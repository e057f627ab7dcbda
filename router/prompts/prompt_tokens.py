"""What is known of a request's prompts: a request and a tokenizer in, ids, a count and reasons out.

Images, sounds and films within given ids are told as in vLLM's token-in-token-out protocol
(MultiModalFeatures of entrypoints/scale_out/token_in_token_out/protocol.py in 0.32; the fields that are read
have been the same since 0.18). Knows no deadlines.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from indexer.keys import MultimodalItem, extras_of_prompt
from router.errors import RequestError
from router.prompts.request import RequestKind, RouteRequest
from tokenization import (
    ExpandedPrompt,
    MediaPromptError,
    PromptError,
    PromptLimits,
    PromptTokenizer,
    PromptTooLongError,
    TokenIds,
    UnsupportedPromptError,
    chat_prefix,
    chat_prompt,
    completion_prompts,
    image_chat,
    messages_as_chat,
    responses_as_chat,
)

# Why a prompt that every engine will refuse is routed by load alone.
LONGER_THAN_CONTEXT = "longer_than_context"

# Why a request with more than PROMPTS_MAX prompts is routed by load alone.
TOO_MANY_PROMPTS = "too_many_prompts"

PROMPTS_MAX = 64  # each is tokenized, and matched while other picks wait, on its own
MEDIA = "media"  # why only the beginning of a prompt is known: behind it stands an image, a sound or a film

# Fields of bodies with token ids: vLLM's /inference/v1/generate, and SGLang's /generate.
_FEATURES = "features"
_PLACED_BY_ENGINE = ("content_parts", "image_data", "audio_data", "video_data")
_WITH_MEDIA = frozenset((_FEATURES, *_PLACED_BY_ENGINE))
_AS_CHAT = (RequestKind.MESSAGES, RequestKind.RESPONSES)
_BYTES_PER_TOKEN = 4
# What media and the text behind count for where their true number is not known: about one image.
_MEDIA_TOKENS = 1000


# What the placeholders within one prompt stand for, in its order.
PromptMedia: TypeAlias = tuple[MultimodalItem, ...]


class PromptTokens(msgspec.Struct, frozen=True):
    """Facts known of a request's prompts."""

    prompts: tuple[TokenIds, ...]  # token ids of every prompt (completions may hold several); empty: unknown
    total: int  # number of prompt tokens, estimated from the body's size when unknown
    degraded: str | None = None  # why the ids are not known; None when they are
    partial: str | None = None  # why `prompts` are only beginnings; None when they are whole
    media: tuple[PromptMedia, ...] = ()  # what placeholders in `prompts` stand for, by prompt; empty: none

    def extras(self, block_tokens: int) -> Sequence[Sequence[bytes]]:
        """What the blocks of each prompt depend on besides tokens, see `extras_of_prompt`."""
        if not self.media:
            return ((),) * len(self.prompts)
        return [
            extras_of_prompt(items, block_tokens, len(ids))
            for ids, items in zip(self.prompts, self.media, strict=True)
        ]

    def without_media(self) -> PromptTokens:
        """The same, known up to the first of `media` alone; the total stays what it is."""
        if not self.media:
            return self
        prompts = tuple(
            ids[: items[0].offset] if items else ids
            for ids, items in zip(self.prompts, self.media, strict=True)
        )
        return PromptTokens(prompts, self.total, self.degraded, MEDIA)


def known_prompts(request: RouteRequest, tokenizer: PromptTokenizer, limits: PromptLimits) -> PromptTokens:
    """Tokenizes a request.

    Raises:
        PromptError: The prompt is not what the API allows, too long, or has no ids here.
        ManyItemsError: A chat has more messages and parts than `limits.items_max`.
    """
    body, template = request.body, tokenizer.chat_template
    if request.kind is RequestKind.COMPLETIONS:
        return known(tuple(completion_prompts(body, tokenizer, limits)))
    # Engines turn the other APIs into chats; what chat it is depends on the template.
    if template is not None and request.kind is RequestKind.MESSAGES:
        body = messages_as_chat(body, template.effort_without_thinking)
    elif template is not None and request.kind is RequestKind.RESPONSES:
        body = responses_as_chat(body)
    try:
        return known((chat_prompt(body, tokenizer, limits),))
    except MediaPromptError:
        if (images := image_chat(body, tokenizer, limits)) is not None:
            return _with_images(images)
    ids = chat_prefix(body, tokenizer)
    return PromptTokens((ids,), len(ids) + _MEDIA_TOKENS, partial=MEDIA)


def too_much(request: RouteRequest, context_tokens: int | None) -> PromptTokens | None:
    """Tell of a request seen at once to be of no use to any cache; None for any other request."""
    prompt = request.body.get("prompt")
    if request.kind is not RequestKind.COMPLETIONS or type(prompt) is not list or not prompt:
        return None
    first = type(prompt[0])
    if first in (str, list):
        return unknown(request, TOO_MANY_PROMPTS) if len(prompt) > PROMPTS_MAX else None
    if first is not int or context_tokens is None or "truncate_prompt_tokens" in request.body:
        return None
    return PromptTokens((), len(prompt), LONGER_THAN_CONTEXT) if len(prompt) > context_tokens else None


def given(request: RouteRequest) -> PromptTokens | None:
    """A completions prompt that is given as ids, which needs no tokenizer; None for any other."""
    if request.kind is not RequestKind.COMPLETIONS or "truncate_prompt_tokens" in request.body:
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


def known(prompts: tuple[TokenIds, ...]) -> PromptTokens:
    """Prompts that are known to the end."""
    return PromptTokens(prompts, sum(map(len, prompts)))


def with_features(prompts: Sequence[TokenIds], features: Sequence[MediaFeatures | None]) -> PromptTokens:
    """Prompts known as far as their media are; `features` are told for each.

    Raises:
        ValueError: What is told of the items cannot be.
    """
    return _known_parts(list(map(_known_part, prompts, features)), sum(map(len, prompts)))


def _known_parts(parts: Sequence[tuple[TokenIds, PromptMedia]], total: int) -> PromptTokens:
    """Prompts of `total` tokens, each known as far as its ids go, with the media items within these."""
    prompts, media = tuple(ids for ids, _ in parts), tuple(items for _, items in parts)
    partial = MEDIA if sum(map(len, prompts)) < total else None
    return PromptTokens(prompts, total, partial=partial, media=media if any(media) else ())


def unknown(request: RouteRequest, reason: str) -> PromptTokens:
    """A request whose prompts are not known, and why."""
    return PromptTokens((), request.body_bytes // _BYTES_PER_TOKEN, reason)


def refused(request: RouteRequest, error: PromptError) -> PromptTokens:
    """What a tokenizer's refusal means for the pick.

    Raises:
        RequestError: 400, when the prompt is not what the API allows.
    """
    match error:
        case PromptTooLongError():
            return unknown(request, LONGER_THAN_CONTEXT)
        case UnsupportedPromptError():
            return unknown(request, "unsupported_prompt")
    if request.kind in _AS_CHAT:
        # The engine, which knows that API, will say so better than we.
        return unknown(request, "unsupported_prompt")
    raise RequestError(400, str(error), error.param) from error


def _with_images(prompt: ExpandedPrompt) -> PromptTokens:
    """A chat's ids up to its first image that has no name, and the items within them.

    An image may share its first id with the last one of the image in front: newlines that became one. A block
    with that id ends no earlier than the image in front does, so vLLM's events name both images in it.
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
    total = len(prompt.ids) + prompt.text_tokens + _MEDIA_TOKENS * prompt.unknown_images
    return _known_parts([(ids, tuple(items))], total)


def _with_media(request: RouteRequest, prompts: tuple[TokenIds, ...]) -> PromptTokens:
    """Ids that come with media items, of which only vLLM's `features` tell what stands where."""
    if any(request.body.get(name) for name in _PLACED_BY_ENGINE):
        return unknown(request, "unsupported_prompt")
    try:
        features = msgspec.convert(request.body.get(_FEATURES), MediaFeatures | None)
        return with_features(prompts, [features] * len(prompts))
    except ValueError:
        # The engine will refuse it, and say so better.
        return unknown(request, "unsupported_prompt")


class _Place(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(gt=0)]


class MediaFeatures(msgspec.Struct):
    """By modality the hashes of its items and their places, in the same order."""

    mm_hashes: dict[str, list[str]] | None = None
    mm_placeholders: dict[str, list[_Place]] | None = None


def _known_part(ids: TokenIds, features: MediaFeatures | None) -> tuple[TokenIds, PromptMedia]:
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
