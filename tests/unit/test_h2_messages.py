"""gRPC's messages within a stream's bytes: the same ones however they are cut, and none that is too large."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.h2.messages import MessageError, MessageReader, plain_prefix

_BYTES_MAX = 1000
_messages = st.lists(
    st.tuples(st.binary(max_size=300), st.sampled_from(["", "gzip", "deflate"])), max_size=10
)


def _prefixed(message: bytes) -> bytes:
    return plain_prefix(0, len(message)) + message


def _packed(message: bytes, encoding: str) -> bytes:
    packed = gzip.compress(message) if encoding == "gzip" else zlib.compress(message)
    return b"\x01" + _prefixed(packed)[1:]


@given(_messages, st.lists(st.integers(0, 4000), max_size=20), st.sampled_from(["gzip", "deflate"]))
def test_messages_are_the_same_however_they_are_cut(
    said: list[tuple[bytes, str]], cuts: list[int], encoding: str
) -> None:
    """Any cut of a stream gives the same messages, in order, and all of its bytes are accounted for."""
    data = b"".join(_packed(message, encoding) if kind else _prefixed(message) for message, kind in said)
    reader = MessageReader(encoding, _BYTES_MAX)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    got, size = [], 0
    for begin, end in pairwise(places):
        for message, message_size in reader.feed(data[begin:end]):
            got.append(message)
            size += message_size
        assert reader.is_within == (size < end)
    assert got == [message for message, _ in said]
    assert size == len(data)


@given(st.lists(st.binary(max_size=30), max_size=20), st.sampled_from(["identity", "gzip", "deflate"]))
def test_any_bytes_are_messages_or_refused(parts: list[bytes], encoding: str) -> None:
    """Garbage ends in one error with a status, and no message is too large."""
    reader, error = MessageReader(encoding, _BYTES_MAX), None
    try:
        for data in parts:
            for message, _ in reader.feed(data):
                assert len(message) <= _BYTES_MAX
    except MessageError as refused:
        error = refused
    assert error is None or error.status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("level", [0, 9])
def test_a_message_of_just_the_limit_is_read(size: int, encoding: str, level: int) -> None:
    """The limit is of what a message says, compressed or not, and is itself allowed."""
    plain = bytes(range(250)) * 4
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    packed = b"\x01" + _prefixed(pack(plain[:size], level))[1:]
    reader = MessageReader(encoding, 1200 if level == 0 else _BYTES_MAX)
    assert [message for message, _ in reader.feed(packed)] == [plain[:size]]
    assert [message for message, _ in reader.feed(_prefixed(plain[:size]))] == [plain[:size]]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [1001, 100_000])
def test_bombs_are_refused_before_they_are_large(encoding: str, size: int) -> None:
    """A small message that would become a large one is refused, one byte above the limit."""
    reader = MessageReader(encoding, _BYTES_MAX)
    with pytest.raises(MessageError, match=r"\(1001 vs\. 1000\)") as caught:
        list(reader.feed(_packed(bytes(size), encoding)))
    assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_size_is_refused_before_its_bytes_come() -> None:
    """A message that says it is too large is refused by its first five bytes, also behind others."""
    for before in (b"", _prefixed(b"a message")):
        reader = MessageReader("identity", _BYTES_MAX)
        with pytest.raises(MessageError) as caught:
            list(reader.feed(before + _prefixed(bytes(_BYTES_MAX + 1))[:5]))
        assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("data", "encoding", "why"),
    [
        (b"\x02\x00\x00\x00\x00", "identity", "neither 0 nor 1"),
        (b"\x01\x00\x00\x00\x01x", "identity", "without grpc-encoding"),
        (b"\x01\x00\x00\x00\x03xyz", "gzip", "no gzip"),
        (b"\x01\x00\x00\x00\x01x", "deflate", "ends too early"),
        (b"\x01\x00\x00\x00\x00", "gzip", "ends too early"),
        (b"\x01\x00\x00\x00\x0a" + gzip.compress(b"x", mtime=0)[:10], "gzip", "ends too early"),
        (b"\x01\x00\x00\x00\x09" + zlib.compress(b"x"), "gzip", "no gzip"),
    ],
)
def test_what_is_no_message_is_told(data: bytes, encoding: str, why: str) -> None:
    """An error says what is wrong with a message."""
    with pytest.raises(MessageError, match=why) as caught:
        list(MessageReader(encoding, _BYTES_MAX).feed(data))
    assert caught.value.status is grpc.StatusCode.INTERNAL


def test_a_message_in_tiny_pieces_takes_no_more_than_its_bytes() -> None:
    """A client that sends a large message byte by byte makes the reader hold little more than the message."""
    size = 100_000
    reader, data = MessageReader("identity", size), _prefixed(bytes(size))
    tracemalloc.start()
    try:
        for place in range(len(data) - 1):
            assert not list(reader.feed(data[place : place + 1]))
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * size
    assert list(reader.feed(data[-1:])) == [(bytes(size), len(data))]
