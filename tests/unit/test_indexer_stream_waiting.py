"""The sequence state machine: batches that wait for others, and a quiet stream's last ones."""

from __future__ import annotations

from indexer.streams.state_machine import StreamMachine
from tests.unit.stream_support import EXACT, followed, told


def test_what_waits_for_a_replay_is_bounded() -> None:
    """When too much waits it is dropped, and replayed afterwards: nothing is lost silently."""
    loop = followed(max_batches=2)
    loop.publish(lost=True)
    for _ in range(10):
        loop.publish()
        loop.deliver()
    assert len(loop.machine.waiting) <= 2
    loop.settle()
    assert loop.view == loop.whole_life()
    assert (loop.clears, told(loop)) == ([], (EXACT, ""))


def test_batches_dropped_while_they_waited_are_replayed_without_another_event() -> None:
    """A stream that falls silent after the drop is brought up to date all the same."""
    loop = followed(max_batches=2)
    loop.publish(lost=True)
    for _ in range(3):
        loop.publish()
        loop.deliver()
    assert not loop.machine.waiting
    loop.settle()
    assert loop.view == loop.whole_life()


def test_an_engine_that_answers_more_than_was_asked_does_no_harm() -> None:
    """Batches that were applied already are not applied again."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.answers.extendleft([2, 1, 0])
    loop.settle()
    assert loop.view == loop.whole_life()


def test_bytes_that_wait_are_bounded_too() -> None:
    """A few huge batches count as many small ones."""
    machine = StreamMachine(replayable=True, max_batches=100, max_bytes=100)
    machine.link_up()
    for sequence in range(1, 10):
        machine.live(sequence, b"x" * 60)
        assert machine.waiting.size_bytes <= 100


def test_a_lost_tail_is_found_when_the_stream_is_quiet() -> None:
    """The last batches before a pause may be lost without a gap; a check of the tail brings them."""
    loop = followed()
    loop.publish(lost=True)
    assert told(loop) == (EXACT, "")
    loop.perform(loop.machine.check_tail())
    assert told(loop) == (EXACT, "")
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.clears == []


def test_a_check_of_the_tail_holds_nothing_up() -> None:
    """A live batch is applied at once while the tail is checked, and the check's late answers are ignored."""
    loop = followed()
    loop.perform(loop.machine.check_tail())
    loop.publish()
    loop.deliver()
    assert loop.view == loop.whole_life()
    loop.settle()
    assert loop.view == loop.whole_life()


def test_a_check_of_the_tail_that_fails_changes_nothing() -> None:
    """A replay socket that does not answer is no reason to doubt an exact view."""
    loop = followed()
    loop.perform(loop.machine.check_tail())
    loop.fail_replay()
    assert (len(loop.view), told(loop)) == (3, (EXACT, ""))


def test_the_tail_of_an_empty_history_can_be_checked() -> None:
    """The very first batch may be the lost one."""
    loop = followed(0)
    loop.publish(lost=True)
    loop.perform(loop.machine.check_tail())
    loop.settle()
    assert loop.view == loop.whole_life()
