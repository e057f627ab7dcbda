"""One connected client: its socket's bytes in, calls begun and fed, their answers written.

A thread reads; whoever answers writes, one at a time. Knows which kind of call serves which kind of method.
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
from typing import TYPE_CHECKING

import grpc

from common.repeated_log import RepeatedLog
from router.h2.calls import Call
from router.h2.connection import H2Connection
from router.h2.exchange_call import ExchangeCall, ExchangeMethod
from router.h2.frames import H2Code, H2Error
from router.h2.header_blocks import CallHead, call_head, refusal_block
from router.h2.servicer_calls import ServicerCall
from router.h2.streams import Drained, Event, Opened, Received, Stream
from router.h2.tls import HANDSHAKE, TlsLayer

if TYPE_CHECKING:
    from router.h2.server import GrpcServer

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_RECEIVE_BYTES = 256 << 10
# A frame's parts follow each other at once; whoever needs longer is no gateway.
FRAME_S = 10.0
# Whoever takes an answer byte by byte keeps a thread that long.
WRITE_S = 30.0
_FAREWELL_S = 0.05
# Answers to short calls that came at once leave together, and before a call with a larger message.
_SHORT_BYTES = 8 << 10


def host_of(address: str) -> str:
    """Return an address without its port."""
    return address.rpartition(":")[0]


class Peer:
    """One client; `serve` runs as long as it is connected."""

    def __init__(self, host: GrpcServer, connection: socket.socket, address: str) -> None:
        self.peer = address  # "host:port"
        self.host = host
        self._socket = connection
        self._lock = Lock()
        # A whole message and its prefix have to fit, or none would ever be complete.
        window_bytes = host.receive_bytes_max + (64 << 10)
        self._connection = H2Connection(call_head, streams_max=host.streams_max, window_bytes=window_bytes)
        self._is_lost = False
        self._tls: TlsLayer | None = None
        # Where there is TLS, the client's first byte says whether it speaks it.
        self._may_send = host.tls is None
        self._reader = 0
        self._steps = 0
        self._step_s: float | None = None

    @property
    def is_idle(self) -> bool:
        return not self._connection.streams

    def serve(self) -> None:
        """Reads until the connection ends, from whichever side."""
        room = memoryview(bytearray(_RECEIVE_BYTES))
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
                if connection.steps != self._steps:
                    self._steps, self._step_s = connection.steps, None
                else:
                    self._check_pace()
                for event in events:
                    self._take(event)
                if connection.out:
                    with self._lock:
                        self._write_out()
        except H2Error as error:
            _repeated.event(
                "http2_error",
                host_of(self.peer),
                "a gRPC client at %s broke HTTP/2: %s",
                self.peer,
                error,
            )
            self._say_goaway(error.code, str(error))
        except ssl.SSLError as error:
            _repeated.event(
                "tls_failed",
                host_of(self.peer),
                "TLS with a gRPC client at %s failed: %s",
                self.peer,
                error,
            )
        except OSError:
            pass  # the client is gone, or too slow
        finally:
            self._lose()

    def drain(self) -> None:
        """Tells the client to make its next calls elsewhere, or on a new connection."""
        self._say_goaway(H2Code.NO_ERROR, "the server goes", is_early=True)

    def close(self) -> None:
        """Ends the connection; its reader then ends by itself."""
        self._say_goaway(H2Code.NO_ERROR, "the server ends")
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(
        self, stream: Stream, headers: bytes | None, data: bytes, trailers: bytes | None, consumed: int = 0
    ) -> None:
        """Send a part of an answer: what of it there is; headers alone are all of the answer.

        On the connection's own thread that is when all that was received at once is answered. Of what came
        the call has taken `consumed` bytes.
        """
        connection = self._connection
        try:
            with self._lock:
                connection.send(stream, headers, data, trailers)
                if consumed:
                    connection.consumed(stream, consumed)
                self._write_soon()
        except OSError:
            self._break()

    def consumed(self, stream: Stream, size: int) -> None:
        """The call has taken so many bytes; told with what is sent next, or where the client may wait."""
        self._change(partial(self._connection.consumed, stream, size))

    def flush_before(self, size: int) -> None:
        """Send what waits to be sent, if to serve a message of so many bytes may take its time."""
        if size > _SHORT_BYTES and self._connection.out:
            self.flush()

    def flush(self) -> None:
        try:
            with self._lock:
                self._write_out()
        except OSError:
            self._break()

    def cancel(self, stream: Stream) -> None:
        self._change(partial(self._connection.reset, stream, H2Code.CANCEL))

    def _receive(self, room: memoryview) -> int:
        """Bytes received; 0 at the connection's end."""
        while True:
            try:
                return self._socket.recv_into(room)
            except BlockingIOError:
                # The kernel's timeout; a connection may be silent as long as it likes between frames.
                if self._connection.is_within:
                    raise _too_slow() from None

    def _plaintext(self, data: bytes) -> bytes:
        """Take the client's bytes; the first of them says whether they are TLS.

        Raises:
            OSError: TLS has failed, or the client has ended it.
        """
        if self._tls is None:
            if self.host.tls is None or data[0] != HANDSHAKE:
                self._may_send = True
                return data
            self._tls = TlsLayer(self.host.tls())
        tls = self._tls
        try:
            data = tls.receive(data)
            self._may_send = tls.is_open
        finally:
            if records := tls.take_out():
                self._send(records)
        if tls.is_over and not data:
            raise ConnectionResetError
        return data

    def _check_pace(self) -> None:
        """Ends a connection that sends a frame, or a header block, byte by byte: no step was done."""
        if not self._connection.is_within:
            self._step_s = None
        elif self._step_s is None:
            self._step_s = time.monotonic()
        elif time.monotonic() - self._step_s > FRAME_S:
            raise _too_slow()

    def _take(self, event: Event) -> None:
        stream = event.stream
        call: Call | None = stream.call
        if isinstance(event, Received):
            if call is not None:
                call.receive(event.data, event.is_over)
        elif isinstance(event, Opened):
            call = self._begin(stream)
            stream.call = None if stream.is_served else call
            if event.is_over and call is not None:
                call.receive(b"", True)
        else:
            if call is not None:
                if isinstance(event, Drained):
                    call.drained()
                else:
                    call.cancelled()
            self._free_place(stream)

    def _begin(self, stream: Stream) -> Call | None:
        """The call for a new stream; None: it is refused, and answered."""
        host, head = self.host, stream.head
        assert isinstance(head, CallHead)
        if head.refusal is not None:
            self.send(stream, head.refusal, b"", None)
            return None
        method = host.find(head.path)
        if method is None:
            self._refuse(stream, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            return None
        if not host.begin_call():
            self._refuse(stream, grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            return None
        stream.holds_place = True
        try:
            if isinstance(method, ExchangeMethod):
                host.note_exchange(stream)
                return ExchangeCall(self, stream, method)
            return ServicerCall(self, stream, method)
        except Exception as error:
            _repeated.event(
                "call_failed",
                head.path[:100],
                "a call cannot begin: %s",
                head.path[:100],
                level=logging.ERROR,
                error=error,
            )
            self._refuse(stream, grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}")
            self.call_ended(stream)
            return None

    def call_ended(self, stream: Stream) -> None:
        """Nothing more will be done for a stream's call."""
        stream.is_served = True
        # What is over waits for no collector, which looks seldom: it may hold a large message.
        stream.call = None
        self._free_place(stream)

    def _free_place(self, stream: Stream) -> None:
        """Frees a served call's place once its answer is sent: until then it takes memory."""
        with self._lock:
            if not (stream.is_served and stream.is_closed and stream.holds_place):
                return
            stream.holds_place = False
        self.host.end_call(stream)

    def _refuse(self, stream: Stream, code: grpc.StatusCode, details: str) -> None:
        self.send(stream, refusal_block(code, details), b"", None)

    def _change(self, change: Callable[[], object]) -> None:
        try:
            with self._lock:
                change()
                self._write_soon()
        except OSError:
            self._break()

    def _write_soon(self) -> None:
        """Leaves it to the reader to send all answers to what came at once at once."""
        if get_ident() != self._reader:
            self._write_out()

    def _write_out(self) -> None:
        if not (self._connection.out and self._may_send):
            return
        data = b"".join(self._connection.take_out())
        if self._is_lost:
            return
        self._send(data if self._tls is None else self._tls.sealed(data))

    def _send(self, data: bytes) -> None:
        try:
            sent_bytes = self._socket.send(data)
            if sent_bytes < len(data):
                self._send_rest(memoryview(data)[sent_bytes:])
        except OSError:
            # Said before anybody else who waits for the lock tries the same.
            self._is_lost = True
            raise

    def _send_rest(self, data: memoryview) -> None:
        end_s = time.monotonic() + WRITE_S
        while data:
            if time.monotonic() > end_s:
                raise TimeoutError
            data = data[self._socket.send(data) :]

    def _say_goaway(self, code: H2Code, message: str, *, is_early: bool = False) -> None:
        # Whoever writes for longer does so to a client that takes nothing, and would not hear of it.
        if not self._lock.acquire(timeout=_FAREWELL_S):
            return
        try:
            self._connection.goaway(code, message, is_early=is_early)
            self._write_out()
        except OSError:
            pass
        finally:
            self._lock.release()

    def _break(self) -> None:
        """Nothing can be written any more: the reader shall notice, too."""
        self._is_lost = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _lose(self) -> None:
        with self._lock:
            self._is_lost = True
            streams = list(self._connection.streams.values())
            for stream in streams:
                stream.is_closed = True
        for stream in streams:
            call: Call | None = stream.call
            if call is not None:
                call.cancelled()
            self._free_place(stream)
        self._socket.close()


def _too_slow() -> H2Error:
    return H2Error(H2Code.PROTOCOL_ERROR, f"a frame is not complete after {FRAME_S:g} s")
