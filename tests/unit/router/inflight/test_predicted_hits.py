"""Tests of predicted cache hits: which of them an engine's counters must already contain."""

from __future__ import annotations

from msgspec.structs import replace

from indexer.audit.engine_counters import EngineReading
from router.feedback.outcomes import REPORT
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import RateSample
from router.pods.watch import EngineCheck
from tests.support.router.bench import Bench, completion, ended, long_text, ready_pod

A = "10.0.0.1:8000"
B = "10.0.0.2:8000"
ONE = Dispatch("r", A, 100, 0.0, 0.5, None, RateSample.EXACT, 0.0, predicted_hit_tokens=64)


def predictions(ledger: Ledger, pod: str = A) -> tuple[int, int]:
    """Return the predicted hit tokens of the pod's answered requests, and of all its requests."""
    return ledger.answered_hit_tokens(pod), ledger.predicted_hit_tokens(pod)


def ledger_with(*dispatches: Dispatch, capacity: int = 10) -> Ledger:
    """Return a ledger with these requests dispatched."""
    ledger = Ledger(LedgerParameters(capacity=capacity))
    for dispatch in dispatches:
        ledger.dispatch(dispatch)
    return ledger


def test_prediction_counts_as_answered_at_the_first_token() -> None:
    """A request's predicted hit counts as answered once, at its first token."""
    ledger = ledger_with(ONE)
    assert predictions(ledger) == (0, 64)
    ledger.first_token("r", 1.0)
    ledger.end("r", 2.0)
    assert predictions(ledger) == (64, 64)
    assert predictions(ledger, B) == (0, 0)


def test_prefill_timeout_answers_no_prediction() -> None:
    """A prefill timeout does not count as answered: the pod may not have looked the prompt up."""
    ledger = ledger_with(ONE)
    assert ledger.expire(5.0)[0] == [ONE]
    assert predictions(ledger) == (0, 64)


def test_failed_request_withdraws_its_prediction() -> None:
    """A failed request's prediction is removed: it is unknown whether the pod looked the prompt up."""
    ledger = ledger_with(ONE)
    ledger.end("r", 1.0, answered=False)
    assert predictions(ledger) == (0, 0)


def test_requests_of_one_id_have_separate_predictions() -> None:
    """The first token of one request does not count another request's prediction as answered."""
    ledger = ledger_with(ONE, replace(ONE, pod=B, dispatched_s=1.0, predicted_hit_tokens=32))
    ledger.first_token("r", 2.0, pod=A)
    ledger.end("r", 2.0, pod=B, answered=False)
    assert (predictions(ledger), predictions(ledger, B)) == ((64, 64), (0, 0))


def test_predictions_of_evicted_requests_and_removed_pods_are_dropped() -> None:
    """Evicted requests leave no open prediction, and removed pods no answered one."""
    ledger = ledger_with(*(replace(ONE, dispatched_s=float(at)) for at in range(3)), capacity=2)
    assert predictions(ledger) == (0, 128)
    ledger.first_token("r", 3.0, dispatched_s=2.0)
    ledger.keep([B])
    assert predictions(ledger) == (0, 64)


def test_reading_carries_predictions_answered_before_the_scrape() -> None:
    """Requests answered during a scrape may be missing from its counters, so they count as open only."""
    observed: list[tuple[str, EngineReading]] = []
    ledger = ledger_with(ONE)
    check = EngineCheck(
        ledger.answered_hit_tokens,
        ledger.predicted_hit_tokens,
        lambda pod, reading: observed.append((pod, reading)),
        lambda _pod: (),
    )
    answered_hit_tokens = check.answered_hit_tokens(A)
    ledger.first_token("r", 1.0)
    check.after_scrape(A, EngineReading(hit_tokens=5.0), answered_hit_tokens)
    assert observed == [(A, EngineReading(hit_tokens=5.0, predicted_tokens=0, predicted_sent_tokens=64))]


def test_lifecycle_updates_predictions() -> None:
    """A routed request predicts a hit; its end counts the prediction as answered, its failure drops it."""
    bench, text = Bench().with_pods(ready_pod(A)), long_text(400)
    bench.index.hold(A, bench.keys(text))
    decision = bench.router.route(completion("good", text), 10.0)
    bench.router.route(completion("bad", text), 10.0)
    assert bench.ledger.predicted_hit_tokens(A) == 2 * decision.primary.cached_tokens > 0
    ended(bench.lifecycle, "good", REPORT, 11.0)
    ended(bench.lifecycle, "bad", REPORT, 11.0, failed=True)
    assert bench.ledger.answered_hit_tokens(A) == decision.primary.cached_tokens
    assert bench.ledger.predicted_hit_tokens(A) == decision.primary.cached_tokens
    assert bench.index.lost == ["bad"]
