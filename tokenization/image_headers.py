"""An image's width and height from the head of its file: PNG, JPEG, GIF and WebP, as Pillow reads them.

Bytes in, a size out, or None for whatever is not surely understood. No pixel is decoded and nothing is
unpacked, so the work is bounded by the bytes that are given. Knows no URLs and no models.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

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


class ImageSize(NamedTuple):
    """In pixels, as the file has them: no orientation is applied."""

    width: int
    height: int


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
