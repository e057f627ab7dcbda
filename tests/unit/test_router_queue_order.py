"""The order of prefills that an engine announces, and what it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.queue_order import AGE_FACTOR, is_ahead
from tests.unit.pricing_support import Known, Queued, load, priced

FCFS = load()
SMALL_STEPS, LARGE_STEPS = load(ordered_step_tokens=100), load(ordered_step_tokens=100_000)
# Computed when the others come.
BEGUN = Queued(100, sent_s=-0.001)


def test_a_short_prompt_overtakes_a_long_one_and_not_a_short_one() -> None:
    """A new request of a tenth of a second goes before a second's work, and behind as short an older one."""
    assert not is_ahead(0.0, 1.0, 0.1, 0.1)
    assert is_ahead(0.0, 0.1, 0.1, 0.1)


def test_whoever_waited_long_enough_is_overtaken_no_more() -> None:
    """After ten times the difference of their own seconds, the older one is ahead again."""
    assert is_ahead(0.0, 1.0, AGE_FACTOR * 0.9 + 0.01, 0.1)


def test_the_order_changes_a_pick() -> None:
    """A short prompt goes where it overtakes a long prefill; without the order, to the shorter queue."""
    long, short = [BEGUN, Queued(3000)], [BEGUN, Queued(400), Queued(400)]
    assert priced(400, Known(queue=long, load=FCFS), Known(queue=short, load=FCFS)).best == 1
    found = priced(400, Known(queue=long, load=SMALL_STEPS), Known(queue=short, load=SMALL_STEPS))
    assert found.best == 0
    assert found.part("queued_prefill_s") == pytest.approx([0.1, 0.9], abs=0.001)


def test_nobody_overtakes_within_a_step() -> None:
    """Of a long prefill that runs, the step that was begun comes first: all of it, or a step's tokens."""
    pods = [Known(queue=[Queued(3000)], load=steps) for steps in (SMALL_STEPS, LARGE_STEPS)]
    found = priced(200, *pods)
    assert found.part("queued_prefill_s") == [pytest.approx(0.1), pytest.approx(3.0)]


def test_a_running_step_changes_a_pick() -> None:
    """Where a step takes whole prompts, a short one goes to the shorter work, and not to a long prefill."""
    long, short = [Queued(3000)], [Queued(400), Queued(400)]
    assert priced(200, Known(queue=long, load=LARGE_STEPS), Known(queue=short, load=LARGE_STEPS)).best == 1


def test_who_shares_a_step_ends_with_it() -> None:
    """A short prompt that is computed in one step with a long one has its first token when both are done."""
    queue = [BEGUN, Queued(900)]
    pods = [Known(queue=queue, load=load(ordered_step_tokens=steps)) for steps in (100_000, 500, 200)]
    found = priced(200, *pods, now_s=0.0)
    # Beside the step that runs: all of the long one, as much of it as the step has room for, and nothing.
    expected = [pytest.approx(more_s, abs=0.002) for more_s in (0.1 + 0.9, 0.1 + 0.3, 0.1)]
    assert found.part("queued_prefill_s") == expected


def test_own_seconds_are_charged_for_every_request_they_delay() -> None:
    """The mean queue counts everywhere; on one pod also half of those whom the request overtakes there."""
    ordered = Known(queue=[BEGUN, *[Queued(3000)] * 3], load=SMALL_STEPS)
    found = priced(200, ordered, *[Known()] * 6, Known(load=SMALL_STEPS))
    assert found.part("own_weight") == [1.5 + 3 / 2, *[1.5] * 7]


def test_whoever_shares_its_step_is_delayed_too() -> None:
    """Older and shorter requests that a step takes together with a new one have to wait for it."""
    queue = [BEGUN, Queued(100), Queued(100)]
    together, apart = (Known(queue=queue, load=load(ordered_step_tokens=steps)) for steps in (1000, 100))
    assert priced(500, together).part("own_weight") == [1 + 3 + 2 / 2]
    # Of two steps before its own, one request's at most shares it.
    assert priced(500, apart).part("own_weight") == [1 + 3 + 1 / 2]


def test_whoever_is_overtaken_gives_no_elapsed_time_away() -> None:
    """Behind short work and before a long prefill, the elapsed time of the step that runs is its own."""
    queue = [Queued(1000), Queued(9000, sent_s=0.5), Queued(100, sent_s=1.0)]
    pod = Known(queue=queue, load=load(ordered_step_tokens=1000))
    found = priced(900, pod, now_s=1.0)
    assert found.part("queued_prefill_s") == [pytest.approx(0.5 + 0.1)]


def test_a_running_prefill_is_ahead_by_what_is_left_of_it() -> None:
    """A prefill of 1 s that runs for 0.8 s has 0.6 s left: one of 0.55 s is behind it, not before it."""
    pod = Known(queue=[Queued(1000)], load=SMALL_STEPS)
    found = priced(550, pod, now_s=0.8)
    assert found.part("queued_prefill_s") == [pytest.approx(0.6)]
    assert found.part("own_weight") == [2.0]


def test_a_step_that_takes_too_long_keeps_half_of_its_price() -> None:
    """Of a step that runs too long half is still to come, and all that waits behind it."""
    queue = [Queued(1000), Queued(700, sent_s=0.1)]
    found = priced(800, Known(queue=queue, load=LARGE_STEPS), now_s=1.7)
    assert found.part("queued_prefill_s") == [pytest.approx(0.5 + 0.7)]


@given(
    st.lists(st.builds(Queued, st.integers(1, 5000), st.floats(0, 50)), max_size=12),
    st.integers(1, 9000),
    st.integers(1, 20_000),
)
def test_the_queue_is_what_the_rule_says(queue: list[Queued], tokens: int, step_tokens: int) -> None:
    """Summed request by request over the queue, the rule gives the queued seconds of an ordering pod."""
    told = load(ordered_step_tokens=step_tokens)
    pods = [Known(queue=queue, load=told), Known(queue=queue, load=told, tokens_per_s=500.0)]
    found = priced(tokens, *pods, now_s=50.0)
    for place, tokens_per_s in enumerate((1000.0, 500.0)):
        expected_s = _queued_s(queue, tokens, step_tokens, tokens_per_s)
        assert found.part("queued_prefill_s")[place] == pytest.approx(expected_s, abs=1e-6)


def _queued_s(queue: list[Queued], tokens: int, step_tokens: int, tokens_per_s: float) -> float:
    """Step by step: what runs, then steps in the order until the new one's last token is computed.

    And half of the time since all of it should have been over, at most a second.
    """
    if not queue:
        return 0.0
    began_s = queue[0].sent_s
    begun = sum(q.tokens for q in queue if q.sent_s <= began_s)
    running = min(begun, step_tokens)
    left = 1 - min(1.0, (50.0 - began_s) * tokens_per_s / begun) / 2
    left_of_step = 1 - min(1.0, (50.0 - began_s) * tokens_per_s / running) / 2
    queued, ahead, behind = 0.0, 0.0, 0.0
    for q in queue:
        if q.sent_s <= began_s:
            is_before = is_ahead(q.sent_s, q.tokens * left / tokens_per_s, 50.0, tokens / tokens_per_s)
            in_step = running / begun
            queued += q.tokens * (left if is_before else in_step * left_of_step)
            behind += 0.0 if is_before else q.tokens * (1 - in_step)
        elif is_ahead(q.sent_s, q.tokens / tokens_per_s, 50.0, tokens / tokens_per_s):
            ahead += q.tokens
        else:
            behind += q.tokens
    done = 0.0
    while done < ahead + tokens:
        done += step_tokens
    late_s = 50.0 - began_s - sum(q.tokens for q in queue) / tokens_per_s
    overdue_s = min(max(0.0, late_s) / 2, 1.0)
    return (queued + min(done, ahead + behind + tokens) - tokens) / tokens_per_s + overdue_s
