"""Tests of the in-flight ledger: its totals match the requests in flight, and every request ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from indexer.keys import Keys
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import RateSample
from router.pods.load_table import PodWork
from tests.support.depth import examples

PARAMETERS = LedgerParameters(
    capacity=5,
    lifetime_s=60.0,
    timeout_factor=2.0,
    timeout_slack_s=0.1,
    event_timeout_slack_s=5.0,
    per_id_max=3,
    ended_ids_max=4,
    transit_s=2.0,
)
ONE = Dispatch("r1", "a:1", 100, 0.0, 0.5, confirm_key=77, rate_sample=RateSample.EXACT, dispatched_s=0.0)


def keys(*values: int) -> Keys:
    """Return block keys as the ledger receives them from events."""
    return np.array(values, np.uint64)


def ledger_with(*dispatches: Dispatch) -> Ledger:
    """Return a ledger with these requests dispatched."""
    ledger = Ledger(PARAMETERS)
    for dispatch in dispatches:
        ledger.dispatch(dispatch)
    return ledger


def test_request_waits_then_decodes_then_is_removed() -> None:
    """A request's tokens count as queued until its first token, and as held until its end."""
    ledger = ledger_with(ONE)
    assert ledger.load_table.work("a:1") == PodWork(
        awaiting=1, awaiting_tokens=100, decoding=0, held_tokens=100
    )
    assert ledger.first_token("r1", 1.0) == ONE
    assert ledger.load_table.work("a:1") == PodWork(
        awaiting=0, awaiting_tokens=0, decoding=1, held_tokens=100
    )
    assert ledger.end("r1", 1.0) == ONE
    assert (ledger.load_table.work("a:1"), len(ledger)) == (PodWork(), 0)


def test_engines_of_a_pod_have_pending_tokens_of_their_own() -> None:
    """Uncached tokens are pending until the first token, and one per sequence until the end."""
    ledger = ledger_with(
        replace(ONE, engine="a:1@dp1", sequences=2), replace(ONE, request_id="r2", engine="a:1")
    )
    assert ledger.pending_tokens == {"a:1@dp1": 102, "a:1": 101}
    ledger.first_token("r1", 1.0)
    assert ledger.pending_tokens == {"a:1@dp1": 2, "a:1": 101}
    ledger.end("r1", 2.0)
    ledger.end("r2", 2.0)
    assert ledger.pending_tokens == {}


def test_stored_last_block_ends_prefill() -> None:
    """Only the confirming key, published by the request's pod, ends the prefill, and only once."""
    ledger = ledger_with(ONE)
    assert ledger.stored("a:2", keys(77), 1.0) == ([], [])
    assert ledger.stored("a:1", keys(1, 2), 1.0) == ([], [])
    assert ledger.stored("a:1", keys(1, 77), 1.0) == ([ONE], [])
    assert ledger.stored("a:1", keys(77), 1.0) == ([], [])
    assert ledger.load_table.work("a:1").decoding == 1


def test_one_block_ends_prefills_of_all_its_requests() -> None:
    """A stored block ends the prefill of every request that it confirms, once each, even if repeated."""
    other = replace(ONE, request_id="r2")
    ledger = ledger_with(ONE, other)
    assert ledger.stored("a:1", keys(77, 77), 1.0) == ([ONE, other], [])
    assert ledger.load_table.work("a:1") == PodWork(
        awaiting=0, awaiting_tokens=0, decoding=2, held_tokens=200
    )


def test_block_after_first_token_is_reported_as_late() -> None:
    """A block stored after the first token ends no prefill; its delay is returned once, while in flight."""
    other = replace(ONE, request_id="r2")
    ledger = ledger_with(ONE, other)
    ledger.first_token("r1", 1.0)
    assert ledger.stored("a:1", keys(77), 1.5) == ([other], [0.5])
    assert ledger.stored("a:1", keys(77), 2.0) == ([], [])
    ledger.dispatch(ONE)
    ledger.end("r1", 3.0)
    ledger.end("r1", 3.0)
    assert ledger.stored("a:1", keys(77), 4.0) == ([], [])


def test_unknown_and_repeated_reports_change_nothing() -> None:
    """First token and end of a request count once; repeated ones and those of unknown ids return None."""
    ledger = ledger_with(ONE)
    assert ledger.first_token("unknown", 1.0) is None
    ledger.first_token("r1", 1.0)
    assert ledger.first_token("r1", 1.0) is None
    ledger.end("r1", 1.0)
    assert ledger.end("r1", 1.0) is None


def test_reused_id_has_one_entry_per_request() -> None:
    """A reused id evicts nothing; a report applies to the entry on its pod, else to the oldest entry."""
    other = replace(ONE, pod="a:2", uncached_tokens=50)
    ledger = ledger_with(ONE)
    assert ledger.dispatch(other) == []
    assert (ledger.load_table.work("a:1").awaiting_tokens, ledger.load_table.work("a:2").awaiting_tokens) == (
        100,
        50,
    )
    assert ledger.first_token("r1", 1.0, "a:2") == other
    assert (ledger.load_table.work("a:1").awaiting, ledger.load_table.work("a:2").decoding) == (1, 1)
    assert ledger.end("r1", 1.0, "elsewhere") == ONE
    assert ledger.end("r1", 1.0) == other
    assert (len(ledger), ledger.load_table.work("a:2"), "r1" in ledger) == (0, PodWork(), False)


def test_oldest_request_of_an_id_is_evicted_at_the_limit() -> None:
    """Beyond `per_id_max` the oldest request of the id is evicted, and no request of another id."""
    other = replace(ONE, request_id="r2")
    ledger = ledger_with(other, *(replace(ONE, uncached_tokens=n) for n in range(3)))
    assert [gone.uncached_tokens for gone in ledger.dispatch(ONE)] == [0]
    assert (len(ledger), "r2" in ledger) == (4, True)


def test_end_times_are_kept_for_the_latest_ids() -> None:
    """The time of an end is kept until `ended_ids_max` later requests have ended."""
    ledger = ledger_with(ONE)
    assert ledger.ended_s("r1") is None
    ledger.end("r1", 3.0)
    assert ledger.ended_s("r1") == 3.0
    for number in range(4):
        ledger.dispatch(replace(ONE, request_id=f"q{number}"))
        ledger.end(f"q{number}", 4.0)
    assert (ledger.ended_s("r1"), ledger.ended_s("q0")) == (None, 4.0)


def test_prefill_end_is_known_while_in_flight() -> None:
    """The time of a prefill's end is available until the request ends."""
    ledger = ledger_with(ONE)
    assert ledger.prefill_ended_s("r1") is None
    ledger.stored("a:1", keys(77), 2.5)
    assert ledger.prefill_ended_s("r1") == 2.5
    ledger.end("r1", 3.0)
    assert ledger.prefill_ended_s("r1") is None


@pytest.mark.parametrize("source", ["first_token", "stored"])
@pytest.mark.parametrize("prefill_pod", [None, "a:2"])
def test_report_after_prefill_timeout_counts_once(source: str, prefill_pod: str | None) -> None:
    """A prefill end reported after its timeout counts once, and does not move the request again."""
    sent = replace(ONE, prefill_pod=prefill_pod)
    ledger = ledger_with(sent)
    assert ledger.expire(20.0)[0] == [sent]
    presumed = PodWork(decoding=1, held_tokens=100)
    assert (ledger.prefill_ended_s("r1"), ledger.load_table.work("a:1")) == (None, presumed)

    def report(now_s: float) -> list[Dispatch]:
        if source == "stored":
            return ledger.stored(sent.computed_on, keys(77), now_s)[0]
        return [ended for ended in [ledger.first_token("r1", now_s, "a:1")] if ended is not None]

    assert (report(30.0), report(31.0)) == ([sent], [])
    assert (ledger.prefill_ended_s("r1"), ledger.load_table.work("a:1")) == (30.0, presumed)
    ledger.end("r1", 32.0)
    assert (ledger.load_table.work("a:1"), ledger.load_table.work("a:2")) == (PodWork(), PodWork())


def test_end_before_dispatch_is_remembered_by_id() -> None:
    """The latest ends of ids that were not in flight are kept, with their times; other ends are not."""
    ledger = ledger_with(ONE)
    ledger.end("r1", 5.0)
    ledger.end("early", 5.0, late_s=1.0)
    assert [ledger.ended_while_unknown("early", since_s) for since_s in (3.9, 4.0)] == [True, False]
    assert not any(ledger.ended_while_unknown(request_id, 0.0) for request_id in ("r1", "unknown"))
    for number in range(4):
        ledger.end(f"q{number}", 6.0)
    assert (ledger.ended_while_unknown("early", 3.9), ledger.ended_while_unknown("q0", 3.9)) == (False, True)


def test_requests_beyond_the_engines_count_are_removed() -> None:
    """The oldest requests beyond an engine's count are removed if sent early enough to be in that count."""
    ledger = ledger_with(
        *(replace(ONE, request_id=f"r{n}", dispatched_s=float(n)) for n in range(4)),
        replace(ONE, request_id="elsewhere", pod="a:2"),
    )
    assert ledger.end_lost("a:1", 3, 4.5, 5.0) == []
    assert [gone.request_id for gone in ledger.end_lost("a:1", 1, 4.5, 5.0)] == ["r0", "r1"]
    assert ledger.end_lost("a:1", 9, 100.0, 100.0) == []
    assert [gone.request_id for gone in ledger.end_lost("a:1", 0, 100.0, 100.0)] == ["r2", "r3"]
    assert (len(ledger), ledger.load_table.work("a:1")) == (1, PodWork())


def test_full_ledger_evicts_its_oldest_request() -> None:
    """At capacity every new request evicts the oldest one."""
    ledger = ledger_with(*(replace(ONE, request_id=f"r{n}") for n in range(5)))
    assert [gone.request_id for gone in ledger.dispatch(replace(ONE, request_id="new"))] == ["r0"]
    assert len(ledger) == 5


def test_prefill_without_event_times_out() -> None:
    """A request without a confirming event counts as decoding after twice its expected time plus a slack."""
    ledger = ledger_with(replace(ONE, confirm_key=None, queued_prefill_s=0.5))
    assert ledger.expire(2.0)[0] == []
    assert [dispatch.request_id for dispatch in ledger.expire(2.2)[0]] == ["r1"]
    assert ledger.load_table.work("a:1").decoding == 1


def test_prefill_with_event_times_out_later() -> None:
    """With a confirming event the timeout of a prefill is five times as long plus five seconds."""
    ledger = ledger_with(ONE)
    assert ledger.expire(9.9)[0] == []
    assert ledger.expire(10.1)[0] == [ONE]


def test_request_expires_after_its_lifetime() -> None:
    """After its lifetime a request is removed, whether or not its first token was reported."""
    ledger = ledger_with(ONE, replace(ONE, request_id="r2", confirm_key=None))
    ledger.first_token("r1", 1.0)
    assert {dispatch.request_id for dispatch in ledger.expire(60.0)[1]} == {"r1", "r2"}
    assert (len(ledger), ledger.load_table.work("a:1")) == (0, PodWork())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "stored", "first_token", "end", "expire", "reconcile"]),
        st.integers(0, 4),
        st.integers(0, 2),
        st.none() | st.integers(0, 3),
        st.none() | st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_totals_match_a_recount(steps: list[tuple[str, int, int, int | None, int | None]]) -> None:
    """After any sequence of calls the per-pod totals match a recount of the requests in flight."""
    ledger = Ledger(PARAMETERS)
    awaiting: list[Dispatch] = []
    decoding: list[Dispatch] = []
    reported: list[Dispatch] = []
    for at, (action, number, pod_number, key, other) in enumerate(steps):
        now_s, request_id, pod = float(at), f"r{number}", f"a:{pod_number}"
        if action == "dispatch":
            # The dispatch time makes each dispatch unique.
            prefill_pod = None if other is None or other == pod_number else f"a:{other}"
            dispatch = Dispatch(
                request_id, pod, 10 + number, 0.0, 0.1, key, RateSample.EXACT, now_s, prefill_pod=prefill_pod
            )
            forget(ledger.dispatch(dispatch), awaiting, decoding)
            awaiting.append(dispatch)
        elif action == "stored":
            ended = ledger.stored(pod, keys(0, 1), now_s)[0]
            assert all(one.confirm_key in (0, 1) and one.computed_on == pod for one in ended)
            report(ended, reported, awaiting, decoding)
        elif action == "first_token":
            ended = [one for one in [ledger.first_token(request_id, now_s, pod)] if one]
            report(ended, reported, awaiting, decoding)
        elif action == "end":
            forget([one for one in [ledger.end(request_id, now_s, pod)] if one], awaiting, decoding)
        elif action == "reconcile":
            forget(ledger.end_lost(pod, number, now_s, now_s), awaiting, decoding)
        elif action == "expire":
            prefills, expired = ledger.expire(now_s)
            assert not any(one in reported for one in prefills)
            move(prefills, awaiting, decoding)
            forget(expired, awaiting, decoding)
        assert_equal(ledger, awaiting, decoding)


def report(
    ended: list[Dispatch], reported: list[Dispatch], awaiting: list[Dispatch], decoding: list[Dispatch]
) -> None:
    """Apply reported prefill ends to the model; check that each request's is reported once."""
    assert not any(dispatch in reported for dispatch in ended)
    reported += ended
    move([dispatch for dispatch in ended if dispatch not in decoding], awaiting, decoding)


def move(ended: list[Dispatch], awaiting: list[Dispatch], decoding: list[Dispatch]) -> None:
    """Apply ended prefills to the model."""
    for dispatch in ended:
        awaiting.remove(dispatch)
        decoding.append(dispatch)


def forget(gone: list[Dispatch], awaiting: list[Dispatch], decoding: list[Dispatch]) -> None:
    """Apply ended requests to the model."""
    for dispatch in gone:
        (awaiting if dispatch in awaiting else decoding).remove(dispatch)


def assert_equal(ledger: Ledger, awaiting: list[Dispatch], decoding: list[Dispatch]) -> None:
    """Compare the ledger's totals with the model's."""
    assert len(ledger) == len(awaiting) + len(decoding) <= PARAMETERS.capacity
    for pod in ("a:0", "a:1", "a:2"):
        queued = [one.uncached_tokens for one in awaiting if one.computed_on == pod]
        decoded = [one.uncached_tokens for one in decoding if one.pod == pod]
        work = PodWork(len(queued), sum(queued), len(decoded), sum(queued) + sum(decoded))
        assert ledger.load_table.work(pod) == work


def test_adapter_is_listed_while_a_request_needs_it() -> None:
    """A pod's adapters are listed oldest first, until the last request that needs them ends."""
    sql, french = replace(ONE, adapter="sql"), replace(ONE, request_id="r2", adapter="fr")
    ledger = ledger_with(sql, french, replace(sql, request_id="r3"), replace(ONE, request_id="r4"))
    assert (ledger.adapters.on("a:1"), ledger.adapters.on("a:2")) == (("sql", "fr"), ())
    ledger.end("r1", 1.0)
    assert ledger.adapters.on("a:1") == ("sql", "fr")
    ledger.end("r3", 1.0)
    assert ledger.adapters.on("a:1") == ("fr",)
    ledger.expire(1000.0)
    assert ledger.adapters.on("a:1") == ()


def test_adapter_moves_with_its_request() -> None:
    """With a prefill pod, the adapter counts there until the first token, and at the decoding pod after."""
    ledger = ledger_with(replace(ONE, pod="a:2", prefill_pod="a:1", adapter="sql"))
    assert (ledger.adapters.on("a:1"), ledger.adapters.on("a:2")) == (("sql",), ())
    ledger.first_token("r1", 1.0)
    assert (ledger.adapters.on("a:1"), ledger.adapters.on("a:2")) == ((), ("sql",))
    ledger.end("r1", 1.0)
    assert ledger.adapters.on("a:2") == ()
