"""Clients that violate or abuse HTTP/2: they are disconnected, and other clients are still served."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import repeat

import pytest

from router.h2 import frames, peer, server
from router.h2.frames import FrameType, H2Code, Setting
from tests.support.router.doors import TIMEOUT_S, wait_until
from tests.support.router.h2 import METHODS, Served
from tests.support.router.raw_h2 import RawClient, data_frame, open_frame, prefixed

# After each attack: other clients are served and no state is left.
pytestmark = pytest.mark.usefixtures("sound")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, served: Served) -> Served:
    """Return a server with shorter timeouts for slow clients."""
    monkeypatch.setattr(server, "SOCKET_TIMEOUT_S", 1)
    monkeypatch.setattr(peer, "FRAME_S", 0.3)
    monkeypatch.setattr(peer, "WRITE_S", 1.0)
    return served


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        bytes.fromhex("16030100c8010000c403034f"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\r",
        b"\x00" * 100,
        os.urandom(1000),
    ],
    ids=["http/1.1", "tls", "almost", "zeros", "random"],
)
def test_other_protocols_are_disconnected(served: Served, data: bytes) -> None:
    """A client that does not speak HTTP/2 gets GOAWAY and is disconnected."""
    with RawClient(served.server.port, greets=False) as client:
        client.send(data)
        assert client.end()[0] == H2Code.PROTOCOL_ERROR


def test_silence_before_the_preface_times_out(impatient: Served) -> None:
    """A client that connects and sends nothing is disconnected."""
    with RawClient(impatient.server.port, greets=False) as client:
        assert client.end()[0] == H2Code.PROTOCOL_ERROR


def test_idle_connections_stay_open(impatient: Served) -> None:
    """A connection may be idle between calls for longer than the frame timeout."""
    with RawClient(impatient.server.port) as client:
        time.sleep(2.5)
        client.open(1)
        client.say(1, b"late")
        assert client.answer(1)[0] == prefixed(b"late")


@pytest.mark.parametrize(
    "begun",
    [
        frames.PREFACE,
        frames.PREFACE + frames.settings_frame({}) + data_frame(1, bytes(1000)),
        frames.PREFACE
        + frames.settings_frame({})
        + frames.frame(FrameType.HEADERS, 0, 1, b"\x82")
        # An endless header block in complete frames.
        + frames.frame(FrameType.CONTINUATION, 0, 1, b"\x82") * 100,
    ],
    ids=["preface", "frame", "header block"],
)
def test_a_frame_sent_byte_by_byte_times_out(impatient: Served, begun: bytes) -> None:
    """A client that sends a frame or header block too slowly is disconnected though it keeps sending."""
    with RawClient(impatient.server.port, greets=False) as client:
        ended = threading.Event()

        def slowly() -> Iterator[bytes]:
            for number in begun:
                if ended.wait(0.02):
                    return
                yield bytes((number,))

        sender = threading.Thread(target=client.send_until_closed, args=(slowly(),))
        sender.start()
        assert client.end()[0] in (H2Code.PROTOCOL_ERROR, None)
        ended.set()
        sender.join()


def test_a_quick_call_byte_by_byte_is_served(client: RawClient) -> None:
    """The split of a call into TCP segments makes no difference."""
    for number in open_frame(1) + data_frame(1, prefixed(b"in pieces"), ends=True):
        client.send(bytes((number,)))
    assert client.answer(1)[0] == prefixed(b"in pieces")


_PING = frames.frame(FrameType.PING, 0, 0, bytes(8))
_ENDLESS = frames.frame(FrameType.HEADERS, 0, 1, b"") + frames.frame(FrameType.CONTINUATION, 0, 1) * 5000


@pytest.mark.parametrize(
    "data",
    [_PING * 5000, frames.settings_frame({}) * 5000, _ENDLESS],
    ids=["ping", "settings", "continuation"],
)
def test_control_floods_end_the_connection(client: RawClient, data: bytes) -> None:
    """Too many frames at once that require an answer end the connection."""
    client.send_until_closed(iter([data]))
    assert client.end()[0] in (H2Code.ENHANCE_YOUR_CALM, None)


def test_pings_are_answered(client: RawClient) -> None:
    """Any number of PINGs is answered for a client that reads the answers."""
    for number in range(3000):
        data = number.to_bytes(8, "big")
        client.send(frames.frame(FrameType.PING, 0, 0, data))
        answer = client.next(FrameType.PING)
        assert (answer.flags, answer.payload) == (frames.ACK, data)


def test_an_unread_ping_flood_is_disconnected(impatient: Served) -> None:
    """A client that sends PINGs and reads no answer is disconnected."""
    with RawClient(impatient.server.port) as client:
        client.send_until_closed(repeat(_PING * 500))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("message", [b"", prefixed(b"1 x")], ids=["headers", "message"])
def test_rapid_resets_leave_no_calls(client: RawClient, served: Served, method: str, message: bytes) -> None:
    """Calls that are reset right after they open leave no slot occupied."""
    count = 10_000
    reset = [
        frames.number_frame(FrameType.RST_STREAM, 2 * number + 1, H2Code.CANCEL) for number in range(count)
    ]
    begin = [open_frame(2 * number + 1, method) for number in range(count)]
    said = [data_frame(2 * number + 1, message) if message else b"" for number in range(count)]

    def send() -> None:
        client.send_until_closed(map(b"".join, zip(begin, said, reset, strict=True)))
        client.send(_PING)

    sender = threading.Thread(target=send)
    sender.start()
    client.next(FrameType.PING)
    sender.join()
    wait_until(lambda: served.server.open_calls == 0, "no calls are left")


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_connection_ends_its_calls(served: Served, method: str) -> None:
    """A lost connection ends calls in every state: before, inside and between messages."""
    whole = prefixed(b"1 x")
    for said in (b"", whole[:3], whole[:6], whole, whole + whole[:2]):
        with RawClient(served.server.port) as client:
            client.send(b"".join(open_frame(2 * number + 1, method) for number in range(50)))
            client.send(b"".join(data_frame(2 * number + 1, said) for number in range(50)))
            client.send(_PING)
            client.next(FrameType.PING)
    wait_until(lambda: served.server.open_calls == 0, "no calls are left")


def test_a_flood_of_empty_data_is_harmless(client: RawClient) -> None:
    """A flood of empty DATA frames blocks no other client, and its call is still served."""
    client.open(1)
    client.send(data_frame(1, b"") * 100_000)
    client.say(1, b"at last")
    assert client.answer(1)[0] == prefixed(b"at last")


def test_queued_messages_are_bounded(client: RawClient, served: Served) -> None:
    """Too many tiny messages queued behind a slow one end their call."""
    client.open(1, "exchange")
    # Large enough to be served in the pool.
    first = prefixed(b"!stuck " + bytes(100_000))
    client.send(data_frame(1, first[:60_000]) + data_frame(1, first[60_000:]))
    assert served.plain.entered.acquire(timeout=TIMEOUT_S)
    client.send(data_frame(1, prefixed(b"") * 9_990))
    client.send(_PING)
    client.next(FrameType.PING)
    client.send(data_frame(1, prefixed(b"") * 20))
    try:
        data, trailers = client.answer(1)
        assert trailers["grpc-status"] == "8"
        assert not data
    finally:
        served.plain.released.set()
    wait_until(lambda: served.server.open_calls == 0, "the call has ended")
    served.plain.released.clear()


def test_a_client_that_reads_nothing_is_disconnected(impatient: Served) -> None:
    """A client with open windows that never reads is disconnected, and its calls end."""
    wide = {Setting.INITIAL_WINDOW_SIZE: frames.WINDOW_BYTES_MOST}
    with RawClient(impatient.server.port, wide) as client:
        client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, frames.WINDOW_BYTES_MOST - 65_535))
        for stream_id in range(1, 17, 2):
            is_stream = stream_id % 4 == 1
            client.open(stream_id, "server_stream" if is_stream else "unary")
            client.say(stream_id, b"1 " * is_stream + b"!large 8000000")
        wait_until(lambda: impatient.server.open_calls == 0, "calls have ended")
        wait_until(lambda: impatient.server.connections == 0, "client is disconnected")


def test_a_client_that_reads_too_slowly_is_disconnected(impatient: Served) -> None:
    """A client that reads a little at a time does not block a writing thread beyond the timeout."""
    wide = {Setting.INITIAL_WINDOW_SIZE: frames.WINDOW_BYTES_MOST}
    with RawClient(impatient.server.port, wide) as client:
        client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, frames.WINDOW_BYTES_MOST - 65_535))
        for stream_id in range(1, 17, 2):
            client.open(stream_id)
            client.say(stream_id, b"!large 8000000")
        taken_bytes = 0
        with suppress(ConnectionError):
            while data := client.socket.recv(1 << 16):
                taken_bytes += len(data)
                time.sleep(0.02)
        assert taken_bytes < 8 * 8_000_000


def test_unread_responses_occupy_their_slots(served: Served) -> None:
    """Responses queued for a client without window count towards the limit of calls."""
    with RawClient(served.server.port, {Setting.INITIAL_WINDOW_SIZE: 0}) as client:
        codes = []
        for number in range(300):
            client.open(2 * number + 1, "unary")
            client.say(2 * number + 1, b"!large 10000")
        refused = 0
        while refused < 300 - 256:
            frame = client.next(FrameType.HEADERS)
            if frame.flags & frames.END_STREAM:
                codes.append(client.fields(frame)["grpc-status"])
                refused += 1
            else:
                client.fields(frame)
        assert set(codes) == {"8"}
        assert served.server.open_calls == 256
        for number in range(128):
            client.send(frames.number_frame(FrameType.RST_STREAM, 2 * number + 1, H2Code.CANCEL))
        wait_until(lambda: served.server.open_calls == 128, "slots of reset calls are free")
        client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, 100 << 20))
        for number in range(128, 256):
            client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 2 * number + 1, 20_000))
        wait_until(lambda: served.server.open_calls == 0, "slots of read calls are free")


def test_interleaved_messages_do_not_block_each_other(client: RawClient) -> None:
    """Interleaved messages all arrive though together they exceed the connection's window."""
    size, count, part = 1 << 20, 64, 1 << 14
    message = prefixed(bytes(size))
    client.send(b"".join(open_frame(2 * number + 1) for number in range(count)))
    window_bytes = 65_535
    for at in range(0, len(message), part):
        ends = at + part >= len(message)
        for number in range(count):
            data = message[at : at + part]
            while window_bytes < len(data):
                frame = client.next(FrameType.WINDOW_UPDATE, 0)
                window_bytes += int.from_bytes(frame.payload, "big")
            window_bytes -= len(data)
            client.send(data_frame(2 * number + 1, data, ends=ends))
    client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, 1 << 30))
    for number in range(count):
        client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 2 * number + 1, 1 << 21))
    ended = set()
    while len(ended) < count:
        frame = client.next(FrameType.HEADERS)
        if frame.flags & frames.END_STREAM:
            ended.add(frame.stream_id)
            assert client.fields(frame)["grpc-status"] == "0"


def test_the_connection_limit_closes_idle_connections(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    """At the limit the oldest idle connection is closed; if none is idle, the new one is rejected."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    with ExitStack() as opened:
        busy, idle, newer = (opened.enter_context(RawClient(served.server.port)) for _ in range(3))
        for client in (busy, idle, newer):
            client.next(FrameType.SETTINGS)
            client.next(FrameType.WINDOW_UPDATE)
        busy.open(1, "exchange")
        wait_until(lambda: served.server.open_calls == 1, "one call is in progress")
        fourth = opened.enter_context(RawClient(served.server.port))
        assert idle.end()[0] == H2Code.NO_ERROR
        for client in (newer, fourth):
            client.open(1, "exchange")
        wait_until(lambda: served.server.open_calls == 3, "all calls are in progress")
        with RawClient(served.server.port, greets=False) as fifth:
            assert fifth.frame() is None
        for client in (busy, newer, fourth):
            client.say(1, b"still here")
            assert client.answer(1)[0] == prefixed(b"still here")
