"""Circuit breaker of rendering by pods."""

from __future__ import annotations

from router.prompts.remote_tokenizers import FAILURES_MAX, PAUSE_MAX_S, PAUSE_S, RenderBreaker


def working() -> RenderBreaker:
    """Return a breaker of pods that render."""
    breaker = RenderBreaker()
    assert breaker.allows(0.0)
    assert breaker.report("", 0.0)
    return breaker


def test_one_request_tries_and_all_follow_its_success() -> None:
    """Until the first answer only one request asks the pods; after it all do."""
    breaker = RenderBreaker()
    assert breaker.allows(0.0)
    assert not breaker.allows(0.1)
    assert breaker.report("", 0.0)
    assert breaker.allows(0.2)
    assert breaker.state(0.2) == {"state": "rendering", "seconds_left": 0.0, "error": ""}


def test_consecutive_failures_begin_a_pause() -> None:
    """Only failures without a success between them pause rendering; the state says why and until when."""
    breaker = working()
    for _ in range(FAILURES_MAX - 1):
        assert not breaker.report("late", 1.0)
    assert not breaker.report("", 0.0)
    begun = [breaker.report("late", 1.0) for _ in range(FAILURES_MAX)]
    assert begun == [False] * (FAILURES_MAX - 1) + [True]
    assert not breaker.allows(1.0 + PAUSE_S / 2)
    state = breaker.state(1.0 + PAUSE_S / 2)
    assert state == {"state": "paused", "seconds_left": PAUSE_S / 2, "error": "late"}


def test_a_missing_endpoint_begins_a_pause_at_once() -> None:
    """A single answer that there is no such endpoint pauses rendering."""
    breaker = working()
    assert breaker.report("404", 1.0, is_final=True)
    assert not breaker.allows(1.0)


def test_pauses_double_up_to_a_limit() -> None:
    """After each pause one request tries; its failure doubles the next pause, and its success ends it."""
    breaker, now_s, pauses = RenderBreaker(), 0.0, []
    for _ in range(12):
        assert breaker.allows(now_s)
        assert not breaker.allows(now_s)
        breaker.report("gone", now_s)
        pauses.append(breaker.state(now_s)["seconds_left"])
        now_s += pauses[-1]
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses[-1] == PAUSE_MAX_S
    assert breaker.allows(now_s)
    assert breaker.report("", 0.0)
    breaker.report("404", now_s, is_final=True)
    assert breaker.state(now_s)["seconds_left"] == PAUSE_S


def test_answers_to_requests_before_the_pause_do_not_prolong_it() -> None:
    """Failures of requests that were sent before the pause leave it as it is."""
    breaker = working()
    breaker.report("404", 1.0, is_final=True)
    for _ in range(3):
        assert not breaker.report("late", 1.5)
    assert breaker.allows(1.0 + PAUSE_S)


def test_a_lost_attempt_is_made_again() -> None:
    """An attempt that never reports an outcome does not end all attempts."""
    breaker = RenderBreaker()
    assert breaker.allows(0.0)
    assert breaker.allows(100.0)
