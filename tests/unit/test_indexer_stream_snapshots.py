"""The sequence state machine: views built from snapshots, and healed by them."""

from __future__ import annotations

from tests.unit.stream_support import EXACT, RECOVERING, STALE, Loop, followed, payload, told


def test_a_snapshot_comes_before_the_history() -> None:
    """Where one is offered the view begins with it, and live batches wait for it."""
    loop = Loop(snapshots=True, history=1)
    for _ in range(3):
        loop.publish()
    loop.connect()
    assert (loop.fetches, loop.replays, told(loop)) == (1, [], (RECOVERING, "snapshot"))
    loop.publish()
    loop.deliver()
    assert loop.view == []
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_without_a_snapshot_the_history_is_asked_for() -> None:
    """A fetch that fails costs nothing where the engine remembers all."""
    loop = Loop(snapshots=True)
    loop.publish()
    loop.connect()
    loop.fail_fetch()
    assert loop.replays == [0]
    loop.settle()
    assert (loop.view, told(loop)) == (loop.whole_life(), (EXACT, ""))


def test_with_neither_the_view_is_stale() -> None:
    """No snapshot, no replay, a late start: that is told, and live batches are used."""
    loop = Loop(snapshots=True, replayable=False)
    loop.publish()
    loop.connect()
    loop.fail_fetch()
    assert told(loop) == (STALE, "no_history")
    loop.publish()
    loop.deliver()
    assert (loop.view, told(loop)) == ([payload(0, 1)], (STALE, "no_history"))


def test_a_gap_that_cannot_be_replayed_is_healed_by_a_snapshot() -> None:
    """What the engine has forgotten to replay it still knows by its state."""
    loop = followed(snapshots=True, history=1)
    loop.publish(lost=True)
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    assert loop.clears == ["history_truncated"]
    assert (loop.view, told(loop)) == (loop.whole_life(), (EXACT, ""))


def test_snapshots_that_no_live_batch_can_follow_are_given_up() -> None:
    """If each is older than what was lost behind it, it is not fetched for ever."""
    loop = followed(0, snapshots=True, replayable=False)
    fetched = loop.fetches
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    for _ in range(10):
        loop.perform(loop.machine.snapshot_begun())
        loop.perform(loop.machine.snapshot_ended(0))
    assert loop.fetches - fetched == 3
    assert told(loop) == (STALE, "gap")


def test_the_same_process_is_not_asked_for_a_second_snapshot() -> None:
    """After a lost link its last batch tells who it is, where it has a replay socket."""
    loop = followed(snapshots=True)
    loop.disconnect()
    loop.publish()
    loop.connect()
    loop.settle()
    assert (loop.fetches, loop.clears, loop.view) == (1, [], loop.whole_life())


def test_after_a_lost_link_without_replay_a_snapshot_replaces_the_view() -> None:
    """It may be another process; until its state is here the old view is not trusted."""
    loop = followed(snapshots=True, replayable=False)
    loop.restart()
    loop.publish()
    loop.connect()
    assert told(loop) == (RECOVERING, "snapshot")
    loop.settle()
    assert (loop.view, told(loop)) == (loop.whole_life(), (EXACT, ""))


def test_a_link_lost_in_mid_snapshot_leaves_nothing_of_it() -> None:
    """Half a snapshot is no view."""
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
    assert told(loop) == (EXACT, "")


def test_healing_keeps_the_view_until_a_better_one_comes() -> None:
    """A stale view is of use; a failed attempt changes nothing."""
    loop = followed(snapshots=True)
    loop.machine.damaged(loop.current, "broken_event")
    loop.perform(loop.machine.repair())
    assert told(loop) == (STALE, "broken_event")
    loop.publish()
    loop.deliver()
    loop.fail_fetch()
    assert (loop.view, told(loop)) == (loop.whole_life(), (STALE, "broken_event"))
    loop.perform(loop.machine.repair())
    loop.settle()
    assert (loop.view, told(loop)) == (loop.whole_life(), (EXACT, ""))


def test_an_exact_view_needs_no_healing() -> None:
    """Nothing is fetched for what lacks nothing."""
    assert followed(snapshots=True).machine.repair() == []


def test_a_doubted_view_is_built_anew() -> None:
    """From a snapshot where one is offered, else from the history."""
    for snapshots in (True, False):
        loop = followed(snapshots=snapshots)
        loop.perform(loop.machine.invalidate("overfull"))
        assert loop.clears == ["overfull"]
        loop.settle()
        assert (loop.view, told(loop)) == (loop.whole_life(), (EXACT, ""))
