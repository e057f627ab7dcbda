"""HTTP/2 connection under random input: garbage, and every sequence that a correct client may send."""

from __future__ import annotations

import h2.exceptions
import hpack
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.h2 import frames
from router.h2.connection import H2Connection
from router.h2.frames import FrameType, H2Code, H2Error
from router.h2.streams import Opened
from tests.support.depth import examples
from tests.support.router.h2_pair import HEADERS, REQUEST, TRAILERS, Pair, fields

_WINDOW_BYTES = 20_000
_BLOCK = hpack.Encoder().encode(REQUEST)
_BEGIN = frames.PREFACE + frames.settings_frame({})

_frames = st.builds(
    frames.frame,
    st.integers(0, 12),
    st.integers(0, 255) | st.sampled_from([0, 1, 4, 5]),
    st.sampled_from([0, 1, 2, 3, 5, 7, frames.STREAM_IDS]) | st.integers(0, 2**32 - 1),
    st.sampled_from([_BLOCK, b"", bytes(4), bytes(6), bytes(8), b"\x00\x04\x00\x00\x00\x00", b"\xff" * 9])
    | st.binary(max_size=60),
)
_heads = st.builds(
    frames.head,
    st.integers(0, 2**24 - 1),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
)
_garbage = st.lists(_frames | _heads | st.binary(max_size=40), max_size=30).map(b"".join)


@given(st.sampled_from([b"", frames.PREFACE, _BEGIN]), _garbage, st.lists(st.integers(0, 2000), max_size=10))
@settings(max_examples=examples(300))
def test_any_bytes_are_parsed_or_rejected(begin: bytes, garbage: bytes, cuts: list[int]) -> None:
    """Any input, split anywhere, ends in events or one H2Error, and all limits hold."""
    data = begin + garbage
    whole, whole_error = _fed([data])
    places = sorted({min(cut, len(data)) for cut in cuts})
    cut = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    parts, parts_error = _fed(cut)
    assert (whole.last_stream_id, whole_error) == (parts.last_stream_id, parts_error)


@given(_garbage, st.integers(1, 9))
@settings(max_examples=examples(50))
def test_single_bytes_give_the_same_frames(garbage: bytes, size: int) -> None:
    """Frames that arrive in tiny pieces are the same frames."""
    data = _BEGIN + garbage
    whole, whole_error = _fed([data])
    parts, parts_error = _fed([data[at : at + size] for at in range(0, len(data), size)])
    assert (list(whole.streams), whole_error) == (list(parts.streams), parts_error)


def _fed(parts: list[bytes]) -> tuple[H2Connection, str]:
    """Return a connection that received `parts` and answered its calls, and the error that ended it."""
    connection = H2Connection(fields, streams_max=3, window_bytes=_WINDOW_BYTES)
    try:
        for data in parts:
            for event in connection.receive(data):
                if isinstance(event, Opened):
                    connection.send(event.stream, HEADERS, b"answer")
            assert len(connection.streams) <= 3
            assert sum(stream.unread_bytes for stream in connection.streams.values()) <= 3 * _WINDOW_BYTES
    except H2Error as error:
        return connection, str(error)
    return connection, ""


class Both(RuleBasedStateMachine):
    """Correct client and our server, each doing anything that the protocol allows at any time."""

    @initialize(window=st.sampled_from([0, 1, 10, 1000, 65_535]), streams_max=st.integers(1, 8))
    def begin(self, window: int, streams_max: int) -> None:
        """Create a connection with small or large windows of the client."""
        self.pair = Pair(streams_max=streams_max, window_bytes=_WINDOW_BYTES, INITIAL_WINDOW_SIZE=window)
        self.streams_max = streams_max
        self.asked: dict[int, bytes] = {}
        self.said: dict[int, bytes] = {}
        self.asking: set[int] = set()
        self.unanswered: set[int] = set()
        self.answering: set[int] = set()
        self.whole: set[int] = set()
        self.count = 0

    @precondition(lambda self: len(self.pair.server.streams) < self.streams_max)
    @rule(ends=st.booleans(), more=st.lists(st.sampled_from(["a", "b", "c" * 900, "d" * 2000]), max_size=3))
    def open(self, ends: bool, more: list[str]) -> None:
        """The client opens a stream."""
        stream = self.pair.open(ends=ends, more=tuple(("x-more", value) for value in more))
        assert [value.decode() for name, value in stream.head if name == b"x-more"] == more
        self.unanswered.add(stream.id)
        self.asked[stream.id] = self.said[stream.id] = b""
        self.answering.add(stream.id)
        if not ends:
            self.asking.add(stream.id)

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), size=st.integers(0, 30_000), ends=st.booleans(), padding=st.integers(0, 20))
    def ask(self, data: st.DataObject, size: int, ends: bool, padding: int) -> None:
        """The client sends as many bytes as the window allows."""
        stream_id = data.draw(st.sampled_from(sorted(self.asking)))
        room = self.pair.can_send(stream_id) - padding - 1
        if room < 0:
            return
        part = self._bytes(min(size, room))
        self.pair.client.send_data(stream_id, part, end_stream=ends, pad_length=padding or None)
        self.asked[stream_id] += part
        if ends:
            self.asking.discard(stream_id)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def ask_trailers(self, data: st.DataObject) -> None:
        """The client ends a stream by trailers."""
        stream_id = data.draw(st.sampled_from(sorted(self.asking)))
        self.pair.client.send_headers(stream_id, [("x-end", "1")], end_stream=True)
        self.asking.discard(stream_id)

    @precondition(lambda self: self.answering)
    @rule(data=st.data(), size=st.integers(1, 50_000))
    def answer(self, data: st.DataObject, size: int) -> None:
        """The server sends data, and queues what the client's window does not allow."""
        stream_id = data.draw(st.sampled_from(sorted(self.answering)))
        part = self._bytes(size)
        self.pair.server.send(self.pair.streams[stream_id], self._headers(stream_id), part)
        self.said[stream_id] += part

    @precondition(lambda self: self.answering)
    @rule(data=st.data())
    def answer_trailers(self, data: st.DataObject) -> None:
        """The server ends a stream, possibly before the client does."""
        stream_id = data.draw(st.sampled_from(sorted(self.answering)))
        self.pair.server.send(self.pair.streams[stream_id], self._headers(stream_id), b"", TRAILERS)
        self.answering.discard(stream_id)
        self.asking.discard(stream_id)
        self.whole.add(stream_id)
        # Data that the client sends on an ended stream is dropped.
        self.pair.pump()

    def _headers(self, stream_id: int) -> bytes | None:
        if stream_id not in self.unanswered:
            return None
        self.unanswered.remove(stream_id)
        return HEADERS

    @precondition(lambda self: self.answering)
    @rule(data=st.data(), is_ours=st.booleans())
    def reset(self, data: st.DataObject, is_ours: bool) -> None:
        """Either side resets a stream."""
        stream_id = data.draw(st.sampled_from(sorted(self.answering)))
        if is_ours:
            self.pair.server.reset(self.pair.streams[stream_id], H2Code.CANCEL)
        else:
            self.pair.client.reset_stream(stream_id)
        self.answering.discard(stream_id)
        self.asking.discard(stream_id)
        self.pair.pump()

    @precondition(lambda self: self.pair.streams)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        """A call consumes some of the received bytes."""
        stream = data.draw(st.sampled_from(list(self.pair.streams.values())))
        size = data.draw(st.integers(0, stream.unread_bytes))
        self.pair.server.consumed(stream, size)

    @precondition(lambda self: self.answering)
    @rule(data=st.data(), size=st.integers(1, 40_000), is_whole=st.booleans())
    def widen(self, data: st.DataObject, size: int, is_whole: bool) -> None:
        """The client enlarges the window of a stream or of the connection."""
        stream_id = data.draw(st.sampled_from(sorted(self.answering)))
        self.pair.client.increment_flow_control_window(size, None if is_whole else stream_id)

    @rule(window=st.sampled_from([0, 1, 500, 20_000, 65_535]), frame=st.sampled_from([1 << 14, 1 << 15]))
    def set(self, window: int, frame: int) -> None:
        """The client changes its settings while streams are open."""
        changed = {SettingCodes.INITIAL_WINDOW_SIZE: window, SettingCodes.MAX_FRAME_SIZE: frame}
        self.pair.client.update_settings(changed)

    @rule()
    def ping(self) -> None:
        """The client sends a PING."""
        self.pair.client.ping(b"12345678")

    @rule(cut=st.sampled_from([None, 1, 7, 100, 5000]))
    def pump(self, cut: int | None) -> None:
        """All sent bytes arrive."""
        self.pair.pump(cut)

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Received bytes are a prefix of those sent; windows and buffers are within their limits."""
        if not hasattr(self, "pair"):
            return
        server = self.pair.server
        for stream_id, heard in self.pair.received.items():
            assert self.asked[stream_id].startswith(heard)
        for stream_id, got in self.pair.answers.items():
            assert self.said[stream_id].startswith(got)
        for stream in server.streams.values():
            assert 0 <= stream.receive_window_bytes <= _WINDOW_BYTES
            assert 0 <= stream.unread_bytes <= _WINDOW_BYTES
            assert stream.pending_bytes == sum(map(len, stream.pending or ()))
        assert server.unread_bytes == sum(stream.unread_bytes for stream in server.streams.values())

    def teardown(self) -> None:
        """After the client opens all windows, every byte arrives."""
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        pair.pump()
        pair.client.increment_flow_control_window(1 << 30)
        for stream_id in list(pair.server.streams):
            try:
                pair.client.increment_flow_control_window((1 << 30) - 70_000, stream_id)
            except h2.exceptions.StreamClosedError:
                continue
        pair.pump()
        for stream_id in self.answering | self.whole:
            assert pair.answers.get(stream_id, b"") == self.said[stream_id]
        for stream_id in self.answering:
            assert pair.received.get(stream_id, b"") == self.asked[stream_id]
        assert self.whole <= pair.answered

    def _bytes(self, size: int) -> bytes:
        """Return bytes whose values show their position."""
        self.count += 1
        return (b"%d," % self.count * (size // 2 + 1))[:size]


Both.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
test_an_honest_client_loses_nothing = Both.TestCase


def test_unknown_frame_types_are_dropped() -> None:
    """Frames of unknown types are dropped at any point of the connection."""
    connection = H2Connection(fields, streams_max=3, window_bytes=_WINDOW_BYTES)
    connection.receive(_BEGIN)
    for kind in range(10, 256):
        assert not connection.receive(frames.frame(kind, 255, kind, bytes(kind)))
    flags = frames.END_HEADERS
    assert len(connection.receive(frames.frame(FrameType.HEADERS, flags, 1, _BLOCK))) == 1
