"""gRPC calls: stream bytes in, response messages and one final status out.

Messages have a length prefix (PROTOCOL-HTTP2.md, Length-Prefixed-Message). `Call` is the base of all calls.
`ServicerCall` serves unary and server-streaming calls by handlers written for grpcio. The module does not
depend on sockets or on the methods that are served.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Lock
from typing import Any, Final, NoReturn

import grpc

from common.repeated_log import RepeatedLog
from router.h2.frames import HEADERS, CallHead, Metadata, refusal_block, trailers_block
from router.h2.peer import Peer
from router.h2.streams import Stream

_PREFIX = struct.Struct(">BI")
_PREFIX_BYTES = 5
# Smaller pieces of a message are appended to one buffer.
_PIECE_BYTES = 4096
# Prefix from (0 = not compressed, message size in bytes).
plain_prefix: Final = _PREFIX.pack
# wbits of zlib.decompressobj for a gzip and a zlib header.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

# A servicer's stream pauses while more response bytes wait for the client's flow-control window.
_PENDING_BYTES_MAX = 1 << 20


class MessageError(Exception):
    """Invalid message, or a servicer's `abort()`; the call ends with `status`."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageReader:
    """Splits one stream's bytes into messages; rejects larger ones than `bytes_max` by their prefix."""

    __slots__ = ("_bytes_max", "_encoding", "_flag", "_head", "_missing", "_parts")

    def __init__(self, encoding: str, bytes_max: int) -> None:
        self._encoding = encoding
        self._bytes_max = bytes_max
        self._head = b""
        # Missing bytes of the partly received message; None between messages.
        self._missing: int | None = None
        self._flag = 0
        self._parts: list[bytes | bytearray] = []

    @property
    def has_partial_data(self) -> bool:
        """Return whether a message has been received only in part."""
        return bool(self._head) or self._missing is not None

    def feed(self, data: bytes) -> Iterable[tuple[bytes, int]]:
        """Return the messages that `data` completes, each with its size on the wire in bytes.

        Raises:
            MessageError: A message is too large or cannot be decompressed.
        """
        if self._missing is None and not self._head:
            frame_bytes = len(data)
            # Fast path: nearly always one frame is exactly one message.
            if frame_bytes >= _PREFIX_BYTES:
                flag, size = _PREFIX.unpack_from(data)
                if not flag and size == frame_bytes - _PREFIX_BYTES and size <= self._bytes_max:
                    return ((data[_PREFIX_BYTES:], frame_bytes),)
            elif not data:
                return ()
        return self._joined(data)

    def _joined(self, data: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield messages that arrive in pieces; each is copied once, when complete."""
        data, self._head, at = self._head + data, b"", 0
        while True:
            if self._missing is None:
                if len(data) - at < _PREFIX_BYTES:
                    self._head = data[at:]
                    return
                flag, size = _PREFIX.unpack_from(data, at)
                if size > self._bytes_max:
                    raise self._too_large(size)
                if flag > 1:
                    problem = "a message's compressed flag is neither 0 nor 1"
                    raise MessageError(grpc.StatusCode.INTERNAL, problem)
                self._flag, self._missing = flag, size
                at += _PREFIX_BYTES
            piece = data[at : at + self._missing]
            at += len(piece)
            self._missing -= len(piece)
            self._keep(piece)
            if self._missing:
                return
            message, self._parts, self._missing = b"".join(self._parts), [], None
            yield self._plain(message) if self._flag else message, len(message) + _PREFIX_BYTES

    def _keep(self, piece: bytes) -> None:
        # Separate objects for many small pieces would take many times their size.
        parts = self._parts
        if len(piece) >= _PIECE_BYTES:
            parts.append(piece)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += piece
        else:
            parts.append(bytearray(piece))

    def _plain(self, message: bytes) -> bytes:
        window_bits = _WINDOW_BITS.get(self._encoding)
        if window_bits is None:
            raise MessageError(grpc.StatusCode.INTERNAL, "a compressed message without grpc-encoding")
        decompressor = zlib.decompressobj(window_bits)
        try:
            # One byte above the limit: with the exact limit zlib may not report the end of the stream.
            plain = decompressor.decompress(message, self._bytes_max + 1)
        except zlib.error as error:
            raise MessageError(grpc.StatusCode.INTERNAL, f"invalid {self._encoding} data: {error}") from error
        if len(plain) > self._bytes_max:
            raise self._too_large(len(plain))
        if not decompressor.eof:
            raise MessageError(grpc.StatusCode.INTERNAL, f"truncated {self._encoding} data")
        return plain

    def _too_large(self, size: int) -> MessageError:
        return MessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._bytes_max})",
        )


class Call:
    """One gRPC call on an HTTP/2 stream, driven by the thread of its connection."""

    def __init__(self, peer: Peer, stream: Stream) -> None:
        head: CallHead = stream.head
        self._peer = peer
        self._stream = stream
        # Calls with more request bytes are served by the thread pool instead of the connection's thread.
        self._inline_bytes_max = peer.server.inline.get(head.path, -1)
        self._reader = MessageReader(head.encoding, peer.server.receive_bytes_max)
        self._has_headers = False
        self._lock = Lock()
        self.is_ended = False  # whether the status has been sent or the call was cancelled

    def is_active(self) -> bool:
        return not self.is_ended

    def receive(self, data: bytes, end_stream: bool) -> None:
        """Process received stream bytes; `end_stream` marks the last ones."""
        if self.is_ended:
            return
        try:
            for message, size in self._reader.feed(data):
                self._message(message, size)
            if end_stream and not self.is_ended:
                if self._reader.has_partial_data:
                    raise MessageError(grpc.StatusCode.INTERNAL, "the stream ended inside a message")
                self._all_received()
        except MessageError as error:
            self._end(error.status, str(error))

    def drained(self) -> None:
        """Handle that all data queued for the client's flow-control window has been sent."""

    def cancelled(self) -> None:
        """Handle a reset stream or a lost connection."""
        self._mark_ended()

    def cancel(self) -> None:
        """Reset the stream with CANCEL and end the call."""
        self._peer.cancel(self._stream)
        self.cancelled()

    def _message(self, message: bytes, size: int) -> None:
        raise NotImplementedError

    def _all_received(self) -> None:
        raise NotImplementedError

    def _on_ended(self) -> None:
        """Handle the end of the call; called once, when the status was sent or the call was cancelled."""
        raise NotImplementedError

    def _framed(self, answer: bytes) -> bytes:
        """Return a response message with its gRPC length prefix; raises MessageError if it is too large."""
        size, size_max = len(answer), self._peer.server.send_bytes_max
        if size > size_max:
            details = f"Sent message larger than max ({size} vs. {size_max})"
            raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return plain_prefix(0, size) + answer

    def _send(self, data: bytes, *, consumed: int = 0) -> None:
        self._peer.send(self._stream, self._headers(), data, None, consumed)

    def _end(
        self, code: grpc.StatusCode, details: str = "", metadata: Metadata = (), *, data: bytes = b""
    ) -> None:
        """Send the last response data and the status."""
        if self.is_ended:
            return
        if code is not grpc.StatusCode.OK and not self._has_headers and not data:
            self._peer.send(self._stream, refusal_block(code, details, metadata), b"", None)
        else:
            self._peer.send(self._stream, self._headers(), data, trailers_block(code, details, metadata))
        self._mark_ended()

    def _headers(self) -> bytes | None:
        """Return the response headers, or None if they have been sent."""
        headers = None if self._has_headers else HEADERS
        self._has_headers = True
        return headers

    def _mark_ended(self) -> None:
        with self._lock:
            if self.is_ended:
                return
            self.is_ended = True
        self._on_ended()


class ServicerCall(Call):
    """Call with one request message, served on the connection's thread unless the message is large.

    The call is also the context that its servicer receives: it implements the methods of
    grpc.ServicerContext that the servicers here use.
    """

    def __init__(self, peer: Peer, stream: Stream, handler: Any) -> None:
        super().__init__(peer, stream)
        self._handler = handler
        self._is_elsewhere = False
        self._request: bytes | None = None
        # Notified when the client reads responses; only for streaming responses.
        self._changed = Condition(self._lock) if handler.response_streaming else None
        self._callbacks: list[Callable[[], object]] = []
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: Metadata = ()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        with self._lock:
            if not self.is_ended:
                self._callbacks.append(callback)
            return not self.is_ended

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise MessageError(code, details)

    def drained(self) -> None:
        if self._changed is not None:
            with self._changed:
                self._changed.notify_all()

    def _message(self, message: bytes, size: int) -> None:
        # A complete message served inline needs no window update: closing the stream returns its bytes.
        if size > self._inline_bytes_max or not self._stream.is_remote_closed:
            self._peer.consumed(self._stream, size)
        if self._request is not None:
            raise self._not_one_message()
        self._request = message

    def _all_received(self) -> None:
        if self._request is None:
            raise self._not_one_message()
        size = len(self._request)
        if size > self._inline_bytes_max:
            self._is_elsewhere = True
            self._peer.server.run(self._serve_elsewhere)
        else:
            self._peer.flush_before(size)
            self._serve()

    def _not_one_message(self) -> MessageError:
        """Return the error for a unary request without exactly one message (gRPC's statuscodes.md)."""
        path = self._stream.head.path
        return MessageError(grpc.StatusCode.UNIMPLEMENTED, f'"{path}" requires exactly one request message.')

    def _serve_elsewhere(self) -> None:
        try:
            if not self.is_ended:
                self._serve()
        finally:
            self._peer.call_ended(self._stream)

    def _serve(self) -> None:
        """Run the servicer and end the call with its last response and status, or with its error."""
        data = b""
        try:
            data = self._answer()
        except MessageError as error:
            self._code, self._details = error.status, str(error)
        except Exception as error:
            path = self._stream.head.path
            _repeated.event(
                "call_failed", path, "call failed: method=%s", path, level=logging.ERROR, error=error
            )
            doing = "iterating responses" if self._handler.response_streaming else "calling application"
            self._code, self._details = grpc.StatusCode.UNKNOWN, f"Exception {doing}: {error}"
        self._end(self._code, self._details, self._trailing, data=data)

    def _answer(self) -> bytes:
        """Return the response of a unary call; a stream's responses are sent, and b"" is returned."""
        handler = self._handler
        try:
            # A handler without a deserializer receives bytes.
            request = (handler.request_deserializer or bytes)(self._request or b"")
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, "Exception deserializing request!") from error
        if self._changed is None:
            return self._written(handler.unary_unary(request, self))
        answers = handler.unary_stream(request, self)
        try:
            for answer in answers:
                self._send(self._written(answer))
                with self._changed:
                    self._changed.wait_for(self._has_room)
                if self.is_ended:
                    break
        finally:
            # Run the servicer's cleanup now instead of at garbage collection.
            answers.close()
        return b""

    def _has_room(self) -> bool:
        return self.is_ended or self._stream.pending_bytes <= _PENDING_BYTES_MAX

    def _written(self, answer: Any) -> bytes:
        try:
            data = (self._handler.response_serializer or bytes)(answer)
        except Exception as error:
            _log.exception("serializing response failed: method=%s", self._stream.head.path)
            raise MessageError(grpc.StatusCode.INTERNAL, "Failed to serialize response!") from error
        return self._framed(data)

    def _on_ended(self) -> None:
        self.drained()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("call callback failed: method=%s", self._stream.head.path)
        if not self._is_elsewhere:
            self._peer.call_ended(self._stream)
