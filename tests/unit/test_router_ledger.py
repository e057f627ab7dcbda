"""The in-flight ledger: sums that always equal what is in flight, and an end for everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from indexer.keys import Keys
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import Lesson
from router.pods.load_table import PodWork
from tests.support.depth import examples

PARAMETERS = LedgerParameters(
    capacity=5,
    lifetime_s=60.0,
    patience=2.0,
    slack_s=0.1,
    event_slack_s=5.0,
    reuse=3,
    remembered=4,
    travel_s=2.0,
)
ONE = Dispatch("r1", "a:1", 100, 0.0, 0.5, confirm_key=77, lesson=Lesson.RATE, dispatched_s=0.0)


def keys(*values: int) -> Keys:
    """Block keys as events carry them."""
    return np.array(values, np.uint64)


def ledger_with(*dispatches: Dispatch) -> Ledger:
    """A ledger after dispatches."""
    ledger = Ledger(PARAMETERS)
    for dispatch in dispatches:
        ledger.dispatch(dispatch)
    return ledger


def test_a_request_awaits_then_decodes_then_is_gone() -> None:
    """Its tokens are queued until its first token, its place is held until its end."""
    ledger = ledger_with(ONE)
    assert ledger.board.work("a:1") == PodWork(awaiting=1, awaiting_tokens=100, decoding=0, held_tokens=100)
    assert ledger.first_token("r1", 1.0) == ONE
    assert ledger.board.work("a:1") == PodWork(awaiting=0, awaiting_tokens=0, decoding=1, held_tokens=100)
    assert ledger.end("r1", 1.0) == ONE
    assert (ledger.board.work("a:1"), len(ledger)) == (PodWork(), 0)


def test_the_announcement_of_its_last_block_ends_a_prefill() -> None:
    """Only the awaited key, announced by the right pod, counts, and only once."""
    ledger = ledger_with(ONE)
    assert ledger.stored("a:2", keys(77), 1.0) == ([], [])
    assert ledger.stored("a:1", keys(1, 2), 1.0) == ([], [])
    assert ledger.stored("a:1", keys(1, 77), 1.0) == ([ONE], [])
    assert ledger.stored("a:1", keys(77), 1.0) == ([], [])
    assert ledger.board.work("a:1").decoding == 1


def test_two_requests_may_await_the_same_block() -> None:
    """One announcement ends the prefill of all who await it, once each even if it is repeated."""
    other = replace(ONE, request_id="r2")
    ledger = ledger_with(ONE, other)
    assert ledger.stored("a:1", keys(77, 77), 1.0) == ([ONE, other], [])
    assert ledger.board.work("a:1") == PodWork(awaiting=0, awaiting_tokens=0, decoding=2, held_tokens=200)


def test_a_block_that_comes_after_other_news_is_late_by_the_time_between() -> None:
    """It ends no prefill again, is late once, and only while its request is in flight."""
    other = replace(ONE, request_id="r2")
    ledger = ledger_with(ONE, other)
    ledger.first_token("r1", 1.0)
    assert ledger.stored("a:1", keys(77), 1.5) == ([other], [0.5])
    assert ledger.stored("a:1", keys(77), 2.0) == ([], [])
    ledger.dispatch(ONE)
    ledger.end("r1", 3.0)
    ledger.end("r1", 3.0)
    assert ledger.stored("a:1", keys(77), 4.0) == ([], [])


def test_unknown_and_repeated_news_change_nothing() -> None:
    """First token and end are taken once; later ones and strangers' are None."""
    ledger = ledger_with(ONE)
    assert ledger.first_token("stranger", 1.0) is None
    ledger.first_token("r1", 1.0)
    assert ledger.first_token("r1", 1.0) is None
    ledger.end("r1", 1.0)
    assert ledger.end("r1", 1.0) is None


def test_requests_in_flight_under_one_id_are_entries_of_their_own() -> None:
    """A reused id displaces nothing; news goes to the pod that it names, else to the oldest of them."""
    other = replace(ONE, pod="a:2", uncached_tokens=50)
    ledger = ledger_with(ONE)
    assert ledger.dispatch(other) == []
    assert (ledger.board.work("a:1").awaiting_tokens, ledger.board.work("a:2").awaiting_tokens) == (100, 50)
    assert ledger.first_token("r1", 1.0, "a:2") == other
    assert (ledger.board.work("a:1").awaiting, ledger.board.work("a:2").decoding) == (1, 1)
    assert ledger.end("r1", 1.0, "elsewhere") == ONE
    assert ledger.end("r1", 1.0) == other
    assert (len(ledger), ledger.board.work("a:2"), "r1" in ledger) == (0, PodWork(), False)


def test_one_id_has_only_so_many_requests_in_flight() -> None:
    """Beyond the cap the oldest under the id is given up, and nobody else's."""
    stranger = replace(ONE, request_id="r2")
    ledger = ledger_with(stranger, *(replace(ONE, uncached_tokens=n) for n in range(3)))
    assert [gone.uncached_tokens for gone in ledger.dispatch(ONE)] == [0]
    assert (len(ledger), "r2" in ledger) == (4, True)


def test_ended_requests_are_remembered_for_a_while() -> None:
    """The time of an end is known until enough others have ended."""
    ledger = ledger_with(ONE)
    assert ledger.ended_s("r1") is None
    ledger.end("r1", 3.0)
    assert ledger.ended_s("r1") == 3.0
    for number in range(4):
        ledger.dispatch(replace(ONE, request_id=f"q{number}"))
        ledger.end(f"q{number}", 4.0)
    assert (ledger.ended_s("r1"), ledger.ended_s("q0")) == (None, 4.0)


def test_the_end_of_a_prefill_is_known_until_the_end() -> None:
    """Since when a request is past its prefill is told while it is in flight."""
    ledger = ledger_with(ONE)
    assert ledger.prefill_ended_s("r1") is None
    ledger.stored("a:1", keys(77), 2.5)
    assert ledger.prefill_ended_s("r1") == 2.5
    ledger.end("r1", 3.0)
    assert ledger.prefill_ended_s("r1") is None


@pytest.mark.parametrize("source", ["first_token", "stored"])
@pytest.mark.parametrize("prefill_pod", [None, "a:2"])
def test_the_true_end_of_a_prefill_is_news_after_the_clocks(source: str, prefill_pod: str | None) -> None:
    """The clock only guesses it: whoever tells it brings news, once, and moves no request again."""
    sent = replace(ONE, prefill_pod=prefill_pod)
    ledger = ledger_with(sent)
    assert ledger.expire(20.0)[0] == [sent]
    guessed = PodWork(decoding=1, held_tokens=100)
    assert (ledger.prefill_ended_s("r1"), ledger.board.work("a:1")) == (None, guessed)

    def tell(now_s: float) -> list[Dispatch]:
        if source == "stored":
            return ledger.stored(sent.computed_on, keys(77), now_s)[0]
        return [told for told in [ledger.first_token("r1", now_s, "a:1")] if told is not None]

    assert (tell(30.0), tell(31.0)) == ([sent], [])
    assert (ledger.prefill_ended_s("r1"), ledger.board.work("a:1")) == (30.0, guessed)
    ledger.end("r1", 32.0)
    assert (ledger.board.work("a:1"), ledger.board.work("a:2")) == (PodWork(), PodWork())


def test_an_end_before_its_request_is_known_by_its_id() -> None:
    """Only ends of ids that were not in flight are kept, the last of them, with the time when it was over."""
    ledger = ledger_with(ONE)
    ledger.end("r1", 5.0)
    ledger.end("early", 5.0, late_s=1.0)
    assert (ledger.was_over("early", 3.9), ledger.was_over("early", 4.0)) == (True, False)
    assert (ledger.was_over("r1", 0.0), ledger.was_over("stranger", 0.0)) == (False, False)
    for number in range(4):
        ledger.end(f"q{number}", 6.0)
    assert (ledger.was_over("early", 3.9), ledger.was_over("q0", 3.9)) == (False, True)


def test_requests_that_the_engine_does_not_have_are_over() -> None:
    """Of those sent early enough to be in an engine's count, the oldest beyond it are ended, there alone."""
    ledger = ledger_with(
        *(replace(ONE, request_id=f"r{n}", dispatched_s=float(n)) for n in range(4)),
        replace(ONE, request_id="elsewhere", pod="a:2"),
    )
    assert ledger.reconcile("a:1", 3, 4.5, 5.0) == []
    assert [gone.request_id for gone in ledger.reconcile("a:1", 1, 4.5, 5.0)] == ["r0", "r1"]
    assert ledger.reconcile("a:1", 9, 100.0, 100.0) == []
    assert [gone.request_id for gone in ledger.reconcile("a:1", 0, 100.0, 100.0)] == ["r2", "r3"]
    assert (len(ledger), ledger.board.work("a:1")) == (1, PodWork())


def test_a_full_ledger_gives_up_its_oldest_request() -> None:
    """At capacity every new request ends the oldest."""
    ledger = ledger_with(*(replace(ONE, request_id=f"r{n}") for n in range(5)))
    assert [gone.request_id for gone in ledger.dispatch(replace(ONE, request_id="new"))] == ["r0"]
    assert len(ledger) == 5


def test_a_prefill_without_announcement_ends_by_its_expected_time() -> None:
    """Twice the expected seconds and a slack later, a request that awaits no event counts as decoding."""
    ledger = ledger_with(replace(ONE, confirm_key=None, queued_prefill_s=0.5))
    assert ledger.expire(2.0)[0] == []
    assert [dispatch.request_id for dispatch in ledger.expire(2.2)[0]] == ["r1"]
    assert ledger.board.work("a:1").decoding == 1


def test_an_awaited_announcement_is_given_more_time() -> None:
    """A request whose event is awaited is believed queued five times as long, and five seconds more."""
    ledger = ledger_with(ONE)
    assert ledger.expire(9.9)[0] == []
    assert ledger.expire(10.1)[0] == [ONE]


def test_nothing_lives_forever() -> None:
    """After its lifetime a request is gone whatever was heard of it."""
    ledger = ledger_with(ONE, replace(ONE, request_id="r2", confirm_key=None))
    ledger.first_token("r1", 1.0)
    assert {dispatch.request_id for dispatch in ledger.expire(60.0)[1]} == {"r1", "r2"}
    assert (len(ledger), ledger.board.work("a:1")) == (0, PodWork())


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
def test_sums_always_equal_a_recount(steps: list[tuple[str, int, int, int | None, int | None]]) -> None:
    """After any history the per-pod sums equal what a plain list of the requests in flight adds up to."""
    ledger = Ledger(PARAMETERS)
    awaiting: list[Dispatch] = []
    decoding: list[Dispatch] = []
    told: list[Dispatch] = []
    for at, (action, number, pod_number, key, other) in enumerate(steps):
        now_s, request_id, pod = float(at), f"r{number}", f"a:{pod_number}"
        if action == "dispatch":
            # The time makes each dispatch one of its kind.
            prefill_pod = None if other is None or other == pod_number else f"a:{other}"
            dispatch = Dispatch(
                request_id, pod, 10 + number, 0.0, 0.1, key, True, now_s, prefill_pod=prefill_pod
            )
            forget(ledger.dispatch(dispatch), awaiting, decoding)
            awaiting.append(dispatch)
        elif action == "stored":
            ended = ledger.stored(pod, keys(0, 1), now_s)[0]
            assert all(one.confirm_key in (0, 1) and one.computed_on == pod for one in ended)
            tell(ended, told, awaiting, decoding)
        elif action == "first_token":
            ended = [one for one in [ledger.first_token(request_id, now_s, pod)] if one]
            tell(ended, told, awaiting, decoding)
        elif action == "end":
            forget([one for one in [ledger.end(request_id, now_s, pod)] if one], awaiting, decoding)
        elif action == "reconcile":
            forget(ledger.reconcile(pod, number, now_s, now_s), awaiting, decoding)
        elif action == "expire":
            prefills, lives = ledger.expire(now_s)
            assert not any(one in told for one in prefills)
            move(prefills, awaiting, decoding)
            forget(lives, awaiting, decoding)
        assert_equal(ledger, awaiting, decoding)


def tell(
    ended: list[Dispatch], told: list[Dispatch], awaiting: list[Dispatch], decoding: list[Dispatch]
) -> None:
    """The model's side of prefills whose end is told: once each, also after the clock's guess."""
    assert not any(dispatch in told for dispatch in ended)
    told += ended
    move([dispatch for dispatch in ended if dispatch not in decoding], awaiting, decoding)


def move(ended: list[Dispatch], awaiting: list[Dispatch], decoding: list[Dispatch]) -> None:
    """The model's side of ended prefills."""
    for dispatch in ended:
        awaiting.remove(dispatch)
        decoding.append(dispatch)


def forget(gone: list[Dispatch], awaiting: list[Dispatch], decoding: list[Dispatch]) -> None:
    """The model's side of ended requests."""
    for dispatch in gone:
        (awaiting if dispatch in awaiting else decoding).remove(dispatch)


def assert_equal(ledger: Ledger, awaiting: list[Dispatch], decoding: list[Dispatch]) -> None:
    """Compares the ledger's sums with the model's."""
    assert len(ledger) == len(awaiting) + len(decoding) <= PARAMETERS.capacity
    for pod in ("a:0", "a:1", "a:2"):
        queued = [one.uncached_tokens for one in awaiting if one.computed_on == pod]
        decoded = [one.uncached_tokens for one in decoding if one.pod == pod]
        work = PodWork(len(queued), sum(queued), len(decoded), sum(queued) + sum(decoded))
        assert ledger.board.work(pod) == work


def test_an_adapter_is_needed_as_long_as_a_request_is_in_flight() -> None:
    """Adapters count by pod, the first that came first, and go with the last request that needs them."""
    sql, french = replace(ONE, adapter="sql"), replace(ONE, request_id="r2", adapter="fr")
    ledger = ledger_with(sql, french, replace(sql, request_id="r3"), replace(ONE, request_id="r4"))
    assert (ledger.adapters.on("a:1"), ledger.adapters.on("a:2")) == (("sql", "fr"), ())
    ledger.end("r1", 1.0)
    assert ledger.adapters.on("a:1") == ("sql", "fr")
    ledger.end("r3", 1.0)
    assert ledger.adapters.on("a:1") == ("fr",)
    ledger.expire(1000.0)
    assert ledger.adapters.on("a:1") == ()


def test_an_adapter_moves_with_its_request() -> None:
    """Where another pod decodes, the adapter is needed at the one that prefills, and then there."""
    ledger = ledger_with(replace(ONE, pod="a:2", prefill_pod="a:1", adapter="sql"))
    assert (ledger.adapters.on("a:1"), ledger.adapters.on("a:2")) == (("sql",), ())
    ledger.first_token("r1", 1.0)
    assert (ledger.adapters.on("a:1"), ledger.adapters.on("a:2")) == ((), ("sql",))
    ledger.end("r1", 1.0)
    assert ledger.adapters.on("a:2") == ()
