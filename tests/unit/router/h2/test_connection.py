"""HTTP/2 connection against a client of another library: each rule of RFC 9113 by itself."""

from __future__ import annotations

from typing import Any

import h2.events
import hpack
import pytest

from router.h2 import frames
from router.h2.connection import H2Connection
from router.h2.frames import FrameType, H2Code, H2Error, Setting
from router.h2.streams import Event, Opened, Received, Reset
from tests.support.router.h2_pair import HEADERS, REQUEST, TRAILERS, Pair, fields

_BLOCK = hpack.Encoder().encode(REQUEST)


def _begun(**more: int) -> H2Connection:
    """Return a connection that has read its client's preface, with its own settings already taken out."""
    connection = H2Connection(fields, **{"streams_max": 10, "window_bytes": 1 << 16, **more})
    connection.receive(frames.PREFACE + frames.settings_frame({}))
    connection.data_to_send()
    return connection


def _headers(flags: int, stream_id: int, payload: bytes) -> bytes:
    return frames.frame(FrameType.HEADERS, flags, stream_id, payload)


def _events(connection: H2Connection, *sent: bytes) -> list[Event]:
    return [event for data in sent for event in connection.receive(data)]


def test_a_request_and_its_response_pass() -> None:
    """A request's fields and data arrive, and so do a response's headers, data and trailers."""
    pair = Pair()
    stream = pair.open(more=(("x-a", "1"), ("x-a", "2")))
    assert [pair for pair in stream.head if pair[0] == b"x-a"] == [(b"x-a", b"1"), (b"x-a", b"2")]
    pair.client.send_data(stream.id, b"question", end_stream=True)
    pair.pump()
    assert (pair.received[stream.id], pair.ended) == (b"question", {stream.id})
    pair.server.send(stream, HEADERS, b"answer", TRAILERS)
    pair.pump()
    assert (pair.answers[stream.id], pair.answered) == (b"answer", {stream.id})
    said = [event.headers for event in pair.events if hasattr(event, "headers")]
    assert said == [[(":status", "200"), ("x", "y")], [("grpc-status", "0")]]
    assert not pair.server.streams


def test_settings_are_sent_first() -> None:
    """The server's limits are the first frame that it sends."""
    pair = Pair(streams_max=7, window_bytes=99_999)
    settings = pair.client.remote_settings
    assert settings.max_concurrent_streams == 7
    assert settings.initial_window_size == 99_999
    assert settings.max_frame_size == 1 << 16
    assert settings.max_header_list_size == 1 << 16
    assert pair.client.outbound_flow_control_window == 32 << 20


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_header_block_may_be_split(size: int) -> None:
    """A header block split into CONTINUATION frames is one block; the stream opens with the last of them."""
    connection = _begun()
    parts = [_BLOCK[at : at + size] for at in range(0, len(_BLOCK), size)]
    opened = _events(connection, _headers(frames.END_STREAM, 1, b""))
    for part in parts:
        assert not opened
        assert connection.has_partial_data
        opened = _events(connection, frames.frame(FrameType.CONTINUATION, 0, 1, part))
    opened = _events(connection, frames.frame(FrameType.CONTINUATION, frames.END_HEADERS, 1))
    assert [
        (type(event), event.stream.head, event.end_stream) for event in opened if isinstance(event, Opened)
    ] == [(Opened, [(name.encode(), value.encode()) for name, value in REQUEST], True)]
    assert not connection.has_partial_data


@pytest.mark.parametrize("padding", [0, 1, 255])
def test_padding_and_priority_are_dropped(padding: int) -> None:
    """Padding and priority fields are dropped; padding counts towards the flow-control windows."""
    connection = _begun()
    payload = bytes((padding,)) + bytes(5) + _BLOCK + bytes(padding)
    flags = frames.PADDED | frames.PRIORITY | frames.END_HEADERS
    (opened,) = _events(connection, _headers(flags, 1, payload))
    assert opened.stream.head[0] == (b":method", b"POST")
    data = frames.frame(FrameType.DATA, frames.PADDED, 1, bytes((padding,)) + b"data" + bytes(padding))
    (received,) = _events(connection, data)
    assert isinstance(received, Received)
    assert received.data == b"data"
    assert opened.stream.receive_window_bytes == (1 << 16) - 5 - padding
    assert opened.stream.unread_bytes == 4


def test_trailers_of_a_client_end_its_stream() -> None:
    """A second header block ends the stream; its fields are ignored, but they update the HPACK table."""
    pair = Pair()
    stream = pair.open()
    pair.client.send_headers(stream.id, [("x-late", "1")], end_stream=True)
    pair.pump()
    assert pair.ended == {stream.id}
    assert (b"x-late", b"1") in pair.open(more=(("x-late", "1"),)).head


def test_a_second_header_block_without_end_stream_is_an_error() -> None:
    """A header block after a request's headers must end the stream."""
    connection = _begun()
    connection.receive(_headers(frames.END_HEADERS, 1, _BLOCK))
    with pytest.raises(H2Error, match="in the middle"):
        connection.receive(_headers(frames.END_HEADERS, 1, _BLOCK))


def test_the_stream_window_returns_as_bytes_are_consumed() -> None:
    """A stream's window grows back only by the bytes that the call has consumed."""
    pair = Pair(window_bytes=10_000)
    stream = pair.open()
    pair.client.send_data(stream.id, bytes(10_000))
    pair.pump()
    assert pair.can_send(stream.id) == 0
    pair.server.consumed(stream, 4999)
    pair.pump()
    assert pair.can_send(stream.id) == 0
    pair.server.consumed(stream, 1)
    pair.pump()
    assert pair.can_send(stream.id) == 5000


def test_unsent_responses_hold_back_the_stream_window() -> None:
    """A stream with queued responses gets no window update until they are sent."""
    pair = Pair(window_bytes=10_000, INITIAL_WINDOW_SIZE=0)
    stream = pair.open()
    pair.server.send(stream, HEADERS, b"answer")
    pair.client.send_data(stream.id, bytes(10_000))
    pair.pump()
    pair.server.consumed(stream, 10_000)
    pair.pump()
    assert pair.can_send(stream.id) == 0
    pair.client.increment_flow_control_window(6, stream.id)
    pair.pump()
    assert pair.can_send(stream.id) == 10_000


def test_streams_beyond_the_limit_are_refused() -> None:
    """A stream above the limit is reset with REFUSED_STREAM, which allows a retry; other streams continue."""
    connection = _begun(streams_max=2)
    block = _headers(frames.END_HEADERS, 1, _BLOCK)
    for stream_id in (1, 3):
        assert len(connection.receive(block[:5] + stream_id.to_bytes(4, "big") + block[9:])) == 1
    late = block[:5] + (5).to_bytes(4, "big") + block[9:]
    assert not connection.receive(late)
    refusal = frames.number_frame(FrameType.RST_STREAM, 5, H2Code.REFUSED_STREAM)
    assert connection.data_to_send() == [refusal]
    connection.receive(frames.number_frame(FrameType.RST_STREAM, 1, H2Code.CANCEL))
    again = block[:5] + (7).to_bytes(4, "big") + block[9:]
    assert len(connection.receive(again)) == 1


def test_the_highest_stream_id_is_served() -> None:
    """Stream ids may be used up to 2^31 - 1, each once."""
    connection = _begun()
    last = frames.STREAM_IDS
    (opened,) = connection.receive(_headers(frames.END_HEADERS | frames.END_STREAM, last, _BLOCK))
    connection.send(opened.stream, TRAILERS)
    assert connection.last_stream_id == last
    assert not connection.receive(_headers(frames.END_HEADERS | frames.END_STREAM, last, _BLOCK))
    assert not connection.receive(_headers(frames.END_HEADERS | frames.END_STREAM, 1, _BLOCK))


def test_a_response_may_end_before_its_request() -> None:
    """A stream that is answered early is reset with NO_ERROR, and further data of the client is dropped."""
    pair = Pair()
    stream = pair.open()
    pair.server.send(stream, HEADERS + TRAILERS)
    pair.client.send_data(stream.id, b"on its way")
    pair.pump()
    resets = [event for event in pair.events if isinstance(event, h2.events.StreamReset)]
    assert [event.error_code for event in resets] == [H2Code.NO_ERROR]
    assert pair.answered == {stream.id}
    assert not pair.received
    # Calls on the closed stream have no effect.
    pair.server.send(stream, None, b"late", TRAILERS)
    pair.server.consumed(stream, 5)
    pair.server.reset(stream, H2Code.CANCEL)
    assert not pair.server.data_to_send()


def test_data_after_end_stream_resets_the_stream() -> None:
    """DATA after END_STREAM resets the stream and leaves the connection open."""
    connection = _begun()
    connection.receive(_headers(frames.END_HEADERS | frames.END_STREAM, 1, _BLOCK))
    (event,) = connection.receive(frames.frame(FrameType.DATA, 0, 1, b"more"))
    assert isinstance(event, Reset)
    assert connection.data_to_send() == [frames.number_frame(FrameType.RST_STREAM, 1, H2Code.STREAM_CLOSED)]


def test_a_reset_drops_pending_data() -> None:
    """A stream reset by either side keeps no pending bytes."""
    pair = Pair(INITIAL_WINDOW_SIZE=0)
    theirs, ours = pair.open(), pair.open()
    for stream in (theirs, ours):
        pair.client.send_data(stream.id, bytes(100))
        pair.server.send(stream, HEADERS, bytes(1000))
    pair.pump()
    pair.client.reset_stream(theirs.id)
    pair.server.reset(ours, H2Code.CANCEL)
    pair.pump()
    assert pair.resets == {theirs.id}
    assert [stream.pending_bytes for stream in (theirs, ours)] == [0, 0]
    assert not pair.server.streams
    assert [event.stream_id for event in pair.events if isinstance(event, h2.events.StreamReset)] == [ours.id]


def test_pings_are_acknowledged() -> None:
    """A PING is acknowledged with its payload; an acknowledgement is not answered."""
    pair = Pair()
    pair.client.ping(b"12345678")
    pair.pump()
    acks = [event.ping_data for event in pair.events if isinstance(event, h2.events.PingAckReceived)]
    assert acks == [b"12345678"]
    assert not pair.server.receive(frames.frame(FrameType.PING, frames.ACK, 0, bytes(8)))
    assert not pair.server.data_to_send()


@pytest.mark.parametrize("is_early", [True, False])
def test_goaway_names_the_last_stream(is_early: bool) -> None:
    """GOAWAY names the last served stream: the latest so far, or the highest id while draining."""
    pair = Pair()
    stream = pair.open()
    pair.server.goaway(H2Code.ENHANCE_YOUR_CALM, "busy ä", is_early=is_early)
    pair.pump()
    (event,) = [event for event in pair.events if isinstance(event, h2.events.ConnectionTerminated)]
    assert event.last_stream_id == (frames.STREAM_IDS if is_early else stream.id)
    assert (event.error_code, event.additional_data) == (H2Code.ENHANCE_YOUR_CALM, b"busy ?")


def test_a_clients_goaway_changes_nothing() -> None:
    """A client that sent GOAWAY is served until it disconnects."""
    connection = _begun()
    connection.receive(frames.goaway_frame(0, 0, "bye"))
    assert len(connection.receive(_headers(frames.END_HEADERS, 1, _BLOCK))) == 1


def test_too_many_unread_bytes_reset_the_sending_stream() -> None:
    """The stream that exceeds the limit of unread bytes is reset; consuming bytes makes room again."""
    pair = Pair(window_bytes=1 << 16, unread_bytes_max=30_000)
    first, second = pair.open(), pair.open()
    pair.client.send_data(first.id, bytes(16_000))
    pair.client.send_data(second.id, bytes(14_000))
    pair.pump()
    pair.server.consumed(first, 10_000)
    pair.client.send_data(first.id, bytes(10_000))
    pair.pump()
    assert not pair.resets
    pair.client.send_data(second.id, b"x")
    pair.pump()
    assert pair.resets == {second.id}
    pair.client.send_data(first.id, bytes(14_000))
    pair.pump()
    assert pair.resets == {second.id}
    (reset,) = [event for event in pair.events if isinstance(event, h2.events.StreamReset)]
    assert (reset.stream_id, reset.error_code) == (second.id, H2Code.ENHANCE_YOUR_CALM)


def test_the_connection_window_returns_as_bytes_arrive() -> None:
    """Unread streams do not block others, because the connection's window is returned on arrival."""
    pair = Pair(window_bytes=8 << 20)
    streams = [pair.open() for _ in range(8)]
    for stream in streams:
        for _ in range(127):
            pair.client.send_data(stream.id, bytes(1 << 16))
            pair.pump()
    assert pair.client.outbound_flow_control_window >= 16 << 20
    assert sum(len(data) for data in pair.received.values()) == 8 * 127 << 16


@pytest.mark.parametrize("name", [9999, Setting.HEADER_TABLE_SIZE, Setting.MAX_CONCURRENT_STREAMS])
def test_unknown_settings_are_acknowledged(name: Any) -> None:
    """Settings that the server does not use change nothing and are acknowledged."""
    connection = _begun()
    connection.receive(frames.settings_frame({name: 0}))
    assert connection.data_to_send() == [frames.frame(FrameType.SETTINGS, frames.ACK, 0)]


def test_the_first_frame_is_settings() -> None:
    """A connection whose first frame is not SETTINGS is rejected."""
    connection = H2Connection(fields, streams_max=1, window_bytes=1)
    with pytest.raises(H2Error, match="first frame"):
        connection.receive(frames.PREFACE + frames.frame(FrameType.PING, 0, 0, bytes(8)))


@pytest.mark.parametrize("flags", [0, frames.END_STREAM])
def test_a_stream_window_ends_at_its_last_byte(flags: int) -> None:
    """Unconsumed bytes may fill the stream's window exactly; one byte more ends the connection."""
    full = frames.frame(FrameType.DATA, 0, 1, bytes(100))
    connection = _begun(window_bytes=100)
    (opened, received) = _events(connection, _headers(frames.END_HEADERS, 1, _BLOCK), full)
    assert isinstance(received, Received)
    assert len(received.data) == 100
    with pytest.raises(H2Error) as caught:
        connection.receive(frames.frame(FrameType.DATA, flags, 1, b"x"))
    assert caught.value.code == H2Code.FLOW_CONTROL_ERROR
    assert opened.stream is received.stream


def test_consumed_bytes_reopen_the_window() -> None:
    """The window grows back by the bytes that the call consumed, and is enforced as before."""
    full = frames.frame(FrameType.DATA, 0, 1, bytes(100))
    connection = _begun(window_bytes=100)
    _, received = _events(connection, _headers(frames.END_HEADERS, 1, _BLOCK), full)
    connection.consumed(received.stream, 100)
    assert len(_events(connection, full)) == 1
    with pytest.raises(H2Error):
        connection.receive(full)
