"""Order of prefills, and the measurement of prefill throughput."""

import pytest

from model_server.config import SchedulingPolicy
from model_server.engine.scheduler import PrefillRate, order_key
from model_server.kv_cache.request import Request
from model_server.requests import EngineCoreRequest, SamplingParams
from tests.unit.model_server.engine.test_scheduler import new_scheduler, step


def arriving(name: str, tokens: int, arrived_s: float = 0.0, priority: int = 0) -> Request:
    """Return a request with this many prompt tokens, none shared."""
    prompt = tuple(hash((name, index)) % 1000 for index in range(tokens))
    request = EngineCoreRequest(name, prompt, SamplingParams(max_tokens=9), priority=priority)
    return Request(request, 0, arrived_s=arrived_s)


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", "abc"), ("priority", "cab"), ("aged", "bac")],
)
def test_each_policy_has_its_order(policy: SchedulingPolicy, order: str) -> None:
    """fcfs sorts by arrival, priority by priority first, aged by arrival plus ten times the prefill time."""
    requests = [arriving("a", 100, 0.0), arriving("b", 10, 5.0), arriving("c", 10, 20.0, priority=-1)]
    key = order_key(policy, seconds_per_token=0.01)
    assert "".join(request.request_id for request in sorted(requests, key=key)) == order


def test_a_short_prompt_overtakes_a_long_one_between_its_chunks() -> None:
    """The order is evaluated for each chunk; the long prompt gets the rest of the budget."""
    scheduler = new_scheduler(policy="aged")
    scheduler.add_request(arriving("long", 40))
    assert [name for name, _, _ in _step(scheduler)] == ["long"]
    scheduler.add_request(arriving("short", 5, arrived_s=0.5))
    assert _step(scheduler) == [("short", 0, 5), ("long", 8, 3)]


def test_request_that_waited_long_is_not_overtaken() -> None:
    """A short prompt that arrives much later does not overtake a long one."""
    scheduler = new_scheduler(policy="aged")
    scheduler.add_request(arriving("long", 40))
    _step(scheduler)
    scheduler.add_request(arriving("late", 5, arrived_s=1000.0))
    assert [name for name, _, _ in _step(scheduler)] == ["long"]


def test_at_most_two_prompts_are_partial() -> None:
    """With two partial prompts, a third that would not finish waits even if it is first in the order."""
    scheduler = new_scheduler(blocks=60, policy="aged")
    for number, name in enumerate("abc"):
        scheduler.add_request(arriving(name, 40 - 10 * number))
        _step(scheduler)
    assert {request.request_id for request in scheduler.running} == {"a", "b"}


def test_cached_tokens_do_not_count_in_the_order() -> None:
    """Only uncached tokens count: a long cached prompt precedes a shorter uncached one."""
    scheduler = new_scheduler(blocks=40, tokens=40, policy="aged")
    first = arriving("x", 33)
    scheduler.add_request(first)
    _step(scheduler)
    scheduler.remove_request(first)
    again = Request(
        EngineCoreRequest("again", first.core_request.prompt_token_ids, first.core_request.sampling), 0
    )
    for request in (arriving("short", 9), again):
        scheduler.add_request(request)
    assert [name for name, _, _ in _step(scheduler)] == ["again", "short"]


def test_priority_decides_who_is_preempted() -> None:
    """Without a free block the decode of lowest priority is preempted, whatever its arrival."""
    scheduler = new_scheduler(blocks=4, tokens=16, caching=False, policy="priority")
    for name, priority in (("low", 5), ("high", 0)):
        scheduler.add_request(arriving(name, 8, priority=priority))
    step(scheduler)
    assert [name for name, _, _ in step(scheduler)] == ["high"]
    assert [request.request_id for request in scheduler.waiting] == ["low"]


def test_low_priority_decode_is_preempted_although_admitted_first() -> None:
    """The decode of lowest priority is preempted even if it was admitted first."""
    scheduler = new_scheduler(blocks=5, tokens=16, caching=False, policy="priority")
    scheduler.add_request(arriving("low", 8, priority=5))
    assert step(scheduler) == [("low", 0, 8)]
    scheduler.add_request(arriving("high", 8))
    assert step(scheduler) == [("low", 8, 1), ("high", 0, 8)]
    assert step(scheduler) == [("high", 8, 1)]
    assert [request.request_id for request in scheduler.waiting] == ["low"]


def test_last_partial_prompt_is_preempted_for_a_decode() -> None:
    """A decode preempts the last in the order of two partial prompts."""
    scheduler = new_scheduler(blocks=5, tokens=4, caching=False, policy="priority")
    scheduler.add_request(arriving("decode", 1))
    scheduler.add_request(arriving("low", 8, priority=5))
    assert step(scheduler) == [("decode", 0, 1), ("low", 0, 3)]
    assert step(scheduler) == [("decode", 1, 1), ("low", 3, 3)]
    scheduler.add_request(arriving("high", 8))
    assert step(scheduler) == [("decode", 2, 1), ("high", 0, 3)]
    assert step(scheduler) == [("decode", 3, 1), ("high", 3, 3)]
    assert step(scheduler) == [("decode", 4, 1), ("high", 6, 2)]
    assert [request.request_id for request in scheduler.waiting] == ["low"]


def test_the_rate_is_measured_on_prefills_alone() -> None:
    """Steps of mostly decodes or of few tokens are ignored; the rate needs four prefill steps."""
    rate = PrefillRate()
    assert (rate.tokens_per_s, rate.seconds_per_token) == (0.0, 0.0)
    for _ in range(10):
        rate.observe(200, 300, 1.0)
        rate.observe(6, 0, 0.03)
    assert rate.tokens_per_s == 0.0
    for _ in range(4):
        assert rate.tokens_per_s == 0.0
        rate.observe(1000, 0, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000)
    for _ in range(100):
        rate.observe(2000, 0, 1.0)
    assert rate.tokens_per_s == pytest.approx(2000)
    assert rate.seconds_per_token == pytest.approx(1 / 2000)


def test_a_slow_start_or_a_stall_does_not_move_the_rate() -> None:
    """The median ignores a first step of seconds and a stalled step."""
    rate = PrefillRate()
    for seconds in (3.0, 0.1, 0.1, 0.1, 60.0):
        rate.observe(400, 0, seconds)
    assert rate.tokens_per_s == pytest.approx(4000)


def _step(scheduler: object) -> list[tuple[str, int, int]]:
    return step(scheduler, seconds_per_token=0.1)  # type: ignore[arg-type]
