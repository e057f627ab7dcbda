"""The size of an image that a chat's part holds within itself: a `data:` URL in, a size out.

As vLLM's loader reads such URLs (multimodal/media/connector.py): base64, of any media type. Nothing is ever
fetched, and what is decoded is bounded. Knows no chats and no models.
"""

from __future__ import annotations

import base64
import binascii

from tokenization.image_headers import ImageSize, image_size, may_be_turned

_SCHEME, _BASE64 = "data:", ";base64"
_MEDIA_TYPE_CHARS_MAX = 256
# First the head that is nearly always enough, then one with large metadata in front. Whole groups of base64.
_HEADS_CHARS = (4 * (16 << 10), 4 * (1 << 20))


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


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
