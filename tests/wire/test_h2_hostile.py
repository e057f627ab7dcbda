"""Clients that break HTTP/2 or abuse it: they are cut off, and others are served as if nothing had been."""

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
from tests.wire.h2_support import METHODS, Served
from tests.wire.raw_h2_support import RawClient, data_frame, open_frame, prefixed
from tests.wire.router_wire_support import TIMEOUT_S, wait_until

# Whatever was done, others are served and nothing is left of it.
pytestmark = pytest.mark.usefixtures("sound")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, served: Served) -> Served:
    """The server, with less patience for slow clients."""
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
def test_what_is_no_http2_is_cut_off(served: Served, data: bytes) -> None:
    """A client of another protocol is told so in HTTP/2, and disconnected."""
    with RawClient(served.server.port, greets=False) as client:
        client.send(data)
        assert client.end()[0] == H2Code.PROTOCOL_ERROR


def test_silence_before_the_preface_ends(impatient: Served) -> None:
    """A client that connects and says nothing is disconnected."""
    with RawClient(impatient.server.port, greets=False) as client:
        assert client.end()[0] == H2Code.PROTOCOL_ERROR


def test_silence_between_calls_may_last(impatient: Served) -> None:
    """A client that has begun properly may be silent longer than one within a frame."""
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
        # A block that goes on and on, in frames that are whole.
        + frames.frame(FrameType.CONTINUATION, 0, 1, b"\x82") * 100,
    ],
    ids=["preface", "frame", "header block"],
)
def test_byte_by_byte_is_too_slow(impatient: Served, begun: bytes) -> None:
    """A client that spreads a frame, or a header block, over time is cut off though it never stops."""
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


def test_byte_by_byte_is_served_if_it_is_quick(client: RawClient) -> None:
    """How a call is cut into segments makes no difference."""
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
def test_floods_are_cut_off(client: RawClient, data: bytes) -> None:
    """Frames that cost more to answer than to send end the connection when there are too many at once."""
    client.send_until_closed(iter([data]))
    assert client.end()[0] in (H2Code.ENHANCE_YOUR_CALM, None)


def test_pings_are_answered(client: RawClient) -> None:
    """Any number of PINGs is answered to a client that takes the answers."""
    for number in range(3000):
        data = number.to_bytes(8, "big")
        client.send(frames.frame(FrameType.PING, 0, 0, data))
        answer = client.next(FrameType.PING)
        assert (answer.flags, answer.payload) == (frames.ACK, data)


def test_an_unread_flood_ends(impatient: Served) -> None:
    """A client that pings for ever and reads no answer is disconnected."""
    with RawClient(impatient.server.port) as client:
        client.send_until_closed(repeat(_PING * 500))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("message", [b"", prefixed(b"1 x")], ids=["headers", "message"])
def test_rapid_resets_leave_nothing(client: RawClient, served: Served, method: str, message: bytes) -> None:
    """Calls that are reset as soon as they are begun cost no place."""
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
def test_a_client_that_vanishes_ends_its_calls(served: Served, method: str) -> None:
    """A lost connection ends calls in every state: before, within and between messages."""
    whole = prefixed(b"1 x")
    for said in (b"", whole[:3], whole[:6], whole, whole + whole[:2]):
        with RawClient(served.server.port) as client:
            client.send(b"".join(open_frame(2 * number + 1, method) for number in range(50)))
            client.send(b"".join(data_frame(2 * number + 1, said) for number in range(50)))
            client.send(_PING)
            client.next(FrameType.PING)
    wait_until(lambda: served.server.open_calls == 0, "no calls are left")


def test_empty_data_costs_nothing_but_time(client: RawClient) -> None:
    """A flood of empty DATA frames holds up nobody, and the call that they belong to is served."""
    client.open(1)
    client.send(data_frame(1, b"") * 100_000)
    client.say(1, b"at last")
    assert client.answer(1)[0] == prefixed(b"at last")


def test_messages_that_wait_are_bounded(client: RawClient, served: Served) -> None:
    """Tiny messages behind one that takes its time end their call when they are too many."""
    client.open(1, "exchange")
    # So large that it is served on no connection's own thread.
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
    wait_until(lambda: served.server.open_calls == 0, "its call is over")
    served.plain.released.clear()


def test_a_client_that_takes_no_answers_is_disconnected(impatient: Served) -> None:
    """A client whose window is open but which never reads is cut off, and its calls end."""
    wide = {Setting.INITIAL_WINDOW_SIZE: frames.WINDOW_BYTES_MOST}
    with RawClient(impatient.server.port, wide) as client:
        client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, frames.WINDOW_BYTES_MOST - 65_535))
        for stream_id in range(1, 17, 2):
            is_stream = stream_id % 4 == 1
            client.open(stream_id, "server_stream" if is_stream else "unary")
            client.say(stream_id, b"1 " * is_stream + b"!large 8000000")
        wait_until(lambda: impatient.server.open_calls == 0, "its calls are over")
        wait_until(lambda: impatient.server.connections == 0, "it is disconnected")


def test_a_client_that_takes_answers_too_slowly_is_disconnected(impatient: Served) -> None:
    """A client that always takes a little, but never enough, does not keep a thread for long."""
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


def test_answers_that_nobody_takes_hold_their_places(served: Served) -> None:
    """A client that opens no window cannot have more answers kept for it than there are places for calls."""
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
        wait_until(lambda: served.server.open_calls == 128, "reset ones are free")
        client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 0, 100 << 20))
        for number in range(128, 256):
            client.send(frames.number_frame(FrameType.WINDOW_UPDATE, 2 * number + 1, 20_000))
        wait_until(lambda: served.server.open_calls == 0, "taken ones are free")


def test_messages_in_parts_do_not_wait_for_each_other(client: RawClient) -> None:
    """Messages sent side by side all arrive, though together they exceed the connection's window."""
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


def test_too_many_connections_cost_idle_ones(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """Beyond the limit the oldest connection without calls goes; if all have some, the new one does."""
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    with ExitStack() as opened:
        busy, idle, newer = (opened.enter_context(RawClient(served.server.port)) for _ in range(3))
        for client in (busy, idle, newer):
            client.next(FrameType.SETTINGS)
            client.next(FrameType.WINDOW_UPDATE)
        busy.open(1, "exchange")
        wait_until(lambda: served.server.open_calls == 1, "one is busy")
        fourth = opened.enter_context(RawClient(served.server.port))
        assert idle.end()[0] == H2Code.NO_ERROR
        for client in (newer, fourth):
            client.open(1, "exchange")
        wait_until(lambda: served.server.open_calls == 3, "all are busy")
        with RawClient(served.server.port, greets=False) as fifth:
            assert fifth.frame() is None
        for client in (busy, newer, fourth):
            client.say(1, b"still here")
            assert client.answer(1)[0] == prefixed(b"still here")
