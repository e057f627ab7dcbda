"""Answers to calls that came at once: short ones share a send, and none waits behind a call that is slow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from router.h2 import late_answers, peer
from router.h2.frames import FrameType
from router.h2.messages import prefixed
from tests.wire.h2_support import Served, serving
from tests.wire.raw_h2_support import RawClient, data_frame, open_frame
from tests.wire.router_wire_support import TIMEOUT_S, wait_until

_STUCK, _FREED = b"!stuck freed", prefixed(b"freed")


@pytest.fixture
def served() -> Iterator[Served]:
    """Plain, on the connections' own threads."""
    with serving("native") as served:
        yield served


@pytest.fixture
def never_at_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's own thread sends nothing before all that came at once is answered."""
    monkeypatch.setattr(peer, "_HELD_S", math.inf)


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread sends what a connection's own holds back."""
    monkeypatch.setattr(late_answers, "_LATE_S", math.inf)


def _call(stream_id: int, message: bytes) -> bytes:
    """A whole unary call."""
    return open_frame(stream_id) + data_frame(stream_id, prefixed(message), ends=True)


@pytest.mark.usefixtures("never_at_calls", "never_late")
def test_answers_to_short_calls_leave_together(served: Served) -> None:
    """Answers to whole calls that came in one piece leave in one piece, in their order."""
    with RawClient(served.server.port) as client:
        client.send(_call(1, b"first"))
        client.answer(1)
        stream_ids = range(3, 43, 2)
        client.send(b"".join(_call(stream_id, b"%d" % stream_id) for stream_id in stream_ids))
        # As many bytes as all answers have, at once.
        piece = client.socket.recv(1 << 16)
        at = [piece.index(prefixed(b"%d" % stream_id)) for stream_id in stream_ids]
        assert at == sorted(at)
    served.assert_sound()


def test_an_answer_that_was_held_for_long_leaves_before_the_next_call(
    served: Served, never_late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection's own thread sends what it has held for long enough before it begins another call."""
    monkeypatch.setattr(peer, "_HELD_S", -1.0)
    _assert_not_kept(served)


@pytest.mark.usefixtures("never_at_calls")
@pytest.mark.parametrize("quick", [1, 20])
def test_an_answer_leaves_while_the_next_call_takes_its_time(served: Served, quick: int) -> None:
    """What a connection's own thread holds when it gets stuck in a call is sent by another, each time."""
    with RawClient(served.server.port) as client:
        for first_id in (1, 101):
            stream_ids = range(first_id, first_id + 2 * quick, 2)
            calls = [_call(stream_id, b"quick") for stream_id in stream_ids]
            client.send(b"".join(calls) + _call(first_id + 2 * quick, _STUCK))
            for stream_id in stream_ids:
                assert client.answer(stream_id)[0] == prefixed(b"quick")
            assert served.plain.entered.acquire(timeout=TIMEOUT_S)
            assert served.own.open_calls == 1
            served.plain.released.set()
            assert client.answer(first_id + 2 * quick)[0] == _FREED
            served.plain.released.clear()
    served.assert_sound()


@pytest.mark.usefixtures("never_at_calls")
def test_a_client_that_leaves_its_held_answers_costs_nothing(served: Served) -> None:
    """Connections that end while they hold answers are looked after no more; others still are."""
    for _ in range(10):
        with RawClient(served.server.port) as client:
            client.send(_call(1, b"quick") + _call(3, _STUCK))
            assert served.plain.entered.acquire(timeout=TIMEOUT_S)
    wait_until(lambda: served.own.open_calls == 10, "their quick calls are over")
    served.plain.released.set()
    served.assert_sound()
    served.plain.released.clear()
    _assert_not_kept(served)


def _assert_not_kept(served: Served) -> None:
    """A quick call's answer comes while the one behind it is stuck."""
    with RawClient(served.server.port) as client:
        client.send(_call(1, b"quick") + _call(3, _STUCK))
        assert client.next(FrameType.DATA, 1).payload == prefixed(b"quick")
        assert served.plain.entered.acquire(timeout=TIMEOUT_S)
        served.plain.released.set()
        assert client.next(FrameType.DATA, 3).payload == _FREED
    served.assert_sound()
