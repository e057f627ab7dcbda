"""The images of a chat, in the order in which engines number them: decoded messages in, parts out.

Knows no templates, and looks into no image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenization.chat_messages import medium_of

_IMAGE = "image"
# Other parts hold what engines make of images elsewhere.
_WITH_URL = ("image_url", "input_image")


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


def _has_url(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return "image_url" in part and (kind is None or kind in _WITH_URL)
