"""Connected client: reads its socket, starts its calls and writes their responses.

One thread reads. Any thread that responds writes, one at a time under a lock. TLS works in memory: records
in, plaintext out and the reverse.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Lock, get_ident
from typing import Final

import grpc

from common.repeated_log import RepeatedLog
from router.h2.connection import H2Connection
from router.h2.frames import CallHead, H2Code, H2Error, call_head, refusal_block
from router.h2.streams import CallServer, Drained, Event, Opened, Received, Stream, StreamCall

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_READ_BYTES = 256 << 10
# Timeout of one frame or header block; no gateway needs as long.
FRAME_S = 10.0
# Timeout of one write; a client that reads byte by byte blocks a thread for this long.
WRITE_S = 30.0
# Longest wait for the write lock before GOAWAY is skipped.
_GOAWAY_LOCK_S = 0.05
# Responses to small messages received together are sent together; larger messages flush them first.
_SHORT_BYTES = 8 << 10

# First byte of a TLS handshake record; HTTP/2 in plaintext starts with another byte.
HANDSHAKE: Final = 0x16


def host_of(address: str) -> str:
    """Return a "host:port" address without its port."""
    return address.rpartition(":")[0]


class Peer:
    """One client connection, served by `serve` until it ends."""

    def __init__(self, server: CallServer, connection: socket.socket, address: str) -> None:
        self.peer = address  # "host:port"
        self.server = server
        self._socket = connection
        self._lock = Lock()
        # The window must hold a whole message with its prefix, or large messages could never complete.
        window_bytes = server.receive_bytes_max + (64 << 10)
        self._connection = H2Connection(call_head, streams_max=server.streams_max, window_bytes=window_bytes)
        self._is_lost = False
        self._tls: TlsLayer | None = None
        # With TLS enabled, the client's first byte shows whether it uses TLS.
        self._may_send = server.tls is None
        self._reader = 0
        self._frames_received = 0
        self._partial_since_s: float | None = None

    @property
    def is_idle(self) -> bool:
        return not self._connection.streams

    def serve(self) -> None:
        """Read and serve until either side closes the connection."""
        room = memoryview(bytearray(_READ_BYTES))
        connection = self._connection
        self._reader = get_ident()
        try:
            self.flush()
            while size := self._receive(room):
                data = bytes(room[:size])
                with self._lock:
                    if self._tls is not None or not self._may_send:
                        data = self._plaintext(data)
                    events = connection.receive(data)
                    if connection.out:
                        self._write_out()
                if connection.frames_received != self._frames_received:
                    self._frames_received, self._partial_since_s = connection.frames_received, None
                else:
                    self._check_pace()
                for event in events:
                    self._handle_event(event)
                if connection.out:
                    with self._lock:
                        self._write_out()
        except H2Error as error:
            text = "gRPC connection closed, HTTP/2 violation: client=%s error=%s"
            _repeated.event("http2_error", host_of(self.peer), text, self.peer, error)
            self._send_goaway(error.code, str(error))
        except ssl.SSLError as error:
            text = "gRPC connection closed, TLS failed: client=%s error=%s"
            _repeated.event("tls_failed", host_of(self.peer), text, self.peer, error)
        except OSError:
            pass  # the client disconnected or is too slow
        finally:
            self._clean_up()

    def drain(self) -> None:
        """Ask the client by GOAWAY to make further calls on another connection."""
        self._send_goaway(H2Code.NO_ERROR, "server is draining", is_early=True)

    def close(self) -> None:
        """Close the connection, which also ends `serve`."""
        self._send_goaway(H2Code.NO_ERROR, "server is closing")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(
        self, stream: Stream, headers: bytes | None, data: bytes, trailers: bytes | None, consumed: int = 0
    ) -> None:
        """Send a part of a response and record `consumed` bytes of the request as consumed.

        Headers alone form a complete response. On the connection's thread, the data leaves after everything
        received together has been answered.
        """
        connection = self._connection
        try:
            with self._lock:
                connection.send(stream, headers, data, trailers)
                if consumed:
                    connection.consumed(stream, consumed)
                self._write_soon()
        except OSError:
            self._mark_broken()

    def consumed(self, stream: Stream, size: int) -> None:
        """Record bytes that a call consumed; the window update leaves with the next write."""
        self._change(partial(self._connection.consumed, stream, size))

    def flush_before(self, size: int) -> None:
        """Flush pending responses before a message of `size` bytes that may take long to serve."""
        if size > _SHORT_BYTES and self._connection.out:
            self.flush()

    def flush(self) -> None:
        try:
            with self._lock:
                self._write_out()
        except OSError:
            self._mark_broken()

    def cancel(self, stream: Stream) -> None:
        self._change(partial(self._connection.reset, stream, H2Code.CANCEL))

    def _receive(self, room: memoryview) -> int:
        """Return the number of bytes received; 0 at the end of the connection."""
        while True:
            try:
                return self._socket.recv_into(room)
            except BlockingIOError:
                # Socket timeout. Only a partly received frame is an error: idle connections are allowed.
                if self._connection.has_partial_data:
                    raise _too_slow() from None

    def _plaintext(self, data: bytes) -> bytes:
        """Return the plaintext of received bytes; the first byte decides whether they are TLS."""
        if self._tls is None:
            if self.server.tls is None or data[0] != HANDSHAKE:
                if not self.server.plaintext:
                    raise ssl.SSLError("the client does not use TLS, as this port requires")
                self._may_send = True
                return data
            self._tls = TlsLayer(self.server.tls())
        tls = self._tls
        try:
            data = tls.receive(data)
            self._may_send = tls.is_open
        finally:
            if records := tls.data_to_send():
                self._send(records)
        if tls.is_closed and not data:
            raise ConnectionResetError
        return data

    def _check_pace(self) -> None:
        """Raise H2Error if a frame or header block has been incomplete for longer than FRAME_S."""
        if not self._connection.has_partial_data:
            self._partial_since_s = None
        elif self._partial_since_s is None:
            self._partial_since_s = time.monotonic()
        elif time.monotonic() - self._partial_since_s > FRAME_S:
            raise _too_slow()

    def _handle_event(self, event: Event) -> None:
        stream = event.stream
        call = stream.call
        if isinstance(event, Received):
            if call is not None:
                call.receive(event.data, event.end_stream)
        elif isinstance(event, Opened):
            call = self._begin(stream)
            stream.call = None if stream.is_served else call
            if event.end_stream and call is not None:
                call.receive(b"", True)
        else:
            if call is not None:
                if isinstance(event, Drained):
                    call.drained()
                else:
                    call.cancelled()
            self._free_slot(stream)

    def _begin(self, stream: Stream) -> StreamCall | None:
        """Create the call of a new stream, or reject the stream and return None."""
        server, head = self.server, stream.head
        assert isinstance(head, CallHead)
        if head.refusal is not None:
            self.send(stream, head.refusal, b"", None)
            return None
        start = server.find(head.path)
        if start is None:
            self._refuse(stream, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return None
        if not server.begin_call():
            self._refuse(stream, grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            return None
        stream.holds_slot = True
        try:
            return start(self, stream)
        except Exception as error:
            path = head.path[:100]
            text = "call could not start: method=%s"
            _repeated.event("call_failed", path, text, path, level=logging.ERROR, error=error)
            self._refuse(stream, grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}")
            self.call_ended(stream)
            return None

    def call_ended(self, stream: Stream) -> None:
        """Release a stream whose call no thread works on any more."""
        stream.is_served = True
        # Break the reference cycle: an ended call may hold a large message, and the collector runs rarely.
        stream.call = None
        self._free_slot(stream)

    def _free_slot(self, stream: Stream) -> None:
        """Free the slot of an ended call once its response is sent; until then it occupies memory."""
        with self._lock:
            if not (stream.is_served and stream.is_closed and stream.holds_slot):
                return
            stream.holds_slot = False
        self.server.end_call(stream)

    def _refuse(self, stream: Stream, code: grpc.StatusCode, details: str) -> None:
        self.send(stream, refusal_block(code, details), b"", None)

    def _change(self, change: Callable[[], object]) -> None:
        try:
            with self._lock:
                change()
                self._write_soon()
        except OSError:
            self._mark_broken()

    def _write_soon(self) -> None:
        """Write now, except on the reader's thread, which writes all responses to one read together."""
        if get_ident() != self._reader:
            self._write_out()

    def _write_out(self) -> None:
        if not (self._connection.out and self._may_send):
            return
        data = b"".join(self._connection.data_to_send())
        if self._is_lost:
            return
        self._send(data if self._tls is None else self._tls.sealed(data))

    def _send(self, data: bytes) -> None:
        try:
            sent_bytes = self._socket.send(data)
            if sent_bytes < len(data):
                self._send_rest(memoryview(data)[sent_bytes:])
        except OSError:
            # Set under the lock so that waiting threads do not try to write as well.
            self._is_lost = True
            raise

    def _send_rest(self, data: memoryview) -> None:
        end_s = time.monotonic() + WRITE_S
        while data:
            if time.monotonic() > end_s:
                raise TimeoutError
            data = data[self._socket.send(data) :]

    def _send_goaway(self, code: H2Code, message: str, *, is_early: bool = False) -> None:
        # A writer that keeps the lock longer is blocked by a client that would not read GOAWAY either.
        if not self._lock.acquire(timeout=_GOAWAY_LOCK_S):
            return
        try:
            self._connection.goaway(code, message, is_early=is_early)
            self._write_out()
        except OSError:
            pass
        finally:
            self._lock.release()

    def _mark_broken(self) -> None:
        """Record that writing failed, and shut the socket down so that the reader ends as well."""
        self._is_lost = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _clean_up(self) -> None:
        with self._lock:
            self._is_lost = True
            streams = list(self._connection.streams.values())
            for stream in streams:
                stream.is_closed = True
        for stream in streams:
            if stream.call is not None:
                stream.call.cancelled()
            self._free_slot(stream)
        self._socket.close()


def _too_slow() -> H2Error:
    return H2Error(H2Code.PROTOCOL_ERROR, f"frame incomplete after {FRAME_S:g} s")


class TlsLayer:
    """Server side of one TLS connection; not thread-safe."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_open = False  # whether the handshake is complete, so that plaintext may be sent
        self.is_closed = False  # whether the client has closed TLS

    def receive(self, records: bytes) -> bytes:
        """Return the plaintext that these records complete.

        Raises:
            ssl.SSLError: Invalid records or a failed handshake; `data_to_send` returns the alert to send.
        """
        self._incoming.write(records)
        parts = []
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self.is_open = True
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            self.is_closed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_closed = True
        return b"".join(parts)

    def data_to_send(self) -> bytes:
        """Return records to send that carry no plaintext: handshakes, tickets, alerts."""
        return self._outgoing.read()

    def sealed(self, plaintext: bytes) -> bytes:
        """Encrypt plaintext and return it after other pending records; only when `is_open`."""
        self._tls.write(plaintext)
        return self._outgoing.read()
