"""Image prompts: expand the image placeholders of a chat's token ids to the ids that engines use.

Images are in the order in which engines number them. `data:` URLs are decoded as by vLLM's loader
(multimodal/media/connector.py): base64, of any media type. The size is read from the header of a PNG, JPEG,
GIF or WebP file, as by Pillow. Nothing is fetched, no pixel is decoded, and the bytes read are limited.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tokenization.apis.chat import medium_of
from tokenization.encoder import TokenIds
from tokenization.images.rules import ImageRule, ImageSize, merge_ids

# Maximum of segments, blocks or fill bytes before the size; many times the number in real metadata.
_STEPS_MAX = 1 << 14
# Twice Pillow's MAX_IMAGE_PIXELS: Pillow, and thus engines, reject larger images.
_PIXELS_MAX = 2 * ((1 << 30) // 4 // 3)
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER = struct.pack(">I", 13) + b"IHDR"
_JPEG = b"\xff\xd8\xff"
_GIFS = (b"GIF87a", b"GIF89a")
# Markers of frames, of segments with a length, and without one (ITU T.81, table B.1).
_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_SEGMENTS = frozenset((0xC4, 0xCC, 0xDB, 0xDC, 0xDD, 0xDF, *range(0xE0, 0xF0), 0xFE))
_STANDALONE = frozenset((0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
_SCAN, _FILL, _ESCAPED = 0xDA, 0xFF, 0x00
_LAYERS = (1, 3, 4)
# Flags of a WebP file with EXIF or XMP data.
_WEBP_METADATA = 0x0C
_GIF_IMAGE, _GIF_EXTENSION, _GIF_COMMENT = 0x2C, 0x21, 0xFE


def image_size(data: bytes) -> ImageSize | None:
    """Return the size of the image whose file begins with `data`, or None if it is unknown."""
    try:
        size = _size(data)
    except (struct.error, IndexError):
        # The header is incomplete.
        return None
    if size is None or not 0 < size[0] * size[1] <= _PIXELS_MAX:
        return None
    return ImageSize(*size)


def may_be_rotated(data: bytes, *, whole: bool) -> bool:
    """Return whether an image's EXIF or XMP data may contain an orientation.

    Some releases of vLLM apply it, others do not. PNG and GIF may contain such data anywhere, so the whole
    file is needed. JPEG has it before the pixels, and WebP has a flag for it in the header. `data` is the
    beginning of the file, and the rest too if `whole`.
    """
    try:
        if data.startswith(_JPEG):
            return _jpeg_may_be_rotated(data)
        if data[:4] == b"RIFF":
            return data[12:16] == b"VP8X" and data[20] & _WEBP_METADATA != 0
    except (struct.error, IndexError):
        return True
    return not whole or _has_orientation(data)


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


def _jpeg_may_be_rotated(data: bytes) -> bool:
    for marker, at in _markers(data):
        if marker == _SCAN:
            return False
        if marker in _SEGMENTS and _has_orientation(data[at : at + struct.unpack_from(">H", data, at)[0]]):
            return True
    return True


def _markers(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the markers of a JPEG's segments up to its first scan, with the offsets of their lengths."""
    at = 2
    for _ in range(_STEPS_MAX):
        at = data.find(b"\xff", at)
        if at < 0:
            return
        marker = data[at + 1]
        if marker == _FILL:
            at += 1
        elif marker == _ESCAPED or marker in _STANDALONE:
            at += 2
        elif marker in _SEGMENTS or marker in _FRAMES or marker == _SCAN:
            yield marker, at + 2
            length: int = struct.unpack_from(">H", data, at + 2)[0]
            if marker == _SCAN or length < 2:
                return
            at += 2 + length
        else:
            return


def _has_orientation(data: bytes) -> bool:
    """Return whether `data` contains a signature of EXIF or XMP data."""
    return b"exif" in data.lower() or b"adobe" in data or b"rientation" in data


def _gif(data: bytes) -> tuple[int, int] | None:
    """Return the size of the screen, extended to the first image."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags % 8 + 1) if flags & 0x80 else 0)
    in_extension = False
    for _ in range(_STEPS_MAX):
        kind = data[at]
        if in_extension:
            # Length of a block; 0 ends the extension.
            in_extension = kind > 0
            at += 1 + kind
        elif kind == _GIF_EXTENSION and (data[at + 2] or data[at + 1] == _GIF_COMMENT):
            in_extension = True
            at += 2
        elif kind == _GIF_IMAGE:
            left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
            return max(width, left + columns), max(height, top + rows)
        else:
            # Includes empty extensions, after which decoders disagree.
            return None
    return None


def _webp(data: bytes) -> tuple[int, int] | None:
    """Return the size of the canvas from the first chunk, which has one of three forms (RFC 9649)."""
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


# Types of parts with a URL; others contain images in processed forms.
_WITH_URL = (None, "image_url", "input_image")
_SCHEME, _BASE64 = "data:", ";base64"
_MEDIA_TYPE_CHARS_MAX = 256
# Characters of base64 to decode: enough for nearly all images, then for those with large metadata.
_HEADS_CHARS = (4 * (16 << 10), 4 * (1 << 20))


class ImagePart(NamedTuple):
    """Image part of a message."""

    url: object  # unchecked value of the URL
    # Client's name of the image. vLLM uses it as the image's hash, unless the request or the engine's flags
    # set options of the processor (multimodal/processing/inputs.py in 0.32).
    uuid: str | None


def image_parts(messages: object) -> list[ImagePart] | None:
    """Return all images, or None if there are other media or unsupported forms of images."""
    parts: list[ImagePart] = []
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            medium = medium_of(part)
            if medium is None:
                continue
            if medium != "image" or "image_url" not in part or part.get("type") not in _WITH_URL:
                return None
            url, uuid = part.get("image_url"), part.get("uuid")
            url = url.get("url") if isinstance(url, dict) else url
            parts.append(ImagePart(url, uuid if isinstance(uuid, str) and uuid else None))
    return parts


def size_of_url(url: object, *, oriented: bool) -> ImageSize | None:
    """Return the size of the image in a `data:` URL, or None if it is unknown.

    Args:
        oriented: Whether width and height must be distinguished, so images that may be rotated are unknown.
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
            not oriented or size.width == size.height or not may_be_rotated(head, whole=whole)
        )
        if known or whole:
            break
    return size if known else None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return b""


# Reading the size of an image takes about 50 us.
_SIZES_MAX = 128
# More than the context of any model; limits the memory that a client's images can cause.
_IDS_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Placeholder ids of one image in a prompt."""

    offset: int  # index of the first id
    length: int  # number of ids; the last may be merged with the following text or image
    uuid: str | None  # client's name of the image


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """Token ids of a prompt with images, as far as they are known."""

    ids: TokenIds  # all ids, or those before the first image of unknown size
    images: tuple[PlacedImage, ...]  # images within `ids`
    text_tokens: int = 0  # number of text tokens after `ids`
    unknown_images: int = 0  # number of images after `ids`


def expand_images(rule: ImageRule, ids: TokenIds, parts: Sequence[ImagePart]) -> ExpandedPrompt | None:
    """Expand the images of a prompt; return None if the numbers of placeholders and images differ.

    Engines then either fill the first placeholders or reject the prompt.
    """
    places = np.flatnonzero(ids == rule.placeholder_id).tolist()
    if len(places) != len(parts):
        return None
    pieces: list[TokenIds] = []
    offsets: list[int] = []
    lengths: list[int] = []
    at = tokens = 0
    ids_left = _IDS_MAX - len(ids)
    for place, part in zip(places, parts[: _SIZES_MAX if rule.reads_size else None], strict=False):
        size = size_of_url(part.url, oriented=rule.oriented) if rule.reads_size else None
        expansion = rule.expand(size)
        if expansion is None:
            break
        ids_left -= len(expansion)
        if ids_left < 0:
            return None
        pieces += ids[at:place], expansion
        offsets.append(tokens + place - at)
        lengths.append(len(expansion))
        tokens = offsets[-1] + lengths[-1]
        at = place + 1
    unknown = len(places) - len(lengths)
    end = places[len(lengths)] if unknown else len(ids)
    whole, starts = merge_ids(np.concatenate((*pieces, ids[at:end])), rule.merges, offsets)
    known = zip(starts, lengths, parts, strict=False)
    images = tuple(PlacedImage(start, length, part.uuid) for start, length, part in known)
    return ExpandedPrompt(whole, images, len(ids) - end - unknown, unknown)
