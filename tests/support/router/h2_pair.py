"""HTTP/2 server connection and a client of another library, joined in memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import h2.config
import h2.connection
import h2.events
from h2.settings import SettingCodes

from router.h2.connection import H2Connection
from router.h2.frames import STATUS_200, Fields, field
from router.h2.streams import Drained, Opened, Received, Reset, Stream

REQUEST = ((":method", "POST"), (":scheme", "http"), (":path", "/s/m"), (":authority", "a"))
HEADERS, TRAILERS = STATUS_200 + field(b"x", b"y"), b"\x00\x0bgrpc-status\x010"


def fields(block: Fields) -> Fields:
    """Return the fields themselves, as the `read_head` of a connection."""
    return block


class Pair:
    """Server and client; bytes that either sends are delivered by `pump`.

    Attributes:
        received: Bytes received by the server, by stream.
        ended: Ids of streams that the client has ended.
        resets: Ids of streams that the client has reset.
        answers: Bytes received by the client, by stream.
        answered: Ids of streams that the server has ended.
        events: All events of the client.
    """

    def __init__(
        self,
        *,
        streams_max: int = 100,
        window_bytes: int = 1 << 16,
        unread_bytes_max: int = 1 << 27,
        **settings: int,
    ) -> None:
        self.server = H2Connection(
            fields, streams_max=streams_max, window_bytes=window_bytes, unread_bytes_max=unread_bytes_max
        )
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.client: Any = h2.connection.H2Connection(config)
        self.streams: dict[int, Stream] = {}
        self.received: dict[int, bytes] = defaultdict(bytes)
        self.ended: set[int] = set()
        self.resets: set[int] = set()
        self.drained: list[int] = []
        self.answers: dict[int, bytes] = defaultdict(bytes)
        self.answered: set[int] = set()
        self.events: list[Any] = []
        self.client.initiate_connection()
        if settings:
            self.client.update_settings({SettingCodes[name]: value for name, value in settings.items()})
        self.pump()

    def pump(self, cut: int | None = None) -> None:
        """Exchange bytes until neither side has any; `cut` splits them into pieces of that size."""
        while True:
            out = self.client.data_to_send() + b""
            back = [bytes(part) for part in self.server.data_to_send()]
            if not out and not back:
                return
            for piece in _pieces(out, cut):
                self._server_receives(piece)
            # One frame at a time: the library applies a new MAX_FRAME_SIZE only when it receives more bytes.
            for part in back:
                for piece in _pieces(part, cut):
                    self._client_receives(piece)

    def open(self, *, ends: bool = False, more: tuple[tuple[str, str], ...] = ()) -> Stream:
        """Open a stream that both ends know at once."""
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, (*REQUEST, *more), end_stream=ends)
        self.pump()
        return self.streams[stream_id]

    def can_send(self, stream_id: int) -> int:
        """Return the bytes that the client may send in one frame now."""
        window = self.client.local_flow_control_window(stream_id)
        return int(max(0, min(window, self.client.max_outbound_frame_size)))

    def _server_receives(self, data: bytes) -> None:
        for event in self.server.receive(data):
            stream_id = event.stream.id
            if isinstance(event, Opened):
                assert stream_id not in self.streams
                self.streams[stream_id] = event.stream
            elif isinstance(event, Received):
                assert stream_id not in self.ended
                self.received[stream_id] += event.data
            elif isinstance(event, Reset):
                self.resets.add(stream_id)
            else:
                assert isinstance(event, Drained)
                self.drained.append(stream_id)
            if isinstance(event, Opened | Received) and event.end_stream:
                self.ended.add(stream_id)

    def _client_receives(self, data: bytes) -> None:
        for event in self.client.receive_data(data):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived):
                self.answers[event.stream_id] += event.data
            elif isinstance(event, h2.events.StreamEnded):
                self.answered.add(event.stream_id)


def _pieces(data: bytes, cut: int | None) -> list[bytes]:
    size = cut or len(data) or 1
    return [data[at : at + size] for at in range(0, len(data), size)]
