"""Sequence state machine, case by case: actions, state and reason."""

from __future__ import annotations

from tests.support.indexer.streams import EXACT, RECOVERING, STALE, Loop, followed, payload, state_and_reason


def test_before_the_first_connection_the_state_is_recovering() -> None:
    """A stream without a connection is RECOVERING."""
    assert state_and_reason(Loop()) == (RECOVERING, "link_down")


def test_the_first_connection_replays_the_whole_history() -> None:
    """The first connection requests a replay from 0, and live batches wait for it."""
    loop = Loop()
    for _ in range(3):
        loop.publish()
    loop.connect()
    loop.publish()
    loop.deliver()
    assert (loop.view, loop.replays) == ([], [0])
    assert state_and_reason(loop) == (RECOVERING, "history")
    loop.settle()
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_an_empty_history_makes_the_view_exact() -> None:
    """An empty history is a complete one."""
    loop = followed(0)
    assert state_and_reason(loop) == (EXACT, "")


def test_a_truncated_history_is_stale_but_used() -> None:
    """A replay without its beginning is applied, and the view is STALE."""
    loop = Loop(history=2)
    for _ in range(5):
        loop.publish()
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()[3:]
    assert state_and_reason(loop) == (STALE, "history_truncated")


def test_a_gap_triggers_a_replay() -> None:
    """A missing batch is replayed from its number on; waiting batches are applied once, after it."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    assert state_and_reason(loop) == (RECOVERING, "gap")
    loop.publish()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.clears == []
    assert loop.machine.gaps == 1
    assert state_and_reason(loop) == (EXACT, "")


def test_a_gap_beyond_the_replay_buffer_clears_the_view() -> None:
    """A missing batch that the engine no longer has clears the view; later batches are applied."""
    loop = followed(history=1)
    loop.publish(lost=True)
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    assert loop.clears == ["history_truncated"]
    assert loop.view == loop.whole_life()[-1:]
    assert state_and_reason(loop) == (STALE, "history_truncated")


def test_a_replay_without_the_missing_batch_clears_the_view() -> None:
    """A replay that ends without the missing batch is not repeated."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.answers.clear()
    loop.answers.append(None)
    loop.settle()
    assert loop.clears == ["gap"]
    assert loop.replays == [0, 3]
    assert loop.view == loop.whole_life()[-1:]
    assert state_and_reason(loop) == (STALE, "gap")


def test_a_replay_that_fails_clears_the_view_and_goes_on_live() -> None:
    """A failed replay clears the view, and the waiting batches are applied."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.fail_replay()
    assert (loop.view, loop.clears) == (loop.whole_life()[-1:], ["replay_failed"])
    assert state_and_reason(loop) == (STALE, "replay_failed")
    loop.publish()
    loop.settle()
    assert loop.view == loop.whole_life()[-2:]


def test_answers_lost_in_mid_replay_are_requested_again() -> None:
    """A replay with a gap is repeated from the gap on."""
    loop = followed()
    for _ in range(4):
        loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.answers.remove(5)
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.replays == [0, 3, 5]
    assert loop.clears == []


def test_the_same_process_is_recognised_without_an_event() -> None:
    """After a reconnection the last applied batch is requested, and later batches are applied."""
    loop = followed()
    loop.disconnect()
    assert state_and_reason(loop) == (RECOVERING, "link_down")
    assert len(loop.view) == 3
    loop.publish()
    loop.connect()
    assert loop.replays == [0, 2]
    assert state_and_reason(loop) == (RECOVERING, "identity")
    loop.settle()
    assert (loop.view, loop.clears) == (loop.whole_life(), [])
    assert state_and_reason(loop) == (EXACT, "")


def test_a_new_process_is_recognised_without_an_event() -> None:
    """An engine without the last applied batch is a new process: the old view is cleared."""
    loop = followed()
    loop.restart()
    loop.connect()
    loop.settle()
    assert (loop.view, loop.clears) == ([], ["process_changed"])
    assert loop.replays == [0, 2, 0]
    assert state_and_reason(loop) == (EXACT, "")


def test_a_new_process_that_published_as_much_is_recognised_by_content() -> None:
    """A known sequence number with another payload identifies a new process."""
    loop = followed()
    loop.restart()
    for _ in range(7):
        loop.publish()
    loop.connect()
    loop.settle()
    assert loop.clears == ["process_changed"]
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_live_batches_of_a_new_process_wait_for_its_history() -> None:
    """Batches that arrive during the identity check are neither lost nor applied early."""
    loop = followed()
    loop.restart()
    loop.publish()
    loop.connect()
    loop.publish()
    loop.deliver()
    assert len(loop.view) == 3
    loop.settle()
    assert loop.view == loop.whole_life()


def test_a_sequence_that_goes_back_is_a_new_process() -> None:
    """A smaller sequence number on an unbroken link clears the view and replays from 0."""
    loop = followed()
    loop.life, loop.published = 1, 0
    loop.publish()
    loop.publish()
    loop.settle()
    assert loop.clears == ["sequence_went_back"]
    assert loop.view == loop.whole_life()
    assert state_and_reason(loop) == (EXACT, "")


def test_a_repeated_sequence_number_is_a_new_process() -> None:
    """A repeated sequence number on an unbroken link identifies a new process."""
    loop = followed(0)
    loop.publish()
    loop.settle()
    loop.life, loop.published = 1, 0
    loop.publish()
    loop.settle()
    assert loop.clears == ["sequence_went_back"]
    assert loop.view == loop.whole_life()


def test_a_restart_in_mid_replay_ends_that_replay() -> None:
    """Replay answers of the old process that arrive after the link was lost are not applied."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    late = loop.machine
    loop.restart()
    assert late.replayed(3, payload(0, 3)) == []
    assert late.replay_ended() == []
    loop.connect()
    loop.settle()
    assert loop.view == []


def test_without_replay_a_stream_is_exact_from_its_first_batch_on() -> None:
    """A stream received from sequence 0 on is complete."""
    loop = followed(3, replayable=False)
    assert (loop.view, loop.replays) == (loop.whole_life(), [])
    assert state_and_reason(loop) == (EXACT, "")


def test_without_replay_a_late_start_is_stale() -> None:
    """A stream received from a later batch on is STALE without a replay socket."""
    loop = Loop(replayable=False)
    loop.publish()
    loop.connect()
    assert state_and_reason(loop) == (STALE, "no_history")
    loop.publish()
    loop.settle()
    assert loop.view == [payload(0, 1)]
    assert state_and_reason(loop) == (STALE, "no_history")


def test_without_replay_a_gap_clears_the_view() -> None:
    """Without a replay socket a gap clears the view, and is counted once."""
    loop = followed(3, replayable=False)
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    assert (loop.view, loop.clears) == ([payload(0, 4)], ["gap"])
    assert state_and_reason(loop) == (STALE, "gap")
    assert loop.machine.gaps == 1


def test_without_replay_a_lost_link_clears_the_view() -> None:
    """Without a replay socket nothing identifies the process after a reconnection, so the view is cleared."""
    loop = followed(3, replayable=False)
    loop.disconnect()
    assert len(loop.view) == 3
    loop.connect()
    assert (loop.view, loop.clears) == ([], ["link_lost"])
    assert state_and_reason(loop) == (STALE, "no_history")
    loop.restart()
    loop.connect()
    loop.publish()
    loop.settle()
    assert state_and_reason(loop) == (EXACT, "")


def test_a_cleared_cache_makes_any_view_exact() -> None:
    """An empty cache is known completely, whatever was missed before."""
    loop = Loop(replayable=False)
    loop.publish()
    loop.connect()
    loop.publish()
    loop.settle()
    loop.machine.emptied(loop.current)
    assert state_and_reason(loop) == (EXACT, "")


def test_an_unreadable_batch_makes_the_view_stale() -> None:
    """A view with an unreadable batch is STALE; the first reason stays."""
    loop = followed()
    loop.machine.damaged(loop.current, "broken_event")
    loop.machine.damaged(loop.current, "oversize")
    assert state_and_reason(loop) == (STALE, "broken_event")


def test_results_of_a_dropped_view_do_not_affect_the_next() -> None:
    """The outcome of a batch is ignored if its view was dropped meanwhile."""
    loop = followed(2, replayable=False)
    dropped = loop.current
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    loop.machine.emptied(dropped)
    assert state_and_reason(loop) == (STALE, "gap")
    loop.machine.emptied(loop.current)
    loop.machine.damaged(dropped, "broken_event")
    assert state_and_reason(loop) == (EXACT, "")


def test_a_batch_before_the_connection_event_counts_as_connected() -> None:
    """The first message or the connection event, whichever is first, requests the history."""
    loop = Loop()
    loop.publish()
    loop.perform(loop.machine.live(0, payload(0, 0)))
    loop.settle()
    assert (loop.view, loop.replays) == (loop.whole_life(), [0])


def test_a_cache_that_was_dropped_silently_is_empty_and_stale() -> None:
    """The stream continues at its position, and a published clear makes the view EXACT."""
    loop = followed()
    loop.perform(loop.machine.emptied_silently("asleep"))
    assert (loop.view, loop.clears, state_and_reason(loop)) == ([], ["asleep"], (STALE, "asleep"))
    loop.publish()
    loop.settle()
    assert loop.view == loop.whole_life()[-1:]
    loop.machine.emptied(loop.current)
    assert state_and_reason(loop) == (EXACT, "")
    assert loop.replays == [0]


def test_a_published_clear_is_not_awaited_again() -> None:
    """A view without stores since the published clear stays EXACT; one with stores is cleared."""
    loop = followed()
    loop.machine.emptied(loop.current, holds_nothing=True)
    loop.perform(loop.machine.emptied_silently("asleep"))
    assert (loop.clears, state_and_reason(loop)) == ([], (EXACT, ""))
    loop.publish()
    loop.settle()
    loop.perform(loop.machine.emptied_silently("asleep"))
    assert (loop.clears, state_and_reason(loop)) == (["asleep"], (STALE, "asleep"))


def test_a_stream_may_start_at_a_declared_number() -> None:
    """A declared first sequence number of 1 is complete from there; a batch 0 is accepted as well."""
    for first in (0, 1):
        loop = Loop(replayable=False, first_sequence=1)
        loop.published = first
        loop.connect()
        loop.publish()
        loop.settle()
        assert state_and_reason(loop) == (EXACT, "")
    late = Loop(replayable=False, first_sequence=1)
    late.published = 2
    late.connect()
    late.publish()
    late.settle()
    assert state_and_reason(late) == (STALE, "no_history")


def test_a_first_number_below_the_expected_one_is_not_lost() -> None:
    """An engine that starts at 0 is followed from 0, although 1 was expected after an empty history."""
    loop = Loop(first_sequence=1)
    loop.connect()
    loop.settle()
    loop.publish()
    loop.publish()
    loop.settle()
    assert (loop.view, state_and_reason(loop)) == (loop.whole_life(), (EXACT, ""))
