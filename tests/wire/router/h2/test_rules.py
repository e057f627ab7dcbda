"""Violations of HTTP/2 or gRPC rules: the error code of each, and whether stream or connection ends."""

from __future__ import annotations

import gzip

import hpack
import pytest

from router.h2 import frames
from router.h2.frames import FrameType, H2Code, Setting
from tests.support.router.doors import wait_until
from tests.support.router.h2 import MESSAGE_BYTES_MAX, METHODS, Served
from tests.support.router.raw_h2 import RawClient, data_frame, open_frame, prefixed, request_block

_PING = frames.frame(FrameType.PING, 0, 0, bytes(8))

# After each violation: other clients are served and no state is left.
pytestmark = pytest.mark.usefixtures("sound")


def _bomb() -> bytes:
    # An index into the table is one byte.
    return bytes(hpack.Encoder().encode([("x-bomb", "b" * 4000)])) + b"\xbe" * 4000


def _headers(block: bytes) -> bytes:
    return frames.frame(FrameType.HEADERS, frames.END_HEADERS, 1, block)


def _update(stream_id: int, number: int) -> bytes:
    return frames.number_frame(FrameType.WINDOW_UPDATE, stream_id, number)


_OPEN = open_frame(1, "exchange")
_SETTING = frames.settings_frame


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (_headers(_bomb()), H2Code.ENHANCE_YOUR_CALM),
        (_headers(b"\xff" * 50), H2Code.COMPRESSION_ERROR),
        (_headers(b"\xc7" * 50), H2Code.COMPRESSION_ERROR),
        (_headers(b"\x40\x7f\xff\xff\xff\xff\xff\x0f"), H2Code.COMPRESSION_ERROR),
        (_headers(b"\x3f" + b"\xff" * 60_000), H2Code.COMPRESSION_ERROR),
        (_update(0, frames.WINDOW_BYTES_MOST), H2Code.FLOW_CONTROL_ERROR),
        (_update(0, 0), H2Code.FLOW_CONTROL_ERROR),
        (_update(1, 5), H2Code.PROTOCOL_ERROR),
        (data_frame(1, b"x"), H2Code.PROTOCOL_ERROR),
        (data_frame(0, b"x"), H2Code.PROTOCOL_ERROR),
        (data_frame(2, b"x"), H2Code.PROTOCOL_ERROR),
        (open_frame(2), H2Code.PROTOCOL_ERROR),
        (open_frame(0), H2Code.PROTOCOL_ERROR),
        (frames.number_frame(FrameType.RST_STREAM, 1, 8), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.RST_STREAM, 0, 1, b"x"), H2Code.FRAME_SIZE_ERROR),
        (frames.head(65_537, FrameType.DATA, 0, 1), H2Code.FRAME_SIZE_ERROR),
        (frames.frame(FrameType.PUSH_PROMISE, 4, 1, bytes(9)), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.CONTINUATION, 4, 1), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.HEADERS, 0, 1) + _PING, H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.HEADERS, 0, 1) + frames.frame(9, 4, 3), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.PING, 0, 0, b"short"), H2Code.FRAME_SIZE_ERROR),
        (frames.frame(FrameType.PING, 0, 1, bytes(8)), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.SETTINGS, 0, 1), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.SETTINGS, 0, 0, b"x"), H2Code.FRAME_SIZE_ERROR),
        (frames.frame(FrameType.SETTINGS, frames.ACK, 0, bytes(6)), H2Code.FRAME_SIZE_ERROR),
        (_SETTING({Setting.ENABLE_PUSH: 2}), H2Code.PROTOCOL_ERROR),
        (_SETTING({Setting.MAX_FRAME_SIZE: 1}), H2Code.PROTOCOL_ERROR),
        (_SETTING({Setting.INITIAL_WINDOW_SIZE: 1 << 31}), H2Code.FLOW_CONTROL_ERROR),
        (
            _OPEN + _update(1, 1 << 30) + _SETTING({Setting.INITIAL_WINDOW_SIZE: 1 << 30}),
            H2Code.FLOW_CONTROL_ERROR,
        ),
        (_OPEN + _OPEN, H2Code.PROTOCOL_ERROR),
        (_OPEN + frames.frame(FrameType.DATA, frames.PADDED, 1, b"\x05x"), H2Code.PROTOCOL_ERROR),
        (_OPEN + frames.frame(FrameType.DATA, frames.PADDED, 1), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.PRIORITY, 0, 0, bytes(5)), H2Code.PROTOCOL_ERROR),
        (frames.frame(FrameType.PRIORITY, 0, 1, bytes(4)), H2Code.FRAME_SIZE_ERROR),
        (
            frames.frame(FrameType.HEADERS, frames.PRIORITY | frames.END_HEADERS, 1, b"x"),
            H2Code.FRAME_SIZE_ERROR,
        ),
        (frames.frame(FrameType.GOAWAY, 0, 0, b"x"), H2Code.PROTOCOL_ERROR),
    ],
)
def test_a_violation_ends_the_connection_with_its_code(client: RawClient, data: bytes, code: H2Code) -> None:
    """Each violated rule of HTTP/2 ends the connection with that rule's error code."""
    client.send(data)
    assert client.end()[0] == code


def test_data_beyond_the_window_ends_the_connection(client: RawClient, served: Served) -> None:
    """DATA beyond the stream's announced window ends the connection."""
    client.open(1, "exchange")
    # Large enough to be served in the pool.
    message = prefixed(bytes(MESSAGE_BYTES_MAX))
    data = prefixed(b"!stuck " + bytes(1 << 17)) + message + message[: 1 << 18]
    parts = [data[at : at + (1 << 16)] for at in range(0, len(data), 1 << 16)]
    client.send_until_closed(iter([data_frame(1, part) for part in parts]))
    assert client.end()[0] in (H2Code.FLOW_CONTROL_ERROR, None)
    served.plain.released.set()
    wait_until(lambda: served.server.open_calls == 0, "the call has ended")
    served.plain.released.clear()
    while served.plain.entered.acquire(blocking=False):
        pass


@pytest.mark.parametrize(
    ("more", "code"),
    [(0, H2Code.PROTOCOL_ERROR), (frames.WINDOW_BYTES_MOST, H2Code.FLOW_CONTROL_ERROR)],
)
def test_a_stream_error_ends_only_its_stream(client: RawClient, more: int, code: H2Code) -> None:
    """A window update of 0, or above 2^31 - 1, resets its stream; other calls continue."""
    client.open(1, "exchange")
    client.open(3, "exchange")
    client.send(_update(1, more))
    assert client.next(FrameType.RST_STREAM, 1).payload == code.to_bytes(4, "big")
    client.say(3, b"goes on")
    assert client.answer(3)[0] == prefixed(b"goes on")


def test_frames_of_ended_streams_are_ignored(client: RawClient) -> None:
    """Frames that arrive for an ended stream, and unknown frames, are dropped."""
    client.open(1)
    client.say(1, b"x")
    client.answer(1)
    client.send(data_frame(1, b"late", ends=True))
    client.send(frames.number_frame(FrameType.RST_STREAM, 1, H2Code.CANCEL) * 2)
    client.send(_update(1, 7) + frames.frame(FrameType.PRIORITY, 0, 1, bytes(5)))
    client.send(frames.frame(0xBE, 0xFF, 1, b"grease") + frames.frame(FrameType.GOAWAY, 0, 0, bytes(8)))
    client.open(3)
    client.say(3, b"after GOAWAY")
    assert client.answer(3)[0] == prefixed(b"after GOAWAY")


def _gzipped(data: bytes) -> bytes:
    packed = gzip.compress(data, mtime=0)
    return b"\x01" + len(packed).to_bytes(4, "big") + packed


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("data", "encoding", "code"),
    [
        (b"\x02" + bytes(4), "identity", 13),
        (b"\x00\xff\xff\xff\xff", "identity", 8),
        (b"\x00\x00\x00\x00\x05abc", "identity", 13),
        (b"\x00\x00\x00", "identity", 13),
        (b"\x01\x00\x00\x00\x01x", "identity", 13),
        (b"\x01\x00\x00\x00\x01x", "gzip", 13),
        (_gzipped(b"abc")[:-4], "gzip", 13),
        (_gzipped(bytes(MESSAGE_BYTES_MAX + 1)), "gzip", 8),
        (b"", "br", 12),
    ],
)
def test_an_invalid_message_ends_the_call(
    client: RawClient, method: str, data: bytes, encoding: str, code: int
) -> None:
    """Bytes that are no gRPC message end only their call, with a status."""
    block = request_block(method, ("grpc-encoding", encoding))
    client.send(frames.frame(FrameType.HEADERS, frames.END_HEADERS, 1, block))
    client.send(data_frame(1, data, ends=True))
    assert client.answer(1)[1]["grpc-status"] == str(code)
    client.open(3)
    client.say(3, b"next")
    assert client.answer(3)[0] == prefixed(b"next")


@pytest.mark.parametrize("method", ["unary", "server_stream"])
def test_a_unary_call_without_message_is_unimplemented(client: RawClient, method: str) -> None:
    """A unary call without a request message ends with UNIMPLEMENTED, as gRPC defines."""
    client.open(1, method, ends=True)
    assert client.answer(1)[1]["grpc-status"] == "12"


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ((":method", "GET"), "405"),
        (("content-type", "text/html"), "415"),
    ],
)
def test_requests_that_are_not_grpc_get_an_http_status(
    client: RawClient, changed: tuple[str, str], status: str
) -> None:
    """An HTTP/2 request that is not gRPC gets an HTTP status."""
    said = {":method": "POST", ":path": "/x", ":scheme": "http", "content-type": "application/grpc"}
    said |= dict([changed])
    client.send(
        frames.frame(
            FrameType.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, hpack.Encoder().encode(said.items())
        )
    )
    assert client.answer(1)[1][":status"] == status
