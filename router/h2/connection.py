"""One HTTP/2 connection, server side (RFC 9113): bytes received in, events and bytes to send out.

Pure: no sockets, no threads, no clock. As much of HTTP/2 as gRPC needs: no push, no priorities. Knows nothing
of gRPC but that a header block means something to `read_head`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from router.h2 import frames
from router.h2.frames import FrameReader, FrameType, H2Code, H2Error, Setting
from router.h2.header_blocks import LIST_BYTES_MAX, Fields, HeaderBlocks
from router.h2.streams import Drained, Event, OpenBlock, Opened, Received, Reset, Stream

# All streams of a connection together may have so much on its way. It is given back as it comes, for messages
# that come in parts, side by side, would otherwise wait for each other for ever.
_CONNECTION_WINDOW_BYTES = 32 << 20
# A peer that asks for so many answers without taking one does not want them.
_CONTROL_ANSWERS_MAX = 1000
# An enum's members take ten times as long to look up, and every frame would.
_DATA, _CONTINUATION = int(FrameType.DATA), int(FrameType.CONTINUATION)


class H2Connection:
    """One peer.

    Args:
        read_head: Makes of a request's header fields what its stream's `head` shall be.
        window_bytes: How much of one stream may be on its way or unread.
        unread_bytes_max: Unread bytes of all streams; a stream that sends more is reset.
    """

    def __init__(
        self,
        read_head: Callable[[Fields], Any],
        *,
        streams_max: int,
        window_bytes: int,
        unread_bytes_max: int = 128 << 20,
    ) -> None:
        self.streams: dict[int, Stream] = {}  # the open ones by number
        self.last_stream_id = 0  # the highest that the peer has used
        self.steps = 0  # frames that came so far, header blocks counted as one
        self._streams_max = streams_max
        self._window_bytes, self._unread_bytes_max = window_bytes, unread_bytes_max
        self._heads = HeaderBlocks(read_head)
        self._reader = FrameReader()
        self._events: list[Event] = []
        self._control_answers = 0
        self._block: OpenBlock | None = None
        self._peer_frame_bytes = frames.FRAME_BYTES_LEAST
        self._peer_window_bytes = frames.WINDOW_BYTES_DEFAULT
        self._send_window_bytes = frames.WINDOW_BYTES_DEFAULT
        self._receive_window_bytes = _CONNECTION_WINDOW_BYTES
        self.unread_bytes = 0
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: streams_max,
            Setting.INITIAL_WINDOW_SIZE: window_bytes,
            Setting.MAX_FRAME_SIZE: self._reader.frame_bytes_max,
            Setting.MAX_HEADER_LIST_SIZE: LIST_BYTES_MAX,
        }
        more_bytes = _CONNECTION_WINDOW_BYTES - frames.WINDOW_BYTES_DEFAULT
        self.out: list[bytes | memoryview] = [
            frames.settings_frame(settings),
            frames.number_frame(FrameType.WINDOW_UPDATE, 0, more_bytes),
        ]

    @property
    def is_within(self) -> bool:
        """Whether a part of something has come, and the rest has not."""
        return self._reader.is_within or self._block is not None

    def receive(self, data: bytes) -> list[Event]:
        """Reads what has come.

        Raises:
            H2Error: The peer broke the rules; events before it are lost with the connection.
        """
        self._events = []
        for kind, flags, stream_id, payload in self._reader.feed(data):
            if self._block is not None and (kind != _CONTINUATION or stream_id != self._block.stream_id):
                raise _broken("a header block is interrupted")
            self.steps += kind != _CONTINUATION
            if kind == _DATA:
                self._data(flags, stream_id, payload)
            elif (handle := _HANDLERS.get(kind)) is not None:
                handle(self, flags, stream_id, payload)
            else:
                frames.check_unused(kind, stream_id, payload)
        return self._events

    def take_out(self) -> list[bytes | memoryview]:
        """What is to be sent now, in order; it is the caller's from here on."""
        out, self.out = self.out, []
        self._control_answers = 0
        return out

    def send(
        self, stream: Stream, headers: bytes | None = None, data: bytes = b"", trailers: bytes | None = None
    ) -> None:
        """Send a part of an answer, or keep it until the peer has room; headers alone are all of it."""
        if stream.is_closed:
            return
        size = len(data)
        if headers and trailers and stream.is_remote_closed and 0 < size <= self._room(stream):
            # In one piece, without a look at what the parts leave behind.
            self.out += (
                frames.headers_frame(stream.id, headers, ends=False),
                frames.data_head(size << 8, 0, stream.id),
                data,
                frames.headers_frame(stream.id, trailers, ends=True),
            )
            self._send_window_bytes -= size
            self._close(stream)
            return
        if headers is not None:
            self._say_headers(stream, headers, ends=not data and trailers is None)
        if data and not stream.pending and size <= self._room(stream):
            self.out += (frames.data_head(size << 8, 0, stream.id), data)
            stream.send_window_bytes -= size
            self._send_window_bytes -= size
        elif data:
            if stream.pending is None:
                stream.pending = deque()
            stream.pending.append(memoryview(data))
            stream.pending_bytes += size
            self._send_pending(stream)
        if trailers is None:
            return
        if stream.pending:
            stream.trailers = trailers
        else:
            self._say_headers(stream, trailers, ends=True)

    def reset(self, stream: Stream, code: H2Code) -> None:
        if not stream.is_closed:
            self.out.append(frames.number_frame(FrameType.RST_STREAM, stream.id, code))
            self._close(stream)

    def consumed(self, stream: Stream, size: int) -> None:
        """A call has taken so many of a stream's bytes; the peer may send as many more."""
        if stream.is_closed:
            return  # given back when it was closed
        stream.unread_bytes -= size
        self.unread_bytes -= size
        if stream.is_remote_closed:
            return
        stream.consumed_bytes += size
        # A peer that does not take its answers gets no room for more questions.
        if stream.consumed_bytes * 2 >= self._window_bytes and not stream.pending:
            self._return_window(stream)

    def goaway(self, code: H2Code = H2Code.NO_ERROR, message: str = "", *, is_early: bool = False) -> None:
        """Tells the peer to go; `is_early`: streams that it begins until it has heard of that are served."""
        last = frames.STREAM_IDS if is_early else self.last_stream_id
        self.out.append(frames.goaway_frame(last, code, message))

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_window_bytes -= size
        # No frame is as large as the half that is left, so it is never used up.
        if self._receive_window_bytes * 2 <= _CONNECTION_WINDOW_BYTES:
            more_bytes = _CONNECTION_WINDOW_BYTES - self._receive_window_bytes
            self.out.append(frames.number_frame(FrameType.WINDOW_UPDATE, 0, more_bytes))
            self._receive_window_bytes = _CONNECTION_WINDOW_BYTES
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_was_open(stream_id)
            return
        if stream.is_remote_closed:
            self._give_up(stream, H2Code.STREAM_CLOSED)
            return
        stream.receive_window_bytes -= size
        if stream.receive_window_bytes < 0:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "more data than the stream's window")
        stream.unread_bytes += size
        self.unread_bytes += size
        if self.unread_bytes > self._unread_bytes_max:
            self._give_up(stream, H2Code.ENHANCE_YOUR_CALM)
            return
        is_over = bool(flags & frames.END_STREAM)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
            self.consumed(stream, size - len(payload))
        stream.is_remote_closed = is_over
        self._events.append(Received(stream, payload, is_over))

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise _broken("a client's streams have odd numbers")
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.PRIORITY:
            if len(payload) < 5:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, "HEADERS without its priority")
            payload = payload[5:]
        self._block = OpenBlock(stream_id, bool(flags & frames.END_STREAM), payload)
        if flags & frames.END_HEADERS:
            self._block_complete(self._block)

    def _continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise _broken("CONTINUATION of nothing")
        block.parts += 1
        block.data += payload
        if len(block.data) > LIST_BYTES_MAX or block.parts > _CONTROL_ANSWERS_MAX:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, f"a header block above {LIST_BYTES_MAX} bytes")
        if flags & frames.END_HEADERS:
            self._block_complete(block)

    def _block_complete(self, block: OpenBlock) -> None:
        self._block = None
        # Also of streams that are refused: the table follows every block.
        head = self._heads.head(block.data)
        stream = self.streams.get(block.stream_id)
        if stream is not None:
            if stream.is_remote_closed or not block.is_over:
                raise _broken("headers in the middle of a stream")
            stream.is_remote_closed = True
            self._events.append(Received(stream, b"", True))
            return
        if block.stream_id <= self.last_stream_id:
            return  # trailers of a stream that we have given up
        self.last_stream_id = block.stream_id
        stream = Stream(block.stream_id, head, self._peer_window_bytes, self._window_bytes)
        stream.is_remote_closed = block.is_over
        self.streams[stream.id] = stream
        if len(self.streams) > self._streams_max:
            self.reset(stream, H2Code.REFUSED_STREAM)
            self._count_control()
            return
        self._events.append(Opened(stream, block.is_over))

    def _rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        frames.expect_size(payload, 4, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_was_open(stream_id)
            return
        self._close(stream)
        self._events.append(Reset(stream))

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _broken("SETTINGS of a stream")
        if flags & frames.ACK:
            frames.expect_size(payload, 0, "an acknowledgement of SETTINGS")
            return
        if len(payload) % 6:
            raise H2Error(H2Code.FRAME_SIZE_ERROR, "SETTINGS of no whole number of pairs")
        # Before anything that wider windows let go: clients count by the new ones from here on.
        self._answer_control(frames.frame(FrameType.SETTINGS, frames.ACK, 0))
        # Each name once: that all streams follow a change of their windows must not be had for a few bytes.
        values = dict(frames.read_settings(payload))
        # Last what lets data go that waits: it is sent by the others' new values.
        for name in sorted(values, key=lambda name: name == Setting.INITIAL_WINDOW_SIZE):
            self._setting(name, values[name])

    def _setting(self, name: int, value: int) -> None:
        if name == Setting.ENABLE_PUSH and value > 1:
            raise _broken("ENABLE_PUSH is 0 or 1")
        if name == Setting.MAX_FRAME_SIZE:
            if not frames.FRAME_BYTES_LEAST <= value <= frames.FRAME_BYTES_MOST:
                raise _broken("MAX_FRAME_SIZE is out of its range")
            self._peer_frame_bytes = value
        if name == Setting.INITIAL_WINDOW_SIZE:
            if value > frames.WINDOW_BYTES_MOST:
                raise H2Error(H2Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31 - 1")
            change, self._peer_window_bytes = value - self._peer_window_bytes, value
            for stream in list(self.streams.values()):
                self._widen(stream, change)

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _broken("PING of a stream")
        frames.expect_size(payload, 8, "PING")
        if not flags & frames.ACK:
            self._answer_control(frames.frame(FrameType.PING, frames.ACK, 0, payload))

    def _window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        frames.expect_size(payload, 4, "WINDOW_UPDATE")
        more = int.from_bytes(payload, "big") & frames.WINDOW_BYTES_MOST
        if stream_id:
            stream = self.streams.get(stream_id)
            if stream is None:
                self._check_was_open(stream_id)
            elif not 0 < more <= frames.WINDOW_BYTES_MOST - stream.send_window_bytes:
                self._give_up(stream, H2Code.FLOW_CONTROL_ERROR if more else H2Code.PROTOCOL_ERROR)
            else:
                self._widen(stream, more)
            return
        self._send_window_bytes += more
        if not more or self._send_window_bytes > frames.WINDOW_BYTES_MOST:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "the connection's window is out of its range")
        for stream in [stream for stream in self.streams.values() if stream.pending]:
            self._resume(stream)

    def _give_up(self, stream: Stream, code: H2Code) -> None:
        self.reset(stream, code)
        self._events.append(Reset(stream))

    def _widen(self, stream: Stream, change: int) -> None:
        stream.send_window_bytes += change
        if stream.send_window_bytes > frames.WINDOW_BYTES_MOST:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "a stream's window is above 2^31 - 1")
        if stream.pending:
            self._resume(stream)

    def _resume(self, stream: Stream) -> None:
        self._send_pending(stream)
        if not stream.pending:
            self._events.append(Drained(stream))

    def _send_pending(self, stream: Stream) -> None:
        pending = stream.pending
        while pending and (room := self._room(stream)) > 0:
            data = pending.popleft()
            if len(data) > room:
                pending.appendleft(data[room:])
                data = data[:room]
            self.out += (frames.data_head(len(data) << 8, 0, stream.id), data)
            stream.pending_bytes -= len(data)
            stream.send_window_bytes -= len(data)
            self._send_window_bytes -= len(data)
        if pending:
            return
        if stream.trailers is not None:
            self._say_headers(stream, stream.trailers, ends=True)
        elif stream.consumed_bytes * 2 >= self._window_bytes and not stream.is_remote_closed:
            self._return_window(stream)

    def _room(self, stream: Stream) -> int:
        """Bytes that the peer takes in one frame now."""
        return min(stream.send_window_bytes, self._send_window_bytes, self._peer_frame_bytes)

    def _say_headers(self, stream: Stream, block: bytes, *, ends: bool) -> None:
        # Blocks of ours are small; the least that a peer takes is 16 KiB.
        self.out.append(frames.headers_frame(stream.id, block, ends=ends))
        if not ends:
            return
        if not stream.is_remote_closed:
            # The answer is whole; whatever the peer still has to say is not needed (section 8.1).
            self.out.append(frames.number_frame(FrameType.RST_STREAM, stream.id, H2Code.NO_ERROR))
        self._close(stream)

    def _close(self, stream: Stream) -> None:
        stream.is_closed = stream.is_remote_closed = True
        stream.pending = None
        stream.pending_bytes = 0
        self.unread_bytes -= stream.unread_bytes
        self.streams.pop(stream.id, None)

    def _return_window(self, stream: Stream) -> None:
        size, stream.consumed_bytes = stream.consumed_bytes, 0
        stream.receive_window_bytes += size
        self.out.append(frames.number_frame(FrameType.WINDOW_UPDATE, stream.id, size))

    def _check_was_open(self, stream_id: int) -> None:
        if stream_id > self.last_stream_id or not stream_id & 1:
            raise _broken("a frame of a stream that was never opened")

    def _answer_control(self, answer: bytes) -> None:
        self.out.append(answer)
        self._count_control()

    def _count_control(self) -> None:
        self._control_answers += 1
        if self._control_answers > _CONTROL_ANSWERS_MAX:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, "too many frames that want an answer")


def _broken(message: str) -> H2Error:
    return H2Error(H2Code.PROTOCOL_ERROR, message)


_HANDLERS: dict[int, Callable[[H2Connection, int, int, bytes], None]] = {
    FrameType.HEADERS: H2Connection._headers,
    FrameType.RST_STREAM: H2Connection._rst_stream,
    FrameType.SETTINGS: H2Connection._settings,
    FrameType.PING: H2Connection._ping,
    FrameType.WINDOW_UPDATE: H2Connection._window_update,
    FrameType.CONTINUATION: H2Connection._continuation,
}
