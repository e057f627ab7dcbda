"""The order of prefills that an engine announces, and what it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.queue_order import AGE_FACTOR, is_ahead
from tests.unit.pricing_support import Known, Queued, load, priced

ORDERS, FCFS = load(orders_prefills=True), load()


def test_a_short_prompt_overtakes_a_long_one_and_not_a_short_one() -> None:
    """A new request of a tenth of a second goes before a second's work, and behind as short an older one."""
    assert not is_ahead(0.0, 1.0, 0.1, 0.1)
    assert is_ahead(0.0, 0.1, 0.1, 0.1)


def test_whoever_waited_long_enough_is_overtaken_no_more() -> None:
    """After ten times the difference of their own seconds, the older one is ahead again."""
    assert is_ahead(0.0, 1.0, AGE_FACTOR * 0.9 + 0.01, 0.1)


def test_the_order_changes_a_pick() -> None:
    """A short prompt goes where it overtakes a long prefill; without the order, to the shorter queue."""
    long, short = [Queued(3000)], [Queued(400), Queued(400)]
    assert priced(200, Known(queue=long, load=FCFS), Known(queue=short, load=FCFS)).best == 1
    found = priced(200, Known(queue=long, load=ORDERS), Known(queue=short, load=ORDERS))
    assert found.best == 0
    assert found.part("queued_prefill_s") == [0.0, 0.0]


def test_own_seconds_are_charged_for_every_request_they_delay() -> None:
    """A request that overtakes three others weighs its own seconds four times; elsewhere `a` counts."""
    ordered = Known(queue=[Queued(3000)] * 3, load=ORDERS)
    found = priced(200, ordered, *[Known()] * 5, Known(load=ORDERS))
    assert found.part("own_weight") == [4.0, *[1 + 3 / 7] * 5, 1.0]


def test_whoever_is_overtaken_gives_no_elapsed_time_away() -> None:
    """Behind short work and before a long prefill that runs, the queue is the short work, whole."""
    queue = [Queued(9000), Queued(100, sent_s=1.0)]
    assert priced(200, Known(queue=queue, load=ORDERS), now_s=1.0).part("queued_prefill_s") == [0.1]


def test_a_running_prefill_is_ahead_by_what_is_left_of_it() -> None:
    """A prefill of 1 s that runs for 0.8 s has 0.6 s left: one of 0.55 s is behind it, not before it."""
    pod = Known(queue=[Queued(1000)], load=ORDERS)
    found = priced(550, pod, now_s=0.8)
    assert found.part("queued_prefill_s") == [pytest.approx(0.6)]
    assert found.part("own_weight") == [1.0]


@given(st.lists(st.builds(Queued, st.integers(0, 5000), st.floats(0, 50)), max_size=12), st.integers(0, 9000))
def test_the_work_ahead_is_what_the_rule_says(queue: list[Queued], tokens: int) -> None:
    """Summed request by request over the queue, the rule gives the queued seconds of an ordering pod."""
    pods = [Known(queue=queue, load=ORDERS), Known(queue=queue, load=ORDERS, tokens_per_s=500.0)]
    found = priced(tokens, *pods, now_s=50.0)
    for place, tokens_per_s in enumerate((1000.0, 500.0)):
        own_s = tokens / tokens_per_s
        remaining = [q.tokens / tokens_per_s for q in queue]
        if queue:
            remaining[0] -= min(remaining[0], 50.0 - queue[0].sent_s) / 2
        pairs = zip(queue, remaining, strict=True)
        expected_s = sum(left_s for q, left_s in pairs if is_ahead(q.sent_s, left_s, 50.0, own_s))
        assert abs(found.part("queued_prefill_s")[place] - expected_s) < 1e-6
