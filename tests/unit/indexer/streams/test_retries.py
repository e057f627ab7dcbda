"""Sequence state machine: failed replays that are repeated later."""

from __future__ import annotations

import pytest

from tests.support.indexer.streams import EXACT, RECOVERING, STALE, Loop, followed, payload, state_and_reason


def stale(**settings: int | bool) -> Loop:
    """Return a loop whose first replay failed, and that has applied one live batch since."""
    loop = Loop(**settings)
    loop.publish()
    loop.connect()
    loop.fail_replay()
    loop.publish()
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == ([payload(0, 1)], (STALE, "replay_failed"))
    return loop


def test_a_later_replay_makes_the_view_exact() -> None:
    """A repeated replay rebuilds the view from its first answer on."""
    loop = stale()
    assert loop.machine.can_repair()
    loop.perform(loop.machine.repair())
    assert (loop.replays[-1], state_and_reason(loop)) == (0, (STALE, "replay_failed"))
    loop.answer()
    assert (loop.view, state_and_reason(loop)) == ([payload(0, 0)], (RECOVERING, "history"))
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))
    assert loop.clears == ["history"]


def test_until_the_first_answer_live_batches_are_applied() -> None:
    """A repeated replay without an answer affects neither the view nor live batches."""
    loop = stale()
    for _ in range(2):
        loop.perform(loop.machine.repair())
        assert not loop.machine.can_repair()
        loop.publish()
        loop.deliver()
        loop.fail_replay()
        assert state_and_reason(loop) == (STALE, "replay_failed")
        assert loop.machine.can_repair()
    assert (loop.view, loop.clears) == (loop.whole_life()[1:], [])


def test_a_batch_between_asking_and_the_first_answer_is_not_lost() -> None:
    """A batch applied to the old view and missing in the replay is requested for the new view."""
    loop = stale()
    loop.perform(loop.machine.repair())
    loop.publish()
    loop.deliver()
    loop.publish()
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))


def test_a_truncated_history_is_not_requested_again() -> None:
    """A replay without its beginning leaves the view STALE with the reason."""
    loop = stale(history=2)
    for _ in range(3):
        loop.publish()
    loop.settle()
    view = list(loop.view)
    loop.perform(loop.machine.repair())
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (view, (STALE, "history_truncated"))
    assert not loop.machine.can_repair()
    assert loop.machine.repair() == []


def test_a_view_that_was_emptied_meanwhile_is_not_touched() -> None:
    """Replay answers are ignored after a published clear has made the view EXACT."""
    loop = stale()
    loop.perform(loop.machine.repair())
    loop.publish()
    loop.deliver()
    loop.machine.emptied(loop.current)
    view = list(loop.view)
    loop.settle()
    assert (loop.view, loop.clears, state_and_reason(loop)) == (view, [], (EXACT, ""))


def test_a_retry_that_breaks_off_halfway_can_be_tried_again() -> None:
    """An interrupted replay is not a complete view and can be repeated."""
    loop = stale()
    loop.perform(loop.machine.repair())
    loop.answer()
    loop.fail_replay()
    assert (loop.view, state_and_reason(loop)) == ([], (STALE, "replay_failed"))
    loop.perform(loop.machine.repair())
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_snapshot_is_tried_before_the_replay(snapshot: bool) -> None:
    """A snapshot is requested first where it is offered, and a replay if it fails."""
    loop = followed(snapshots=True)
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.fail_replay()
    loop.fail_fetch()
    loop.fail_replay()
    assert state_and_reason(loop) == (STALE, "replay_failed")
    replays = len(loop.replays)
    loop.perform(loop.machine.repair())
    assert loop.fetching
    if not snapshot:
        loop.fail_fetch()
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))
    assert len(loop.replays) - replays == (0 if snapshot else 1)


def test_a_broken_event_does_not_trigger_a_replay() -> None:
    """A replay is not requested for a malformed event, which would be replayed as it is."""
    loop = followed()
    loop.machine.damaged(loop.current, "broken_event")
    assert not loop.machine.can_repair()
    assert loop.machine.repair() == []
