"""Sequence state machine: waiting batches, and the check of a quiet stream's last ones."""

from __future__ import annotations

from indexer.streams.state_machine import StreamMachine
from tests.support.indexer.streams import EXACT, followed, state_and_reason


def test_what_waits_for_a_replay_is_bounded() -> None:
    """Above the bound all waiting batches are dropped and replayed afterwards."""
    loop = followed(max_batches=2)
    loop.publish(lost=True)
    for _ in range(10):
        loop.publish()
        loop.deliver()
    assert len(loop.machine.waiting) <= 2
    loop.settle()
    assert loop.view == loop.whole_life()
    assert (loop.clears, state_and_reason(loop)) == ([], (EXACT, ""))


def test_batches_dropped_while_they_waited_are_replayed_without_another_event() -> None:
    """Dropped batches are replayed even if no further live batch arrives."""
    loop = followed(max_batches=2)
    loop.publish(lost=True)
    for _ in range(3):
        loop.publish()
        loop.deliver()
    assert not loop.machine.waiting
    loop.settle()
    assert loop.view == loop.whole_life()


def test_an_engine_that_answers_more_than_was_asked_does_no_harm() -> None:
    """Replayed batches that were already applied are ignored."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.answers.extendleft([2, 1, 0])
    loop.settle()
    assert loop.view == loop.whole_life()


def test_bytes_that_wait_are_bounded_too() -> None:
    """Waiting batches are bounded in bytes, too."""
    machine = StreamMachine(replayable=True, max_batches=100, max_bytes=100)
    machine.link_up()
    for sequence in range(1, 10):
        machine.live(sequence, b"x" * 60)
        assert machine.waiting.size_bytes <= 100


def test_a_lost_tail_is_found_when_the_stream_is_quiet() -> None:
    """The last batches before a pause may be lost without a gap; the tail check finds them."""
    loop = followed()
    loop.publish(lost=True)
    assert state_and_reason(loop) == (EXACT, "")
    loop.perform(loop.machine.check_tail())
    assert state_and_reason(loop) == (EXACT, "")
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.clears == []


def test_a_tail_check_does_not_delay_live_batches() -> None:
    """A live batch is applied during a tail check, and the check's late answers are ignored."""
    loop = followed()
    loop.perform(loop.machine.check_tail())
    loop.publish()
    loop.deliver()
    assert loop.view == loop.whole_life()
    loop.settle()
    assert loop.view == loop.whole_life()


def test_a_failed_tail_check_changes_nothing() -> None:
    """A replay socket that does not answer leaves an EXACT view as it is."""
    loop = followed()
    loop.perform(loop.machine.check_tail())
    loop.fail_replay()
    assert (len(loop.view), state_and_reason(loop)) == (3, (EXACT, ""))


def test_the_tail_of_an_empty_history_can_be_checked() -> None:
    """The tail check also finds a lost first batch."""
    loop = followed(0)
    loop.publish(lost=True)
    loop.perform(loop.machine.check_tail())
    loop.settle()
    assert loop.view == loop.whole_life()
