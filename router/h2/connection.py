"""HTTP/2 connection, server side (RFC 9113): received bytes in, events and bytes to send out.

The module is pure: no sockets, threads or clock. It implements the part of HTTP/2 that gRPC needs, without
push and priorities. Decoded header fields are interpreted by the caller's `read_head`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

from router.h2 import frames
from router.h2.frames import LIST_BYTES_MAX, Fields, FrameType, H2Code, H2Error, Setting
from router.h2.streams import Drained, Event, OpenBlock, Opened, Received, Reset, Stream

# Receive window of the whole connection. It is returned as data arrives: messages that arrive interleaved
# would otherwise wait for each other forever.
_CONNECTION_WINDOW_BYTES = 32 << 20
# Limit of unsent PING and SETTINGS acknowledgements; a peer above it floods the connection.
_CONTROL_ANSWERS_MAX = 1000
# Plain integers, because an enum member takes ten times as long to look up, once per frame.
_DATA, _CONTINUATION = int(FrameType.DATA), int(FrameType.CONTINUATION)


@dataclass(eq=False)
class H2Connection:
    """State of one client connection."""

    read_head: InitVar[Callable[[Fields], Any]]  # converts a request's header fields to `Stream.head`
    streams_max: int  # concurrent streams; further ones are refused with REFUSED_STREAM
    window_bytes: int  # receive window per stream: bytes in flight or not yet consumed
    unread_bytes_max: int = 128 << 20  # unconsumed bytes of all streams; the stream that exceeds it is reset

    def __post_init__(self, read_head: Callable[[Fields], Any]) -> None:
        self.streams: dict[int, Stream] = {}  # open streams by id
        self.last_stream_id = 0  # highest stream id that the peer has used
        self.frames_received = 0  # a header block counts as one frame
        self._heads = frames.HeaderBlocks(read_head)
        self._reader = frames.FrameReader()
        self._events: list[Event] = []
        self._control_answers = 0
        self._block: OpenBlock | None = None
        self._peer_frame_bytes = frames.FRAME_BYTES_LEAST
        self._peer_window_bytes = frames.WINDOW_BYTES_DEFAULT
        self._send_window_bytes = frames.WINDOW_BYTES_DEFAULT
        self._receive_window_bytes = _CONNECTION_WINDOW_BYTES
        self.unread_bytes = 0
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: self.streams_max,
            Setting.INITIAL_WINDOW_SIZE: self.window_bytes,
            Setting.MAX_FRAME_SIZE: self._reader.frame_bytes_max,
            Setting.MAX_HEADER_LIST_SIZE: LIST_BYTES_MAX,
        }
        more_bytes = _CONNECTION_WINDOW_BYTES - frames.WINDOW_BYTES_DEFAULT
        self.out: list[bytes | memoryview] = [
            frames.settings_frame(settings),
            frames.number_frame(FrameType.WINDOW_UPDATE, 0, more_bytes),
        ]

    @property
    def has_partial_data(self) -> bool:
        """Return whether an incomplete frame or header block has been received."""
        return self._reader.has_partial_data or self._block is not None

    def receive(self, data: bytes) -> list[Event]:
        """Process received bytes and return the events that they cause.

        Raises:
            H2Error: The peer violated the protocol; earlier events of `data` are lost with the connection.
        """
        self._events = []
        for kind, flags, stream_id, payload in self._reader.feed(data):
            if self._block is not None and (kind != _CONTINUATION or stream_id != self._block.stream_id):
                raise _broken("another frame inside a header block")
            self.frames_received += kind != _CONTINUATION
            if kind == _DATA:
                self._data(flags, stream_id, payload)
            elif (handle := _HANDLERS.get(kind)) is not None:
                handle(self, flags, stream_id, payload)
            else:
                frames.check_unused(kind, stream_id, payload)
        return self._events

    def data_to_send(self) -> list[bytes | memoryview]:
        """Return the bytes to send now, in order, and clear the buffer."""
        out, self.out = self.out, []
        self._control_answers = 0
        return out

    def send(
        self, stream: Stream, headers: bytes | None = None, data: bytes = b"", trailers: bytes | None = None
    ) -> None:
        """Send a part of a response, or queue it until the flow-control window allows.

        Headers without data and trailers form a complete response (gRPC's Trailers-Only).
        """
        if stream.is_closed:
            return
        size = len(data)
        if headers and trailers and stream.is_remote_closed and 0 < size <= self._room(stream):
            # Fast path: the complete response fits, so no state between its parts has to be kept.
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
            self._send_headers(stream, headers, ends=not data and trailers is None)
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
            self._send_headers(stream, trailers, ends=True)

    def reset(self, stream: Stream, code: H2Code) -> None:
        if not stream.is_closed:
            self.out.append(frames.number_frame(FrameType.RST_STREAM, stream.id, code))
            self._close(stream)

    def consumed(self, stream: Stream, size: int) -> None:
        """Record that a call consumed `size` bytes of a stream, and return them to the peer's window."""
        if stream.is_closed:
            return  # returned when the stream was closed
        stream.unread_bytes -= size
        self.unread_bytes -= size
        if stream.is_remote_closed:
            return
        stream.consumed_bytes += size
        # Return no window while responses are queued: a peer that reads no responses may send no requests.
        if stream.consumed_bytes * 2 >= self.window_bytes and not stream.pending:
            self._return_window(stream)

    def goaway(self, code: H2Code = H2Code.NO_ERROR, message: str = "", *, is_early: bool = False) -> None:
        """Send GOAWAY; with `is_early`, streams opened before the peer receives it are still served."""
        last = frames.STREAM_IDS if is_early else self.last_stream_id
        self.out.append(frames.goaway_frame(last, code, message))

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_window_bytes -= size
        # A frame is always smaller than the remaining half, so the window never reaches zero.
        if self._receive_window_bytes * 2 <= _CONNECTION_WINDOW_BYTES:
            more_bytes = _CONNECTION_WINDOW_BYTES - self._receive_window_bytes
            self.out.append(frames.number_frame(FrameType.WINDOW_UPDATE, 0, more_bytes))
            self._receive_window_bytes = _CONNECTION_WINDOW_BYTES
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_was_open(stream_id)
            return
        if stream.is_remote_closed:
            self._reject(stream, H2Code.STREAM_CLOSED)
            return
        stream.receive_window_bytes -= size
        if stream.receive_window_bytes < 0:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "DATA exceeds the stream's window")
        stream.unread_bytes += size
        self.unread_bytes += size
        if self.unread_bytes > self.unread_bytes_max:
            self._reject(stream, H2Code.ENHANCE_YOUR_CALM)
            return
        end_stream = bool(flags & frames.END_STREAM)
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
            self.consumed(stream, size - len(payload))
        stream.is_remote_closed = end_stream
        self._events.append(Received(stream, payload, end_stream))

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise _broken("a client's stream ids must be odd")
        if flags & frames.PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.PRIORITY:
            if len(payload) < 5:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, "HEADERS is too short for its priority fields")
            payload = payload[5:]
        self._block = OpenBlock(stream_id, bool(flags & frames.END_STREAM), payload)
        if flags & frames.END_HEADERS:
            self._block_complete(self._block)

    def _continuation(self, flags: int, _stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise _broken("CONTINUATION without HEADERS")
        block.parts += 1
        block.data += payload
        if len(block.data) > LIST_BYTES_MAX or block.parts > _CONTROL_ANSWERS_MAX:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, f"a header block above {LIST_BYTES_MAX} bytes")
        if flags & frames.END_HEADERS:
            self._block_complete(block)

    def _block_complete(self, block: OpenBlock) -> None:
        self._block = None
        # Decode blocks of refused streams too: every block may change the HPACK table.
        head = self._heads.head(block.data)
        stream = self.streams.get(block.stream_id)
        if stream is not None:
            if stream.is_remote_closed or not block.end_stream:
                raise _broken("headers in the middle of a stream")
            stream.is_remote_closed = True
            self._events.append(Received(stream, b"", True))
            return
        if block.stream_id <= self.last_stream_id:
            return  # trailers of a stream that was reset here
        self.last_stream_id = block.stream_id
        stream = Stream(block.stream_id, head, self._peer_window_bytes, self.window_bytes)
        stream.is_remote_closed = block.end_stream
        self.streams[stream.id] = stream
        if len(self.streams) > self.streams_max:
            self.reset(stream, H2Code.REFUSED_STREAM)
            self._count_control()
            return
        self._events.append(Opened(stream, block.end_stream))

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
            raise _broken("SETTINGS must be on stream 0")
        if flags & frames.ACK:
            frames.expect_size(payload, 0, "SETTINGS acknowledgement")
            return
        if len(payload) % 6:
            raise H2Error(H2Code.FRAME_SIZE_ERROR, "the size of SETTINGS is not a multiple of 6")
        # Acknowledge before sending queued data: the client applies the new windows from here on.
        self._answer_control(frames.frame(FrameType.SETTINGS, frames.ACK, 0))
        # Apply each setting once: a window change visits all streams, and repetitions would cost few bytes.
        values = dict(frames.read_settings(payload))
        if values.get(Setting.ENABLE_PUSH, 0) > 1:
            raise _broken("ENABLE_PUSH must be 0 or 1")
        self._peer_frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._peer_frame_bytes)
        if not frames.FRAME_BYTES_LEAST <= self._peer_frame_bytes <= frames.FRAME_BYTES_MOST:
            raise _broken("MAX_FRAME_SIZE is out of range")
        # The window size comes last: it releases queued data, which must follow the other new values.
        window_bytes = values.get(Setting.INITIAL_WINDOW_SIZE, self._peer_window_bytes)
        if window_bytes > frames.WINDOW_BYTES_MOST:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31 - 1")
        change, self._peer_window_bytes = window_bytes - self._peer_window_bytes, window_bytes
        for stream in list(self.streams.values()) if change else ():
            self._widen(stream, change)

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _broken("PING must be on stream 0")
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
                self._reject(stream, H2Code.FLOW_CONTROL_ERROR if more else H2Code.PROTOCOL_ERROR)
            else:
                self._widen(stream, more)
            return
        self._send_window_bytes += more
        if not more or self._send_window_bytes > frames.WINDOW_BYTES_MOST:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "the connection's window is out of range")
        for stream in [stream for stream in self.streams.values() if stream.pending]:
            self._resume(stream)

    def _reject(self, stream: Stream, code: H2Code) -> None:
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
            self._send_headers(stream, stream.trailers, ends=True)
        elif stream.consumed_bytes * 2 >= self.window_bytes and not stream.is_remote_closed:
            self._return_window(stream)

    def _room(self, stream: Stream) -> int:
        """Return the bytes that one DATA frame of the stream may carry now."""
        return min(stream.send_window_bytes, self._send_window_bytes, self._peer_frame_bytes)

    def _send_headers(self, stream: Stream, block: bytes, *, ends: bool) -> None:
        # The server's header blocks are smaller than the smallest allowed frame limit, 16 KiB.
        self.out.append(frames.headers_frame(stream.id, block, ends=ends))
        if not ends:
            return
        if not stream.is_remote_closed:
            # The response is complete, so the rest of the request is not needed (section 8.1).
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
            raise _broken("frame on a stream that was never opened")

    def _answer_control(self, answer: bytes) -> None:
        self.out.append(answer)
        self._count_control()

    def _count_control(self) -> None:
        self._control_answers += 1
        if self._control_answers > _CONTROL_ANSWERS_MAX:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, "too many frames that require an answer")


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
