"""Header blocks: the cache changes no result, and fields are interpreted by gRPC's rules."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import grpc
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.h2.frames import (
    LIST_BYTES_MAX,
    Fields,
    H2Code,
    H2Error,
    HeaderBlocks,
    call_head,
    field,
    refusal_block,
    trailers_block,
)
from tests.support.depth import examples

_names = st.sampled_from([b":path", b":method", b"x-a", b"x-b", b"authorization", b"cookie"])
_values = st.sampled_from([b"", b"/", b"POST", b"1", b"a" * 50, b"b" * 1500, b"c" * 3000]) | st.binary(
    max_size=9
)
_fields = st.lists(st.tuples(_names, _values, st.booleans()), max_size=6)
# Next step of the encoder: a new table size, or a header block, sometimes one that was sent before.
_steps = st.lists(
    st.integers(0, 4096) | st.tuples(_fields, st.booleans()) | st.tuples(st.integers(0, 5)), max_size=40
)


@given(_steps)
@settings(max_examples=examples(300))
def test_cached_blocks_equal_a_plain_decoders(steps: list[object]) -> None:
    """With any use of the HPACK table, each block decodes as without a cache."""
    encoder, plain = hpack.Encoder(), hpack.Decoder()
    blocks = HeaderBlocks(list[tuple[bytes, bytes]])
    sent: list[list[tuple[bytes, bytes, bool]]] = []
    for step in steps:
        if isinstance(step, int):
            # Setting the current size again makes the library's encoder forget earlier unannounced changes.
            if step != encoder.header_table_size:
                encoder.header_table_size = step
            continue
        assert isinstance(step, tuple)
        if len(step) == 1:
            if not sent:
                continue
            said, huffman = sent[step[0] % len(sent)], True
        else:
            said, huffman = step
            sent.append(said)
        block = encoder.encode(said, huffman=huffman)
        expected = [(bytes(name), bytes(value)) for name, value in plain.decode(block, raw=True)]
        assert blocks.head(block) == expected == [(name, value) for name, value, _ in said]


@given(st.lists(st.binary(max_size=12), max_size=30))
@settings(max_examples=examples(300))
def test_any_block_decodes_as_in_a_plain_decoder(sent: list[bytes]) -> None:
    """Blocks that no encoder produces are rejected exactly where a plain decoder rejects them."""
    plain, blocks = (
        hpack.Decoder(max_header_list_size=LIST_BYTES_MAX),
        HeaderBlocks(list[tuple[bytes, bytes]]),
    )
    for block in sent:
        try:
            expected: Fields | None = [
                (bytes(name), bytes(value)) for name, value in plain.decode(block, raw=True)
            ]
        except (hpack.HPACKError, IndexError, ValueError):
            expected = None
        try:
            got: Fields | None = blocks.head(block)
        except H2Error:
            got = None
        assert got == expected
        if got is None:
            return


def test_a_block_is_decoded_once_while_the_table_stays() -> None:
    """A block that leaves the table unchanged is decoded once, and again after the table has changed."""
    read: list[Fields] = []

    def note(fields: Fields) -> Fields:
        read.append(fields)
        return fields

    blocks, encoder = HeaderBlocks(note), hpack.Encoder()
    first = encoder.encode([("x-a", "1")])
    indexed = encoder.encode([("x-a", "1")])
    for block in (first, indexed, indexed, indexed):
        assert blocks.head(block) == [(b"x-a", b"1")]
    assert len(read) == 2
    assert blocks.head(encoder.encode([("x-b", "2")])) == [(b"x-b", b"2")]
    assert blocks.head(indexed) == [(b"x-b", b"2")]
    assert len(read) == 4


def test_the_block_cache_is_bounded() -> None:
    """The cache keeps a fixed number of blocks and no long ones."""
    read: list[Fields] = []

    def note(fields: Fields) -> int:
        read.append(fields)
        return len(read)

    blocks = HeaderBlocks(note)
    sent = [field(b"x", b"%d" % number) for number in range(1000)]
    for block in sent:
        blocks.head(block)
    known = sum(blocks.head(block) <= 1000 for block in reversed(sent))
    assert 0 < known <= 64
    long = field(b"x", bytes(5000))
    assert blocks.head(long) != blocks.head(long)


def test_an_oversized_header_list_is_rejected() -> None:
    """A small block that expands to too many bytes is rejected before it is expanded."""
    encoder = hpack.Encoder()
    bomb = encoder.encode([("x", "b" * 4000)]) + b"\xbe" * 100
    with pytest.raises(H2Error, match="above") as caught:
        HeaderBlocks(list[tuple[bytes, bytes]]).head(bomb)
    assert caught.value.code == H2Code.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 254, 255, 16_510, 70_000])
def test_fields_of_any_size_can_be_decoded(size: int) -> None:
    """Blocks that the server sends are decoded correctly by another library."""
    name, value = b"n" * max(1, size // 2), b"v" * size
    assert hpack.Decoder(1 << 20).decode(field(name, value), raw=True) == [(name, value)]


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=8))
def test_any_fields_have_a_call_head(fields: Fields) -> None:
    """Any header fields give a CallHead; those that are not gRPC have a refusal."""
    assert call_head(fields).refusal is not None


@given(st.sampled_from(list(grpc.StatusCode)), st.text(max_size=50), st.booleans())
def test_a_status_survives_percent_encoding(code: grpc.StatusCode, details: str, has_headers: bool) -> None:
    """Status details of any text are printable ASCII on the wire, and decode to the same text."""
    block = trailers_block(code, details) if has_headers else refusal_block(code, details)
    said = dict(hpack.Decoder().decode(block, raw=True))
    assert said[b"grpc-status"] == str(code.value[0]).encode()
    assert (b":status" in said) is not has_headers
    message = said.get(b"grpc-message", b"")
    assert all(0x20 <= byte <= 0x7E for byte in message)

    assert unquote_to_bytes(message) == details.encode("utf-8", "replace")
