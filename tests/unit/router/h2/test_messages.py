"""gRPC messages in a stream's bytes: the same however the bytes are split, and none above the limit."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.h2.calls import MessageError, MessageReader, plain_prefix

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
def test_splitting_does_not_change_messages(
    said: list[tuple[bytes, str]], cuts: list[int], encoding: str
) -> None:
    """Any split of a stream gives the same messages in order, and accounts for all bytes."""
    data = b"".join(_packed(message, encoding) if kind else _prefixed(message) for message, kind in said)
    reader = MessageReader(encoding, _BYTES_MAX)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    got, size = [], 0
    for begin, end in pairwise(places):
        for message, message_size in reader.feed(data[begin:end]):
            got.append(message)
            size += message_size
        assert reader.has_partial_data == (size < end)
    assert got == [message for message, _ in said]
    assert size == len(data)


@given(st.lists(st.binary(max_size=30), max_size=20), st.sampled_from(["identity", "gzip", "deflate"]))
def test_any_bytes_are_messages_or_rejected(parts: list[bytes], encoding: str) -> None:
    """Garbage ends in one error with a status, and no message exceeds the limit."""
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
def test_a_message_at_the_limit_is_accepted(size: int, encoding: str, level: int) -> None:
    """The limit applies to the decompressed size and includes the limit itself."""
    plain = bytes(range(250)) * 4
    pack = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding]
    packed = b"\x01" + _prefixed(pack(plain[:size], level))[1:]
    reader = MessageReader(encoding, 1200 if level == 0 else _BYTES_MAX)
    assert [message for message, _ in reader.feed(packed)] == [plain[:size]]
    assert [message for message, _ in reader.feed(_prefixed(plain[:size]))] == [plain[:size]]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [1001, 100_000])
def test_decompression_bombs_are_rejected(encoding: str, size: int) -> None:
    """A small message that decompresses to one byte above the limit is rejected."""
    reader = MessageReader(encoding, _BYTES_MAX)
    with pytest.raises(MessageError, match=r"\(1001 vs\. 1000\)") as caught:
        list(reader.feed(_packed(bytes(size), encoding)))
    assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_oversized_message_is_rejected_by_its_prefix() -> None:
    """A message whose prefix announces too many bytes is rejected at once, also after other messages."""
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
        (b"\x01\x00\x00\x00\x03xyz", "gzip", "invalid gzip"),
        (b"\x01\x00\x00\x00\x01x", "deflate", "truncated deflate"),
        (b"\x01\x00\x00\x00\x00", "gzip", "truncated gzip"),
        (b"\x01\x00\x00\x00\x0a" + gzip.compress(b"x", mtime=0)[:10], "gzip", "truncated gzip"),
        (b"\x01\x00\x00\x00\x09" + zlib.compress(b"x"), "gzip", "invalid gzip"),
    ],
)
def test_invalid_messages_name_the_problem(data: bytes, encoding: str, why: str) -> None:
    """The error of an invalid message says what is wrong with it."""
    with pytest.raises(MessageError, match=why) as caught:
        list(MessageReader(encoding, _BYTES_MAX).feed(data))
    assert caught.value.status is grpc.StatusCode.INTERNAL


def test_tiny_pieces_need_little_more_memory_than_the_message() -> None:
    """A large message that arrives byte by byte needs little more memory than the message."""
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
