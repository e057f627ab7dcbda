"""The sequence state machine, case by case: what is applied, cleared and replayed, and what it is called."""

from __future__ import annotations

from tests.unit.stream_support import EXACT, RECOVERING, STALE, Loop, followed, payload, told


def test_before_the_link_is_up_nothing_is_known() -> None:
    """A pod that was never reached is being waited for."""
    assert told(Loop()) == (RECOVERING, "link_down")


def test_the_first_connection_replays_the_whole_history() -> None:
    """What was published before we came is asked for from 0, and live batches wait meanwhile."""
    loop = Loop()
    for _ in range(3):
        loop.publish()
    loop.connect()
    loop.publish()
    loop.deliver()
    assert (loop.view, loop.replays) == ([], [0])
    assert told(loop) == (RECOVERING, "history")
    loop.settle()
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_an_engine_that_published_nothing_is_known_exactly() -> None:
    """An empty history is a complete one."""
    loop = followed(0)
    assert told(loop) == (EXACT, "")


def test_a_history_that_rolled_over_is_stale_but_used() -> None:
    """What the engine still remembers is applied; that the beginning lacks is told."""
    loop = Loop(history=2)
    for _ in range(5):
        loop.publish()
    loop.connect()
    loop.settle()
    assert loop.view == loop.whole_life()[3:]
    assert told(loop) == (STALE, "history_truncated")


def test_a_gap_is_healed_in_order() -> None:
    """A missing batch is replayed from its number on; what waited is applied once, behind it."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    assert told(loop) == (RECOVERING, "gap")
    loop.publish()
    loop.settle()
    assert loop.view == loop.whole_life()
    assert loop.clears == []
    assert loop.machine.gaps == 1
    assert told(loop) == (EXACT, "")


def test_a_gap_that_the_engine_has_forgotten_clears_the_view() -> None:
    """If a lost batch cannot be had, anything in the view may be wrong: it goes, and the rest goes on."""
    loop = followed(history=1)
    loop.publish(lost=True)
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    assert loop.clears == ["history_truncated"]
    assert loop.view == loop.whole_life()[-1:]
    assert told(loop) == (STALE, "history_truncated")


def test_a_gap_of_which_the_replay_knows_nothing_clears_the_view() -> None:
    """A replay that ends without the missing batch is not asked again and again."""
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
    assert told(loop) == (STALE, "gap")


def test_a_replay_that_fails_clears_the_view_and_goes_on_live() -> None:
    """After a failed replay nothing old is trusted, and what waited is applied."""
    loop = followed()
    loop.publish(lost=True)
    loop.publish()
    loop.deliver()
    loop.fail_replay()
    assert (loop.view, loop.clears) == (loop.whole_life()[-1:], ["replay_failed"])
    assert told(loop) == (STALE, "replay_failed")
    loop.publish()
    loop.settle()
    assert loop.view == loop.whole_life()[-2:]


def test_answers_lost_in_mid_replay_are_asked_for_again() -> None:
    """A replay with a hole is resumed from the hole."""
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
    """After a lost link the last applied batch is asked for, and what followed it is applied."""
    loop = followed()
    loop.disconnect()
    assert told(loop) == (RECOVERING, "link_down")
    assert len(loop.view) == 3
    loop.publish()
    loop.connect()
    assert loop.replays == [0, 2]
    assert told(loop) == (RECOVERING, "identity")
    loop.settle()
    assert (loop.view, loop.clears) == (loop.whole_life(), [])
    assert told(loop) == (EXACT, "")


def test_a_new_process_is_recognised_without_an_event() -> None:
    """An engine that does not know the last applied batch is another one: its predecessor's view goes."""
    loop = followed()
    loop.restart()
    loop.connect()
    loop.settle()
    assert (loop.view, loop.clears) == ([], ["process_changed"])
    assert loop.replays == [0, 2, 0]
    assert told(loop) == (EXACT, "")


def test_a_new_process_that_published_as_much_is_recognised_by_content() -> None:
    """The same sequence number with another payload is another life's."""
    loop = followed()
    loop.restart()
    for _ in range(7):
        loop.publish()
    loop.connect()
    loop.settle()
    assert loop.clears == ["process_changed"]
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_live_batches_of_the_new_life_wait_for_its_history() -> None:
    """What a new process sends while its identity is checked is neither lost nor applied early."""
    loop = followed()
    loop.restart()
    loop.publish()
    loop.connect()
    loop.publish()
    loop.deliver()
    assert len(loop.view) == 3
    loop.settle()
    assert loop.view == loop.whole_life()


def test_a_sequence_that_goes_back_is_a_new_life() -> None:
    """Even on an unbroken link, a smaller number clears the view and replays from 0."""
    loop = followed()
    loop.life, loop.published = 1, 0
    loop.publish()
    loop.publish()
    loop.settle()
    assert loop.clears == ["sequence_went_back"]
    assert loop.view == loop.whole_life()
    assert told(loop) == (EXACT, "")


def test_a_number_that_comes_again_is_a_new_life() -> None:
    """On an unbroken link, the last number a second time is a new process that has published as much."""
    loop = followed(0)
    loop.publish()
    loop.settle()
    loop.life, loop.published = 1, 0
    loop.publish()
    loop.settle()
    assert loop.clears == ["sequence_went_back"]
    assert loop.view == loop.whole_life()


def test_a_restart_in_mid_replay_ends_that_replay() -> None:
    """Answers of the old life that come after the link was lost are not applied."""
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


def test_without_replay_a_life_is_exact_from_its_first_batch_on() -> None:
    """Whoever saw sequence 0 saw all."""
    loop = followed(3, replayable=False)
    assert (loop.view, loop.replays) == (loop.whole_life(), [])
    assert told(loop) == (EXACT, "")


def test_without_replay_a_late_start_is_stale() -> None:
    """Whoever came late cannot know what was before."""
    loop = Loop(replayable=False)
    loop.publish()
    loop.connect()
    assert told(loop) == (STALE, "no_history")
    loop.publish()
    loop.settle()
    assert loop.view == [payload(0, 1)]
    assert told(loop) == (STALE, "no_history")


def test_without_replay_a_gap_clears_the_view() -> None:
    """A lost batch cannot be had, and is counted once."""
    loop = followed(3, replayable=False)
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    assert (loop.view, loop.clears) == ([payload(0, 4)], ["gap"])
    assert told(loop) == (STALE, "gap")
    assert loop.machine.gaps == 1


def test_without_replay_a_lost_link_costs_the_view() -> None:
    """Nothing can tell the same process from a new one."""
    loop = followed(3, replayable=False)
    loop.disconnect()
    assert len(loop.view) == 3
    loop.connect()
    assert (loop.view, loop.clears) == ([], ["link_lost"])
    assert told(loop) == (STALE, "no_history")
    loop.restart()
    loop.connect()
    loop.publish()
    loop.settle()
    assert told(loop) == (EXACT, "")


def test_a_cleared_cache_makes_any_view_exact() -> None:
    """An empty cache is known completely, whatever was missed before."""
    loop = Loop(replayable=False)
    loop.publish()
    loop.connect()
    loop.publish()
    loop.settle()
    loop.machine.emptied(loop.current)
    assert told(loop) == (EXACT, "")


def test_what_could_not_be_applied_is_told() -> None:
    """A view with a batch that could not be read is not exact; the first reason stays."""
    loop = followed()
    loop.machine.damaged(loop.current, "broken_event")
    loop.machine.damaged(loop.current, "oversize")
    assert told(loop) == (STALE, "broken_event")


def test_news_of_a_dropped_view_are_not_news_of_the_next() -> None:
    """A batch may turn out empty or broken only after the machine has moved on to another view."""
    loop = followed(2, replayable=False)
    dropped = loop.current
    loop.publish(lost=True)
    loop.publish()
    loop.settle()
    loop.machine.emptied(dropped)
    assert told(loop) == (STALE, "gap")
    loop.machine.emptied(loop.current)
    loop.machine.damaged(dropped, "broken_event")
    assert told(loop) == (EXACT, "")


def test_a_batch_before_the_link_is_known_to_be_up_says_that_it_is() -> None:
    """Whichever of message and connection is noticed first, the history is asked for."""
    loop = Loop()
    loop.publish()
    loop.perform(loop.machine.live(0, payload(0, 0)))
    loop.settle()
    assert (loop.view, loop.replays) == (loop.whole_life(), [0])


def test_a_cache_that_was_dropped_silently_is_empty_and_stale() -> None:
    """The stream goes on where it was, and its own word makes the view exact."""
    loop = followed()
    loop.perform(loop.machine.emptied_silently("asleep"))
    assert (loop.view, loop.clears, told(loop)) == ([], ["asleep"], (STALE, "asleep"))
    loop.publish()
    loop.settle()
    assert loop.view == loop.whole_life()[-1:]
    loop.machine.emptied(loop.current)
    assert told(loop) == (EXACT, "")
    assert loop.replays == [0]


def test_an_engine_that_has_said_that_its_cache_is_empty_is_not_waited_for_again() -> None:
    """It says so once: a view that holds nothing since stays EXACT, one that was stored to is emptied."""
    loop = followed()
    loop.machine.emptied(loop.current, holds_nothing=True)
    loop.perform(loop.machine.emptied_silently("asleep"))
    assert (loop.clears, told(loop)) == ([], (EXACT, ""))
    loop.publish()
    loop.settle()
    loop.perform(loop.machine.emptied_silently("asleep"))
    assert (loop.clears, told(loop)) == (["asleep"], (STALE, "asleep"))


def test_a_life_may_begin_with_another_number() -> None:
    """Where the first batch is number 1, nothing lacks in front of it; number 0 is taken as well."""
    for first in (0, 1):
        loop = Loop(replayable=False, first_sequence=1)
        loop.published = first
        loop.connect()
        loop.publish()
        loop.settle()
        assert told(loop) == (EXACT, "")
    late = Loop(replayable=False, first_sequence=1)
    late.published = 2
    late.connect()
    late.publish()
    late.settle()
    assert told(late) == (STALE, "no_history")


def test_a_first_number_below_the_expected_one_is_not_lost() -> None:
    """An engine that begins with 0 is followed from there, though 1 was expected after an empty history."""
    loop = Loop(first_sequence=1)
    loop.connect()
    loop.settle()
    loop.publish()
    loop.publish()
    loop.settle()
    assert (loop.view, told(loop)) == (loop.whole_life(), (EXACT, ""))
