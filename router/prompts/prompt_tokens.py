"""Token ids of a request's prompts, or the reason why they are unknown.

Media items within given token ids are described as in vLLM's token-in-token-out protocol (MultiModalFeatures
of entrypoints/scale_out/token_in_token_out/protocol.py in 0.32; these fields have not changed since 0.18).
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

# Reason to route by load alone: every engine will reject the prompt.
LONGER_THAN_CONTEXT = "longer_than_context"

# Reason to route by load alone: more than PROMPTS_MAX prompts.
TOO_MANY_PROMPTS = "too_many_prompts"

PROMPTS_MAX = 64  # each prompt is tokenized and matched separately while other picks wait
MEDIA = "media"  # reason why only a prefix of a prompt is known: an image, audio or video follows

# Fields of bodies with token ids: vLLM's /inference/v1/generate, and SGLang's /generate.
_FEATURES = "features"
_PLACED_BY_ENGINE = ("content_parts", "image_data", "audio_data", "video_data")
_WITH_MEDIA = frozenset((_FEATURES, *_PLACED_BY_ENGINE))
_AS_CHAT = (RequestKind.MESSAGES, RequestKind.RESPONSES)
_BYTES_PER_TOKEN = 4
# Estimated tokens of media of unknown size and the text behind it: about one image.
_MEDIA_TOKENS = 1000


# Media items of one prompt, in order of their placeholders.
PromptMedia: TypeAlias = tuple[MultimodalItem, ...]


class PromptTokens(msgspec.Struct, frozen=True):
    """Token ids of a request's prompts, as far as they are known."""

    prompts: tuple[TokenIds, ...]  # token ids per prompt (completions may have several); empty if unknown
    total: int  # number of prompt tokens, estimated from the body's size if unknown
    degraded: str | None = None  # why the ids are unknown; None if they are known
    partial: str | None = None  # why `prompts` are only prefixes; None if they are complete
    media: tuple[PromptMedia, ...] = ()  # media items per prompt; empty if there are none

    def extras(self, block_tokens: int) -> Sequence[Sequence[bytes]]:
        """Return, per prompt and block, the hash inputs besides tokens; see `extras_of_prompt`."""
        if not self.media:
            return ((),) * len(self.prompts)
        return [
            extras_of_prompt(items, block_tokens, len(ids))
            for ids, items in zip(self.prompts, self.media, strict=True)
        ]

    def without_media(self) -> PromptTokens:
        """Return a copy whose prompts end at their first media item; the total is unchanged."""
        if not self.media:
            return self
        prompts = tuple(
            ids[: items[0].offset] if items else ids
            for ids, items in zip(self.prompts, self.media, strict=True)
        )
        return PromptTokens(prompts, self.total, self.degraded, MEDIA)


def tokenize_prompts(request: RouteRequest, tokenizer: PromptTokenizer, limits: PromptLimits) -> PromptTokens:
    """Tokenize a request.

    Raises:
        PromptError: The prompt is invalid for its API, too long, or cannot be tokenized here.
        ManyItemsError: A chat has more messages and parts than `limits.items_max`.
    """
    body, template = request.body, tokenizer.coded or tokenizer.chat_template
    if request.kind is RequestKind.COMPLETIONS:
        return known(tuple(completion_prompts(body, tokenizer, limits)))
    # Engines convert the other APIs to chats; the result depends on the template.
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


def reads_kind(kind: RequestKind, tokenizer: PromptTokenizer) -> bool:
    """Return whether prompts of this API can be built: by the model's template, its library, or as text."""
    if tokenizer.chat_template is not None or kind is RequestKind.COMPLETIONS:
        return True
    return tokenizer.coded is not None and kind is not RequestKind.RESPONSES


def rejected_early(request: RouteRequest, context_tokens: int | None) -> PromptTokens | None:
    """Return a degraded result for a prompt that is obviously too long or has too many parts, else None."""
    prompt = request.body.get("prompt")
    if request.kind is not RequestKind.COMPLETIONS or type(prompt) is not list or not prompt:
        return None
    first = type(prompt[0])
    if first in (str, list):
        return unknown(request, TOO_MANY_PROMPTS) if len(prompt) > PROMPTS_MAX else None
    if first is not int or context_tokens is None or "truncate_prompt_tokens" in request.body:
        return None
    return PromptTokens((), len(prompt), LONGER_THAN_CONTEXT) if len(prompt) > context_tokens else None


def given_token_ids(request: RouteRequest) -> PromptTokens | None:
    """Return the prompts of a completions request that are given as token ids; None if they are not."""
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
    """Return the result for completely known prompts."""
    return PromptTokens(prompts, sum(map(len, prompts)))


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


def unknown(request: RouteRequest, reason: str) -> PromptTokens:
    """Return the result for a request whose prompts are unknown for this reason."""
    return PromptTokens((), request.body_bytes // _BYTES_PER_TOKEN, reason)


def rejected(request: RouteRequest, error: PromptError) -> PromptTokens:
    """Return the degraded result for a prompt that the tokenizer rejected.

    Raises:
        RequestError: 400: the prompt is invalid for its API.
    """
    match error:
        case PromptTooLongError():
            return unknown(request, LONGER_THAN_CONTEXT)
        case UnsupportedPromptError():
            return unknown(request, "unsupported_prompt")
    if request.kind in _AS_CHAT:
        # The engine implements this API and returns a better error.
        return unknown(request, "unsupported_prompt")
    raise RequestError(400, str(error), error.param) from error


def _with_images(prompt: ExpandedPrompt) -> PromptTokens:
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
    total = len(prompt.ids) + prompt.text_tokens + _MEDIA_TOKENS * prompt.unknown_images
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


def _known_part(ids: TokenIds, features: MediaFeatures | None) -> tuple[TokenIds, PromptMedia]:
    """Return the known prefix of a prompt's token ids, and the media items within it.

    Placeholder tokens are the same for all images; only the hashes, which events carry too, identify them.
    Without hashes, or with overlapping items (a video and its audio, which events do not both name in every
    block), the known prefix ends at the first item.

    Raises:
        ValueError: The description of the items is inconsistent.
    """
    features = features or MediaFeatures()
    items = tuple(sorted(_items(features), key=lambda item: item.offset))
    if items and max(item.offset + item.length for item in items) > len(ids):
        raise ValueError(f"mm_placeholders: an item is not within the prompt's {len(ids)} tokens")
    nested = any(second.offset < first.offset + first.length for first, second in pairwise(items))
    if items and (features.mm_hashes is None or nested):
        # Copy, because a slice would keep all ids in memory.
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
