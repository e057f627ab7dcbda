"""What is predicted of a pod's cache, and when it must have come true."""

from __future__ import annotations

from indexer.dispatched import DispatchKey
from indexer.reconcile import EngineReading
from router.engine_watch import EngineWatch
from router.outcomes import REPORT
from router.promises import Promises
from tests.unit.router_support import Bench, completion, long_text, ready_pod

A = "10.0.0.1:8000"
B = "10.0.0.2:8000"
ONE = DispatchKey("r", 0.0)


def test_a_promise_is_due_once_its_request_has_its_first_token() -> None:
    """Until then it is only promised; told again, it counts no more."""
    promises = Promises()
    promises.made(ONE, A, 64)
    assert (promises.answered_tokens(A), promises.promised_tokens(A)) == (0, 64)
    promises.due(ONE)
    promises.due(ONE)
    assert (promises.answered_tokens(A), promises.promised_tokens(A)) == (64, 64)
    assert promises.promised_tokens(B) == 0


def test_a_request_that_failed_promised_nothing() -> None:
    """Nobody knows whether the pod looked it up, so nothing is expected of its counters."""
    promises = Promises()
    promises.made(ONE, A, 64)
    promises.void(ONE)
    promises.due(ONE)
    assert (promises.answered_tokens(A), promises.promised_tokens(A)) == (0, 0)


def test_requests_under_one_id_have_promises_of_their_own() -> None:
    """What one of them finds in its pod's cache is no news of another's."""
    promises, second = Promises(), DispatchKey("r", 1.0)
    promises.made(ONE, A, 64)
    promises.made(second, B, 32)
    promises.due(ONE)
    promises.void(second)
    assert (promises.answered_tokens(A), promises.promised_tokens(A)) == (64, 64)
    assert promises.promised_tokens(B) == 0


def test_what_is_remembered_is_bounded() -> None:
    """Beyond the cap the oldest request is not awaited any more; pods that are gone are forgotten."""
    promises = Promises(max_requests=2)
    for number in range(3):
        promises.made(DispatchKey("r", float(number)), A, 10)
    assert promises.promised_tokens(A) == 20
    promises.due(DispatchKey("r", 2.0))
    promises.keep([B])
    assert (promises.answered_tokens(A), promises.promised_tokens(A)) == (0, 10)


def test_a_reading_is_told_with_what_was_answered_before_it_was_asked_for() -> None:
    """What is answered while the page travels may not be in its counters: it is promised, not due."""
    told: list[tuple[str, EngineReading]] = []
    promises = Promises()
    watch = EngineWatch(promises, lambda pod, reading: told.append((pod, reading)))
    promises.made(ONE, A, 64)
    answered_tokens = watch.asked(A)
    promises.due(ONE)
    watch.told(A, EngineReading(hit_tokens=5.0), answered_tokens)
    assert told == [(A, EngineReading(hit_tokens=5.0, predicted_tokens=0, promised_tokens=64))]


def test_the_routers_outcomes_keep_the_promises() -> None:
    """A routed request promises what its pod holds; its end makes it due, its failure void and unawaited."""
    bench, text = Bench().with_pods(ready_pod(A)), long_text(400)
    bench.index.hold(A, bench.keys(text))
    decision = bench.router.route(completion("good", text), 10.0)
    bench.router.route(completion("bad", text), 10.0)
    assert bench.outcomes.promises.promised_tokens(A) == 2 * decision.primary.cached_tokens > 0
    bench.outcomes.ended("good", REPORT, 11.0)
    bench.outcomes.ended("bad", REPORT, 11.0, failed=True)
    assert bench.outcomes.promises.answered_tokens(A) == decision.primary.cached_tokens
    assert bench.outcomes.promises.promised_tokens(A) == decision.primary.cached_tokens
    assert bench.index.lost == ["bad"]
