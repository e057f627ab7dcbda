"""The images of a chat, in the order in which engines number them, and the sizes of those in `data:` URLs.

As vLLM's loader reads such URLs (multimodal/media/connector.py): base64, of any media type. Nothing is ever
fetched, and what is decoded is bounded. Knows no templates and no models.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

from tokenization.chat_messages import medium_of
from tokenization.image_headers import ImageSize, image_size, may_be_turned

_IMAGE = "image"
# Other parts hold what engines make of images elsewhere.
_WITH_URL = ("image_url", "input_image")
_SCHEME, _BASE64 = "data:", ";base64"
_MEDIA_TYPE_CHARS_MAX = 256
# First the head that is nearly always enough, then one with large metadata in front. Whole groups of base64.
_HEADS_CHARS = (4 * (16 << 10), 4 * (1 << 20))


class ImagePart(NamedTuple):
    """One image.

    Attributes:
        url: What the part has for one; anything.
        uuid: The name that the client gives the image. vLLM takes it for the image's hash, unless the request
            or the engine's flags set options of its processor (multimodal/processing/inputs.py in 0.32).
    """

    url: object
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
        url: What the part has for one.
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
