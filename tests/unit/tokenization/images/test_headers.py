"""Image sizes from file headers equal those of Pillow, which engines use."""

from __future__ import annotations

import base64
import io
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tokenization.images.prompts import ImageSize, image_size, may_be_rotated, size_of_url

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
SIDES = st.integers(1, 300)


def file(form: str, width: int, height: int, mode: str = "RGB", **options: object) -> bytes:
    """Return an image file."""
    data = io.BytesIO()
    Image.new(mode, (width, height), 1).save(data, form, **options)
    return data.getvalue()


def url(data: bytes, media_type: str = "image/png") -> str:
    """Return a file as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def pillows_size(data: bytes) -> tuple[int, int] | None:
    """Return the size by Pillow, or None if it rejects the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                return image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def turned(orientation: int) -> Image.Exif:
    """Return EXIF data with an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@given(
    st.sampled_from(
        [
            *(("PNG", mode, {}) for mode in ("RGB", "RGBA", "L", "P", "1", "I;16")),
            *(("JPEG", mode, {}) for mode in ("RGB", "L", "CMYK")),
            ("JPEG", "RGB", {"progressive": True, "exif": turned(6), "comment": b"\xff\xc0" * 9}),
            ("JPEG", "RGB", {"icc_profile": b"\xff" * 70_000, "restart_marker_blocks": 1}),
            ("GIF", "P", {}),
            ("GIF", "RGB", {"comment": b"x" * 300, "loop": 0}),
            ("WEBP", "RGB", {}),
            ("WEBP", "RGB", {"lossless": True}),
            ("WEBP", "RGBA", {"exif": turned(3)}),
        ]
    ),
    SIDES,
    SIDES,
)
@settings(deadline=None)
def test_a_files_size_is_pillows(kind: tuple[str, str, dict[str, object]], width: int, height: int) -> None:
    """The size in the header of every supported format equals Pillow's."""
    form, mode, options = kind
    data = file(form, width, height, mode, **options)
    assert image_size(data) == pillows_size(data) == (width, height)


def test_a_gif_screen_is_extended_to_its_first_image() -> None:
    """A GIF whose first image extends beyond the screen has the size of both."""
    data = bytearray(file("GIF", 10, 10, "P"))
    data[6:10] = bytes((4, 0, 12, 0))
    assert image_size(bytes(data)) == pillows_size(bytes(data)) == (10, 12)


@given(st.data(), st.sampled_from(FORMATS), SIDES, SIDES)
@settings(deadline=None)
def test_a_damaged_files_size_is_pillows_or_unknown(
    data: st.DataObject, form: str, width: int, height: int
) -> None:
    """A damaged file has Pillow's size or none."""
    damaged = bytearray(file(form, width, height))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged), 60)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    size, pillows = image_size(bytes(damaged)), pillows_size(bytes(damaged))
    assert size is None or pillows is None or size == pillows


@given(st.binary(max_size=200) | st.sampled_from([b"\xff\xd8\xff" + b"\xff" * 99, b"GIF89a" + b"!" * 99]))
def test_anything_has_a_size_or_none(data: bytes) -> None:
    """Arbitrary bytes give a size or none without raising."""
    for head in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X"):
        size = image_size(head + data)
        assert size is None or min(size) > 0


@pytest.mark.parametrize("filling", [b"\xff", b"\xff\0", b"\xff\xd0", b"\xff\xfe\0\2"])
def test_long_headers_end_the_search(filling: bytes) -> None:
    """The search for the size, and for a GIF's first image, ends after a bounded number of steps."""
    jpeg, gif = file("JPEG", 9, 7), file("GIF", 9, 7, "P")
    at = gif.index(b"\x2c", 13 + 3 * (2 << gif[10] % 8))
    for count, expected in ((1000, (9, 7)), (1 << 20, None)):
        assert image_size(jpeg[:2] + filling * count + jpeg[2:]) == expected
        comment = b"!\xfe" + b"\1x" * count + b"\0"
        assert image_size(gif[:at] + comment + gif[at:]) == expected


def test_a_bomb_has_no_size() -> None:
    """An image above Pillow's pixel limit has no size."""
    data = bytearray(file("PNG", 1, 1))
    data[16:24] = (1 << 30).to_bytes(4) * 2
    assert image_size(bytes(data)) is None
    data[16:24] = (13_377).to_bytes(4) * 2
    assert image_size(bytes(data)) == (13_377, 13_377)
    data[16:24] = (13_378).to_bytes(4) * 2
    assert image_size(bytes(data)) is None


@pytest.mark.parametrize("form", FORMATS)
def test_the_media_type_of_a_url_is_ignored(form: str) -> None:
    """A data URL of any media type, with or without parameters, gives the image's size."""
    data = file(form, 30, 20)
    for media_type in (f"image/{form.lower()}", "", "text/plain;charset=utf-8"):
        assert size_of_url(url(data, media_type), oriented=True) == (30, 20)


@pytest.mark.parametrize(
    "text",
    [
        None,
        5,
        "",
        "http://host/image.png",
        "data:",
        "data:,",
        "data:image/png,abc",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,####",
        "data:image/png;base64,é",
        "data:" + "x" * 300 + ";base64," + base64.b64encode(file("PNG", 2, 2)).decode(),
        "file:///etc/passwd",
        "DATA:image/png;base64," + base64.b64encode(file("PNG", 2, 2)).decode(),
    ],
)
def test_any_other_url_has_no_size(text: object) -> None:
    """URLs that are not base64 data have no size, because nothing is fetched or guessed."""
    assert size_of_url(text, oriented=False) is None


@given(st.text(max_size=50) | st.binary(max_size=50).map(lambda data: base64.b64encode(data).decode()))
def test_hostile_urls_have_no_size(text: str) -> None:
    """Hostile URLs have no size and raise nothing."""
    for head in ("", "data:", "data:image/png;base64,", "data:image/png;base64,/9j/"):
        for oriented in (True, False):
            size = size_of_url(head + text, oriented=oriented)
            assert size is None or min(size) > 0


def test_the_size_after_large_metadata_is_found_up_to_a_limit() -> None:
    """A header larger than the first read is read again, up to 3 MB."""
    profile = b"\0" * 60_000
    large = file("JPEG", 9, 7, icc_profile=profile)
    assert size_of_url(url(large), oriented=False) == (9, 7)
    comments = b"".join(b"\xff\xfe\xff\xff" + b"x" * 65_533 for _ in range(50))
    huge = large[:2] + comments + large[2:]
    assert image_size(huge) == (9, 7)
    assert size_of_url(url(huge), oriented=False) is None


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_an_image_that_may_be_rotated_has_no_orientation(form: str) -> None:
    """An image with EXIF orientation has no size if width and height must be distinguished."""
    data = file(form, 30, 20, exif=turned(6))
    assert may_be_rotated(data, whole=True)
    assert not may_be_rotated(file(form, 30, 20), whole=True)
    assert size_of_url(url(data), oriented=True) is None
    assert size_of_url(url(data), oriented=False) == ImageSize(30, 20)
    assert size_of_url(url(file(form, 20, 20, exif=turned(6))), oriented=True) == (20, 20)


@given(st.sampled_from(FORMATS), st.integers(1, 8), st.data())
@settings(deadline=None)
def test_an_orientation_is_never_missed(form: str, orientation: int, data: st.DataObject) -> None:
    """Every image that Pillow rotates is recognized from any beginning of its file."""
    options = {} if form == "GIF" else {"exif": turned(orientation)}
    if data.draw(st.booleans()) and form in ("JPEG", "WEBP"):
        options = {"xmp": b'<x:xmpmeta><rdf tiff:Orientation="%d"/></x:xmpmeta>' % orientation}
    made = file(form, 30, 20, **options)
    with Image.open(io.BytesIO(made)) as image:
        shown = ImageOps.exif_transpose(image).size
    cut = made[: data.draw(st.integers(0, len(made)))]
    for part, whole in ((made, True), (cut, False)):
        if image_size(part) is not None and not may_be_rotated(part, whole=whole):
            assert shown == (30, 20)
    assert may_be_rotated(made, whole=True) == (form != "GIF")


def test_metadata_after_the_pixels_counts() -> None:
    """A PNG with EXIF data at the end, or too large to be searched, has no orientation."""
    data = file("PNG", 30, 20)
    end = len(data) - 12
    assert size_of_url(url(data[:end] + b"\0\0\0\0eXIf" + data[end:]), oriented=True) is None
    assert size_of_url(url(data + b"\0" * (3 << 20)), oriented=True) is None
    assert size_of_url(url(data + b"\0" * (3 << 20)), oriented=False) == (30, 20)
