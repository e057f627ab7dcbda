"""What is predicted of a pod's cache, and when it must have come true."""

from __future__ import annotations

from msgspec.structs import replace

from indexer.audit.engine_counters import EngineReading
from router.feedback.lifecycle import REPORT, EngineWatch
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import Lesson
from tests.unit.router_support import Bench, completion, long_text, ready_pod

A = "10.0.0.1:8000"
B = "10.0.0.2:8000"
ONE = Dispatch("r", A, 100, 0.0, 0.5, None, Lesson.RATE, 0.0, promised_tokens=64)


def told(ledger: Ledger, pod: str = A) -> tuple[int, int]:
    """Tokens that are due of a pod, and all that were predicted."""
    return ledger.answered_tokens(pod), ledger.promised_tokens(pod)


def ledger_with(*dispatches: Dispatch, capacity: int = 10) -> Ledger:
    """A ledger after dispatches."""
    ledger = Ledger(LedgerParameters(capacity=capacity))
    for dispatch in dispatches:
        ledger.dispatch(dispatch)
    return ledger


def test_a_promise_is_due_once_its_request_has_its_first_token() -> None:
    """Until then it is only promised; at its end it counts no more."""
    ledger = ledger_with(ONE)
    assert told(ledger) == (0, 64)
    ledger.first_token("r", 1.0)
    ledger.end("r", 2.0)
    assert told(ledger) == (64, 64)
    assert told(ledger, B) == (0, 0)


def test_what_the_clock_guesses_makes_no_promise_due() -> None:
    """A prefill that is over by the clock alone may not have looked its prompt up."""
    ledger = ledger_with(ONE)
    assert ledger.expire(5.0)[0] == [ONE]
    assert told(ledger) == (0, 64)


def test_a_request_that_failed_promised_nothing() -> None:
    """Nobody knows whether the pod looked it up, so nothing is expected of its counters."""
    ledger = ledger_with(ONE)
    ledger.end("r", 1.0, answered=False)
    assert told(ledger) == (0, 0)


def test_requests_under_one_id_have_promises_of_their_own() -> None:
    """What one of them finds in its pod's cache is no news of another's."""
    ledger = ledger_with(ONE, replace(ONE, pod=B, dispatched_s=1.0, promised_tokens=32))
    ledger.first_token("r", 2.0, pod=A)
    ledger.end("r", 2.0, pod=B, answered=False)
    assert (told(ledger), told(ledger, B)) == ((64, 64), (0, 0))


def test_what_is_remembered_is_bounded() -> None:
    """Of requests that the ledger gave up nothing is expected; pods that are gone are forgotten."""
    ledger = ledger_with(*(replace(ONE, dispatched_s=float(at)) for at in range(3)), capacity=2)
    assert told(ledger) == (0, 128)
    ledger.first_token("r", 3.0, sent_s=2.0)
    ledger.keep([B])
    assert told(ledger) == (0, 64)


def test_a_reading_is_told_with_what_was_answered_before_it_was_asked_for() -> None:
    """What is answered while the page travels may not be in its counters: it is promised, not due."""
    told: list[tuple[str, EngineReading]] = []
    ledger = ledger_with(ONE)
    watch = EngineWatch(ledger, lambda pod, reading: told.append((pod, reading)))
    answered_tokens = watch.asked(A)
    ledger.first_token("r", 1.0)
    watch.told(A, EngineReading(hit_tokens=5.0), answered_tokens)
    assert told == [(A, EngineReading(hit_tokens=5.0, predicted_tokens=0, promised_tokens=64))]


def test_the_routers_outcomes_keep_the_promises() -> None:
    """A routed request promises what its pod holds; its end makes it due, its failure void and unawaited."""
    bench, text = Bench().with_pods(ready_pod(A)), long_text(400)
    bench.index.hold(A, bench.keys(text))
    decision = bench.router.route(completion("good", text), 10.0)
    bench.router.route(completion("bad", text), 10.0)
    assert bench.ledger.promised_tokens(A) == 2 * decision.primary.cached_tokens > 0
    bench.outcomes.ended("good", REPORT, 11.0)
    bench.outcomes.ended("bad", REPORT, 11.0, failed=True)
    assert bench.ledger.answered_tokens(A) == decision.primary.cached_tokens
    assert bench.ledger.promised_tokens(A) == decision.primary.cached_tokens
    assert bench.index.lost == ["bad"]
