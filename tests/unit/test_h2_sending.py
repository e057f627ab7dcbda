"""What our end of a connection sends: as much as the client's windows take, in frames as it wants them."""

from __future__ import annotations

import h2.events
import pytest
from h2.settings import SettingCodes

from tests.unit.h2_pair import HEADERS, TRAILERS, Pair


def test_an_answer_follows_a_window_of_one_byte() -> None:
    """A large answer comes byte by byte if that is all the client takes, and its trailers come last."""
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


def test_a_window_below_zero_has_to_be_filled_first() -> None:
    """Windows that the client makes smaller may go below 0; nothing is sent until they are above it again."""
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


def test_streams_share_the_connections_window() -> None:
    """What one stream has used of the connection's window another lacks, until the client gives more."""
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
def test_frames_are_no_larger_than_the_client_takes(frame_bytes: int) -> None:
    """Answers are cut into frames of the client's MAX_FRAME_SIZE."""
    pair = Pair(INITIAL_WINDOW_SIZE=1 << 24, MAX_FRAME_SIZE=frame_bytes)
    pair.client.increment_flow_control_window(1 << 24)
    stream = pair.open(ends=True)
    pair.server.send(stream, HEADERS, bytes(3 << 20))
    pair.pump()
    sizes = [len(event.data) for event in pair.events if isinstance(event, h2.events.DataReceived)]
    assert (max(sizes), sum(sizes)) == (frame_bytes, 3 << 20)


def test_what_new_settings_let_go_is_cut_by_them() -> None:
    """Settings that widen the windows and lower MAX_FRAME_SIZE at once, in this order, bring small frames."""
    pair = Pair(INITIAL_WINDOW_SIZE=0, MAX_FRAME_SIZE=1 << 15)
    stream = pair.open()
    pair.server.send(stream, HEADERS, bytes(20_000))
    pair.pump()
    changed = {SettingCodes.INITIAL_WINDOW_SIZE: 1 << 16, SettingCodes.MAX_FRAME_SIZE: 1 << 14}
    pair.client.update_settings(changed)
    pair.pump()
    sizes = [len(event.data) for event in pair.events if isinstance(event, h2.events.DataReceived)]
    assert sizes == [1 << 14, 20_000 - (1 << 14)]
