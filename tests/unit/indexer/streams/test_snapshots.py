"""Sequence state machine: views built and repaired from snapshots."""

from __future__ import annotations

from tests.support.indexer.streams import EXACT, RECOVERING, STALE, Loop, followed, payload, state_and_reason


def test_a_snapshot_comes_before_the_history() -> None:
    """A view starts with the snapshot if the engine offers one, and live batches wait for it."""
    loop = Loop(snapshots=True, history=1)
    for _ in range(3):
        loop.publish()
    loop.connect()
    assert (loop.fetches, loop.replays, state_and_reason(loop)) == (1, [], (RECOVERING, "snapshot"))
    loop.publish()
    loop.deliver()
    assert loop.view == []
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_a_failed_snapshot_triggers_a_replay() -> None:
    """A failed snapshot request is followed by a replay of the whole history."""
    loop = Loop(snapshots=True)
    loop.publish()
    loop.connect()
    loop.fail_fetch()
    assert loop.replays == [0]
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))


def test_with_neither_the_view_is_stale() -> None:
    """A late start without snapshot and replay is STALE, and live batches are applied."""
    loop = Loop(snapshots=True, replayable=False)
    loop.publish()
    loop.connect()
    loop.fail_fetch()
    assert state_and_reason(loop) == (STALE, "no_history")
    loop.publish()
    loop.deliver()
    assert (loop.view, state_and_reason(loop)) == ([payload(0, 1)], (STALE, "no_history"))


def test_a_gap_beyond_the_replay_buffer_triggers_a_snapshot() -> None:
    """A gap that cannot be replayed is repaired by a snapshot."""
    loop = followed(snapshots=True, history=1)
    loop.publish(lost=True)
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    assert loop.clears == ["history_truncated"]
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))


def test_snapshots_that_no_live_batch_can_follow_are_given_up() -> None:
    """Snapshots older than the lost batches are requested a bounded number of times."""
    loop = followed(0, snapshots=True, replayable=False)
    fetched = loop.fetches
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    for _ in range(10):
        loop.perform(loop.machine.snapshot_begun())
        loop.perform(loop.machine.snapshot_ended(0))
    assert loop.fetches - fetched == 3
    assert state_and_reason(loop) == (STALE, "gap")


def test_the_same_process_is_not_asked_for_a_second_snapshot() -> None:
    """After a reconnection the last batch identifies the process, if it has a replay socket."""
    loop = followed(snapshots=True)
    loop.disconnect()
    loop.publish()
    loop.connect()
    loop.settle()
    assert (loop.fetches, loop.clears, loop.view) == (1, [], loop.whole_life())


def test_after_a_lost_link_without_replay_a_snapshot_replaces_the_view() -> None:
    """Without a replay socket the old view is dropped until a snapshot arrives."""
    loop = followed(snapshots=True, replayable=False)
    loop.restart()
    loop.publish()
    loop.connect()
    assert state_and_reason(loop) == (RECOVERING, "snapshot")
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))


def test_a_link_lost_in_mid_snapshot_leaves_nothing_of_it() -> None:
    """A partly applied snapshot is dropped when the link is lost."""
    loop = Loop(snapshots=True)
    loop.publish()
    loop.connect()
    loop.perform(loop.machine.snapshot_begun())
    loop.perform(loop.machine.snapshot_batch(payload(0, 0)))
    loop.restart()
    assert loop.machine.snapshot_ended(1) == []
    loop.connect()
    loop.settle()
    assert (loop.view, loop.clears) == ([], ["snapshot"])
    assert state_and_reason(loop) == (EXACT, "")


def test_a_repair_keeps_the_view_until_the_snapshot_arrives() -> None:
    """A STALE view stays in use during a repair, and a failed attempt changes nothing."""
    loop = followed(snapshots=True)
    loop.machine.damaged(loop.current, "broken_event")
    loop.perform(loop.machine.repair())
    assert state_and_reason(loop) == (STALE, "broken_event")
    loop.publish()
    loop.deliver()
    loop.fail_fetch()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (STALE, "broken_event"))
    loop.perform(loop.machine.repair())
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))


def test_an_exact_view_is_not_repaired() -> None:
    """No snapshot is requested for an EXACT view."""
    assert followed(snapshots=True).machine.repair() == []


def test_an_invalid_view_is_rebuilt() -> None:
    """A view reported as wrong is rebuilt from a snapshot where one is offered, else from the history."""
    for snapshots in (True, False):
        loop = followed(snapshots=snapshots)
        loop.perform(loop.machine.invalidate("overfull"))
        assert loop.clears == ["overfull"]
        loop.settle()
        assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))
