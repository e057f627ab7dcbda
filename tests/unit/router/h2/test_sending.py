"""Sending side of an HTTP/2 connection: flow-control windows and frame sizes of the client are respected."""

from __future__ import annotations

import h2.events
import pytest
from h2.settings import SettingCodes

from tests.support.router.h2_pair import HEADERS, TRAILERS, Pair


def test_a_window_of_one_byte_is_respected() -> None:
    """A large response leaves byte by byte if the client's windows allow no more; trailers come last."""
    pair = Pair(INITIAL_WINDOW_SIZE=0)
    stream = pair.open(ends=True)
    answer = bytes(range(256)) * 4
    pair.server.send(stream, HEADERS, answer[:100])
    pair.server.send(stream, None, answer[100:], TRAILERS)
    pair.pump()
    assert stream.pending_bytes == len(answer)
    for count in range(len(answer)):
        assert pair.answers[stream.id] == answer[:count]
        assert not pair.answered
        pair.client.increment_flow_control_window(1, stream.id)
        pair.pump()
    assert (pair.answers[stream.id], pair.answered) == (answer, {stream.id})
    assert pair.drained == [stream.id]


def test_a_negative_window_must_be_refilled() -> None:
    """A window that the client makes negative blocks sending until it is positive again."""
    pair = Pair(INITIAL_WINDOW_SIZE=1000)
    stream = pair.open(ends=True)
    pair.server.send(stream, HEADERS, b"a" * 1500)
    pair.pump()
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 200})
    pair.pump()
    assert stream.send_window_bytes == -800
    pair.client.increment_flow_control_window(800, stream.id)
    pair.pump()
    assert len(pair.answers[stream.id]) == 1000
    pair.client.increment_flow_control_window(1, stream.id)
    pair.pump()
    assert len(pair.answers[stream.id]) == 1001
    pair.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 5000})
    pair.pump()
    assert len(pair.answers[stream.id]) == 1500


def test_streams_share_the_connection_window() -> None:
    """Bytes sent on one stream reduce the connection's window for all others until the client enlarges it."""
    pair = Pair(INITIAL_WINDOW_SIZE=1 << 20)
    streams = [pair.open(ends=True) for _ in range(3)]
    for stream in streams:
        pair.server.send(stream, HEADERS, bytes(40_000), TRAILERS)
    pair.pump()
    assert [len(pair.answers[stream.id]) for stream in streams] == [40_000, 25_535, 0]
    pair.client.increment_flow_control_window(54_465)
    pair.pump()
    assert [len(pair.answers[stream.id]) for stream in streams] == [40_000, 40_000, 40_000]


@pytest.mark.parametrize("frame_bytes", [1 << 14, 20_000, 1 << 20])
def test_frames_respect_max_frame_size(frame_bytes: int) -> None:
    """Responses are split into frames of the client's MAX_FRAME_SIZE."""
    pair = Pair(INITIAL_WINDOW_SIZE=1 << 24, MAX_FRAME_SIZE=frame_bytes)
    pair.client.increment_flow_control_window(1 << 24)
    stream = pair.open(ends=True)
    pair.server.send(stream, HEADERS, bytes(3 << 20))
    pair.pump()
    sizes = [len(event.data) for event in pair.events if isinstance(event, h2.events.DataReceived)]
    assert (max(sizes), sum(sizes)) == (frame_bytes, 3 << 20)


def test_new_settings_apply_before_released_data() -> None:
    """SETTINGS that enlarge the window and lower MAX_FRAME_SIZE release data in frames of the new size."""
    pair = Pair(INITIAL_WINDOW_SIZE=0, MAX_FRAME_SIZE=1 << 15)
    stream = pair.open()
    pair.server.send(stream, HEADERS, bytes(20_000))
    pair.pump()
    changed = {SettingCodes.INITIAL_WINDOW_SIZE: 1 << 16, SettingCodes.MAX_FRAME_SIZE: 1 << 14}
    pair.client.update_settings(changed)
    pair.pump()
    sizes = [len(event.data) for event in pair.events if isinstance(event, h2.events.DataReceived)]
    assert sizes == [1 << 14, 20_000 - (1 << 14)]
