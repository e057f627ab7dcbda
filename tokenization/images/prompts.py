"""A chat with images, whose ids are known around them: the rendered text and the images in, all ids out.

Images come in the order in which engines number them. Those in `data:` URLs are read as vLLM's loader reads
them (multimodal/media/connector.py): base64, of any media type; the size comes from the head of a PNG, JPEG,
GIF or WebP file, as Pillow reads it. Nothing is ever fetched, no pixel is decoded, and what is read is
bounded. Knows no HTTP, and nothing of what an image's name means to an engine's cache.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tokenization.apis.chat import medium_of
from tokenization.encoder import TokenIds
from tokenization.images.rules import ImageRule, ImageSize, joined

# Segments, blocks or filling bytes in front of the size; many times what metadata have.
_STEPS_MAX = 1 << 14
# Twice Pillow's MAX_IMAGE_PIXELS: it opens nothing larger, and so nor do engines.
_PIXELS_MAX = 2 * ((1 << 30) // 4 // 3)
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = struct.pack(">I", 13) + b"IHDR"
_JPEG = b"\xff\xd8\xff"
_GIFS = (b"GIF87a", b"GIF89a")
# Markers of a frame (ITU T.81, table B.1), and those that a length follows.
_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_SEGMENTS = frozenset((0xC4, 0xCC, 0xDB, 0xDC, 0xDD, 0xDF, *range(0xE0, 0xF0), 0xFE))
_ALONE = frozenset((0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
_SCAN, _FILL, _ESCAPED = 0xDA, 0xFF, 0x00
_LAYERS = (1, 3, 4)
# EXIF or XMP data are there.
_WEBP_METADATA = 0x0C
_GIF_IMAGE, _GIF_EXTENSION, _GIF_COMMENT = 0x2C, 0x21, 0xFE


def image_size(data: bytes) -> ImageSize | None:
    """The size of the image whose file begins with `data`."""
    try:
        size = _size(data)
    except (struct.error, IndexError):
        # The head ends too early.
        return None
    if size is None or not 0 < size[0] * size[1] <= _PIXELS_MAX:
        return None
    return ImageSize(*size)


def may_be_turned(data: bytes, *, whole: bool) -> bool:
    """Whether an image may say that it is to be shown turned, by EXIF or XMP data.

    Some releases of vLLM then turn it, others do not. PNG and GIF may say so anywhere, so their whole file
    has to be seen; JPEG says it in front of its pixels, and WebP in its head that it has such data.

    Args:
        data: What the file begins with.
        whole: Whether that is all of it.
    """
    try:
        if data.startswith(_JPEG):
            return _jpeg_may_be_turned(data)
        if data[:4] == b"RIFF":
            return data[12:16] == b"VP8X" and data[20] & _WEBP_METADATA != 0
    except (struct.error, IndexError):
        return True
    return not whole or _tells_turn(data)


def _size(data: bytes) -> tuple[int, int] | None:
    if data.startswith(_PNG):
        return struct.unpack_from(">II", data, 16) if data[8:16] == _PNG_HEADER else None
    if data.startswith(_JPEG):
        return _jpeg(data)
    if data.startswith(_GIFS):
        return _gif(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    return None


def _jpeg(data: bytes) -> tuple[int, int] | None:
    for marker, at in _markers(data):
        if marker in _FRAMES:
            bits, height, width, layers = struct.unpack_from(">BHHB", data, at + 2)
            return (width, height) if bits == 8 and layers in _LAYERS else None
    return None


def _jpeg_may_be_turned(data: bytes) -> bool:
    for marker, at in _markers(data):
        if marker == _SCAN:
            return False
        if marker in _SEGMENTS and _tells_turn(data[at : at + struct.unpack_from(">H", data, at)[0]]):
            return True
    return True


def _markers(data: bytes) -> Iterator[tuple[int, int]]:
    """A JPEG's segments up to its first scan, each with where its length stands."""
    at = 2
    for _ in range(_STEPS_MAX):
        at = data.find(b"\xff", at)
        if at < 0:
            return
        marker = data[at + 1]
        if marker == _FILL:
            at += 1
        elif marker == _ESCAPED or marker in _ALONE:
            at += 2
        elif marker in _SEGMENTS or marker in _FRAMES or marker == _SCAN:
            yield marker, at + 2
            length: int = struct.unpack_from(">H", data, at + 2)[0]
            if marker == _SCAN or length < 2:
                return
            at += 2 + length
        else:
            return


def _tells_turn(data: bytes) -> bool:
    """Whether there is what EXIF and XMP data begin with, in any of their forms."""
    return b"exif" in data.lower() or b"adobe" in data or b"rientation" in data


def _gif(data: bytes) -> tuple[int, int] | None:
    """The screen, made larger where the first image lies partly outside of it."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags % 8 + 1) if flags & 0x80 else 0)
    in_extension = False
    for _ in range(_STEPS_MAX):
        kind = data[at]
        if in_extension:
            # A block's length, or the extension's end.
            in_extension = kind > 0
            at += 1 + kind
        elif kind == _GIF_EXTENSION and (data[at + 2] or data[at + 1] == _GIF_COMMENT):
            in_extension = True
            at += 2
        elif kind == _GIF_IMAGE:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
            return max(width, left + columns), max(height, top + rows)
        else:
            # Also an extension that is empty: decoders do not agree on what follows.
            return None
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    """The canvas; of the three forms of a file (RFC 9649) the first chunk tells."""
    kind = data[12:16]
    if kind == b"VP8X":
        sides = struct.unpack_from("<HBHB", data, 24)
        return sides[0] + (sides[1] << 16) + 1, sides[2] + (sides[3] << 16) + 1
    if kind == b"VP8L" and data[20] == 0x2F:
        bits: int = struct.unpack_from("<I", data, 21)[0]
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and not data[20] & 1 and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return None


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
    """Place of an image's ids."""

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
