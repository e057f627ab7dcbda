"""Sequence state machine: views from a peer, verified with the engine or dropped."""

from __future__ import annotations

import pytest

from indexer.streams.actions import Fetch
from tests.support.indexer.streams import EXACT, RECOVERING, STALE, Loop, followed, payload, state_and_reason


def late(published: int = 5, **settings: int | bool) -> Loop:
    """Return a loop that starts late with a process that a peer has followed from its start."""
    loop = Loop(snapshots=True, **settings)
    for _ in range(published):
        loop.publish()
    loop.peer_follows()
    return loop


def test_a_peers_view_continues_at_its_last_batch() -> None:
    """The engine is asked for the view's last batch and all later ones; live batches wait meanwhile."""
    loop = late(history=3)
    loop.publish()
    loop.connect()
    loop.publish()
    loop.answer_fetch()
    assert (loop.replays, loop.view) == ([4], [payload(0, number) for number in range(5)])
    assert state_and_reason(loop) == (RECOVERING, "identity")
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")
    assert loop.clears == []


def test_a_peers_view_of_another_process_is_dropped() -> None:
    """If the engine's batch differs from the view's last one, the view is dropped."""
    loop = late()
    loop.life = 1
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.clears == ["peer_unproven"] * 4
    assert state_and_reason(loop) == (EXACT, "")
    assert (loop.fetches, loop.replays) == (4, [4, 4, 4, 4, 0])


def test_a_peers_view_older_than_the_replay_buffer_is_dropped() -> None:
    """If the engine no longer has the view's last batch, the view cannot be verified and is dropped."""
    loop = late(history=2)
    loop.publish()
    loop.publish()
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()[5:]
    assert state_and_reason(loop) == (STALE, "history_truncated")


def test_a_later_view_of_the_peer_may_be_verified() -> None:
    """After a view that was not verified the peer is asked again for a newer one."""
    loop = late(history=2)
    loop.publish()
    loop.publish()
    loop.connect()
    loop.answer_fetch()
    loop.answer()
    assert (loop.fetching, loop.view) == (True, [])
    loop.peer_follows()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_a_link_lost_before_verification_leaves_the_view_unverified() -> None:
    """After a reconnection the view is verified first; a new process drops it."""
    loop = late()
    loop.connect()
    loop.answer_fetch()
    loop.restart()
    assert state_and_reason(loop) == (RECOVERING, "link_down")
    loop.publish()
    loop.peer = []
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


@pytest.mark.parametrize("overlap", [1, 2])
def test_without_replay_a_common_batch_verifies_the_view(overlap: int) -> None:
    """A received batch that equals the view's last one verifies the process."""
    loop = late(replayable=False)
    loop.connect()
    for _ in range(overlap):
        loop.publish()
        loop.deliver()
    loop.peer_follows()
    loop.publish()
    loop.deliver()
    loop.answer_fetch()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_without_replay_and_a_common_batch_the_view_is_dropped() -> None:
    """A peer's view that may be of another process is dropped, and live batches are applied."""
    loop = late(replayable=False)
    loop.connect()
    loop.publish()
    loop.deliver()
    loop.settle()
    assert loop.view == [payload(0, 5)]
    assert state_and_reason(loop)[0] is STALE


def test_without_replay_an_earlier_batch_verifies_a_later_view() -> None:
    """A STALE view is repaired by a peer's view that ends with the last applied batch."""
    loop = late(replayable=False)
    loop.connect()
    loop.settle()
    assert state_and_reason(loop)[0] is STALE
    loop.publish()
    loop.settle()
    loop.peer_follows()
    loop.perform(loop.machine.repair())
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_an_equal_number_with_another_payload_does_not_verify() -> None:
    """The sequence number alone verifies nothing: the payloads must be equal."""
    loop = late(replayable=False)
    loop.life, loop.published = 1, 4
    loop.connect()
    loop.publish()
    loop.deliver()
    loop.settle()
    assert loop.view == [payload(1, 4)]
    assert state_and_reason(loop)[0] is STALE


def test_an_invalid_view_is_not_rebuilt_from_peers() -> None:
    """A view reported as wrong is not rebuilt from a peer's, which has the same events."""
    loop = late()
    loop.connect()
    loop.settle()
    assert Fetch(peers=False) in loop.machine.invalidate("overfull")
    loop.fail_fetch()
    loop.publish()
    loop.settle()
    assert loop.machine.live(0, payload(1, 0))[-1] == Fetch(peers=True)


def test_only_an_exact_view_without_a_replay_has_a_last_batch() -> None:
    """A view can be exported only after its first batch and while no replay runs."""
    loop = followed(0)
    assert loop.machine.last_batch is None
    loop.publish()
    loop.settle()
    mark = loop.machine.last_batch
    assert mark is not None
    assert (mark[0], len(mark[1])) == (0, 16)
    loop.perform(loop.machine.check_tail())
    assert loop.machine.last_batch is None
    assert loop.machine.cancel_tail_check()
    assert loop.machine.last_batch == mark
    assert not loop.machine.cancel_tail_check()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    assert loop.machine.last_batch is None
    loop.disconnect()
    assert loop.machine.last_batch is None


def test_without_replay_a_gap_behind_a_peers_view_triggers_a_snapshot() -> None:
    """A gap behind a peer's view cannot be replayed, and another snapshot is requested."""
    loop = late(replayable=False)
    loop.published = 4
    loop.connect()
    loop.publish()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.deliver()
    loop.answer_fetch()
    assert (loop.clears, loop.view, loop.fetches) == (["gap"], [], 2)
    loop.peer_follows()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_an_applied_batch_resets_the_count_of_unusable_snapshots() -> None:
    """An applied batch resets the count of snapshots that did not join up."""
    loop = late()
    for life in (1, 2):
        loop.restart()
        for _ in range(5):
            loop.publish()
        loop.connect()
        loop.settle()
        assert loop.view == loop.whole_life()
        assert loop.clears.count("peer_unproven") == 4 * life


def test_a_view_is_repaired_during_a_tail_check() -> None:
    """A snapshot request for a STALE view cancels a running tail check."""
    loop = followed(snapshots=True)
    loop.perform(loop.machine.snapshot_begun())
    loop.machine.damaged(loop.current, "unknown_parent")
    assert state_and_reason(loop)[0] is STALE
    loop.perform(loop.machine.check_tail())
    assert loop.answers
    loop.perform(loop.machine.repair())
    assert loop.fetching
