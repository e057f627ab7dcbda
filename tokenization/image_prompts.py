"""A chat with images, whose ids are known around them: the rendered text and the images in, all ids out.

Images come in the order in which engines number them. Those in `data:` URLs are read as vLLM's loader reads
them (multimodal/media/connector.py): base64, of any media type. Nothing is ever fetched, and what is decoded
is bounded. Knows no HTTP, and nothing of what an image's name means to an engine's cache.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tokenization.chat_messages import medium_of
from tokenization.encoder import TokenIds
from tokenization.image_headers import ImageSize, image_size, may_be_turned
from tokenization.image_rules import ImageRule, joined

_IMAGE = "image"
# Other parts hold what engines make of images elsewhere.
_WITH_URL = ("image_url", "input_image")
_SCHEME, _BASE64 = "data:", ";base64"
_MEDIA_TYPE_CHARS_MAX = 256
# First the head that is nearly always enough, then one with large metadata in front. Whole groups of base64.
_HEADS_CHARS = (4 * (16 << 10), 4 * (1 << 20))


class ImagePart(NamedTuple):
    """One image."""

    url: object  # what the part has for one; anything
    # The name that the client gives the image. vLLM takes it for the image's hash, unless the request or the
    # engine's flags set options of its processor (multimodal/processing/inputs.py in 0.32).
    uuid: str | None


def image_parts(messages: object) -> list[ImagePart] | None:
    """All images; None where there are other media, or an image is in a form that has no place here."""
    parts: list[ImagePart] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            medium = medium_of(part)
            if medium is None:
                continue
            if medium != _IMAGE or not _has_url(part):
                return None
            url, uuid = part.get("image_url"), part.get("uuid")
            url = url.get("url") if isinstance(url, dict) else url
            parts.append(ImagePart(url, uuid if isinstance(uuid, str) and uuid else None))
    return parts


def size_of_url(url: object, *, upright: bool) -> ImageSize | None:
    """The size of the image in a URL; None where it is elsewhere, or not surely known.

    Args:
        upright: Whether it matters which side is which: then an image is not known that may be shown turned.
    """
    if not isinstance(url, str) or not url.startswith(_SCHEME):
        return None
    comma = url.find(",", len(_SCHEME), len(_SCHEME) + _MEDIA_TYPE_CHARS_MAX)
    if comma < 0 or not url[:comma].endswith(_BASE64):
        return None
    for chars in _HEADS_CHARS:
        head = _decoded(url[comma + 1 : comma + 1 + chars])
        whole = len(url) <= comma + 1 + chars
        size = image_size(head)
        known = size is not None and (
            not upright or size.width == size.height or not may_be_turned(head, whole=whole)
        )
        if known or whole:
            break
    return size if known else None


def _has_url(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return "image_url" in part and (kind is None or kind in _WITH_URL)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


# To look into an image costs some 50 us.
_SIZES_MAX = 128
# No model has such a context; a client could ask for any number of images.
_IDS_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Where an image's ids stand."""

    offset: int  # of the first
    length: int  # how many; they may share an id with the text, or the image, behind
    uuid: str | None  # the client's name for it


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt's ids as far as they are known."""

    ids: TokenIds  # all of them, or those in front of the first image that nobody here knows the size of
    images: tuple[PlacedImage, ...]  # those within `ids`
    text_tokens: int = 0  # what stands behind `ids` beside images
    unknown_images: int = 0  # how many images stand behind `ids`


def expanded(rule: ImageRule, ids: TokenIds, parts: Sequence[ImagePart]) -> ExpandedPrompt | None:
    """A prompt with its images; None where its text has other places for images than the images'.

    Engines then fill those that come first, or refuse the prompt.
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
