"""The in-flight ledger: sums that always equal what is in flight, and an end for everything."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from router.ledger import Dispatch, Ledger, LedgerParameters, PodWork

PARAMETERS = LedgerParameters(capacity=5, lifetime_s=60.0, patience=2.0, slack_s=0.1, event_slack_s=5.0)
ONE = Dispatch("r1", "a:1", 100, 0.0, 0.5, confirm_key=77, found_idle=True, dispatched_s=0.0)


def ledger_with(*dispatches: Dispatch) -> Ledger:
    """A ledger after dispatches."""
    ledger = Ledger(PARAMETERS)
    for dispatch in dispatches:
        ledger.dispatch(dispatch)
    return ledger


def test_a_request_awaits_then_decodes_then_is_gone() -> None:
    """Its tokens are queued until its first token, its place is held until its end."""
    ledger = ledger_with(ONE)
    assert ledger.work("a:1") == PodWork(awaiting=1, awaiting_tokens=100, decoding=0, held_tokens=100)
    assert ledger.first_token("r1") == ONE
    assert ledger.work("a:1") == PodWork(awaiting=0, awaiting_tokens=0, decoding=1, held_tokens=100)
    assert ledger.end("r1") == ONE
    assert (ledger.work("a:1"), len(ledger)) == (PodWork(), 0)


def test_the_announcement_of_its_last_block_ends_a_prefill() -> None:
    """Only the awaited key, announced by the right pod, counts, and only once."""
    ledger = ledger_with(ONE)
    assert ledger.stored("a:2", [77]) == []
    assert ledger.stored("a:1", [1, 2]) == []
    assert ledger.stored("a:1", [1, 77]) == [ONE]
    assert ledger.stored("a:1", [77]) == []
    assert ledger.work("a:1").decoding == 1


def test_two_requests_may_await_the_same_block() -> None:
    """One announcement ends the prefill of all who await it, once each even if it is repeated."""
    other = replace(ONE, request_id="r2")
    ledger = ledger_with(ONE, other)
    assert ledger.stored("a:1", [77, 77]) == [ONE, other]
    assert ledger.work("a:1") == PodWork(awaiting=0, awaiting_tokens=0, decoding=2, held_tokens=200)


def test_unknown_and_repeated_news_change_nothing() -> None:
    """First token and end are taken once; later ones and strangers' are None."""
    ledger = ledger_with(ONE)
    assert ledger.first_token("stranger") is None
    ledger.first_token("r1")
    assert ledger.first_token("r1") is None
    ledger.end("r1")
    assert ledger.end("r1") is None


def test_a_repeated_request_id_takes_the_place_of_the_older_request() -> None:
    """A retry under the same id is one request, not two."""
    ledger = ledger_with(ONE)
    retry = replace(ONE, pod="a:2", uncached_tokens=50)
    assert ledger.dispatch(retry) == [ONE]
    assert (ledger.work("a:1"), ledger.work("a:2").awaiting_tokens) == (PodWork(), 50)


def test_a_full_ledger_gives_up_its_oldest_request() -> None:
    """At capacity every new request ends the oldest."""
    ledger = ledger_with(*(replace(ONE, request_id=f"r{n}") for n in range(5)))
    assert [gone.request_id for gone in ledger.dispatch(replace(ONE, request_id="new"))] == ["r0"]
    assert len(ledger) == 5


def test_a_prefill_without_announcement_ends_by_its_expected_time() -> None:
    """Twice the expected seconds and a slack later, a request that awaits no event counts as decoding."""
    ledger = ledger_with(replace(ONE, confirm_key=None, queued_prefill_s=0.5))
    assert ledger.expire(2.0).prefills == []
    assert [dispatch.request_id for dispatch in ledger.expire(2.2).prefills] == ["r1"]
    assert ledger.work("a:1").decoding == 1


def test_an_awaited_announcement_is_given_more_time() -> None:
    """A request whose event is awaited is believed queued five times as long, and five seconds more."""
    ledger = ledger_with(ONE)
    assert ledger.expire(9.9).prefills == []
    assert ledger.expire(10.1).prefills == [ONE]


def test_nothing_lives_forever() -> None:
    """After its lifetime a request is gone whatever was heard of it."""
    ledger = ledger_with(ONE, replace(ONE, request_id="r2", confirm_key=None))
    ledger.first_token("r1")
    assert {dispatch.request_id for dispatch in ledger.expire(60.0).lives} == {"r1", "r2"}
    assert (len(ledger), ledger.work("a:1")) == (0, PodWork())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "stored", "first_token", "end", "expire"]),
        st.integers(0, 7),
        st.integers(0, 2),
        st.none() | st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(STEPS)
def test_sums_always_equal_a_recount(steps: list[tuple[str, int, int, int | None]]) -> None:
    """After any history the per-pod sums equal what a plain list of the requests in flight adds up to."""
    ledger = Ledger(PARAMETERS)
    model: dict[str, tuple[Dispatch, bool]] = {}
    now_s = 0.0
    for action, number, pod_number, key in steps:
        now_s += 1.0
        request_id, pod = f"r{number}", f"a:{pod_number}"
        if action == "dispatch":
            dispatch = Dispatch(request_id, pod, 10 + number, 0.0, 0.1, key, True, now_s)
            for gone in ledger.dispatch(dispatch):
                del model[gone.request_id]
            model[request_id] = (dispatch, False)
        elif action == "stored":
            for told in ledger.stored(pod, [0, 1]):
                assert told.confirm_key in (0, 1)
                model[told.request_id] = (told, True)
        elif action == "first_token" and (known := ledger.first_token(request_id)):
            model[request_id] = (known, True)
        elif action == "end" and ledger.end(request_id):
            del model[request_id]
        elif action == "expire":
            expired = ledger.expire(now_s)
            model |= {dispatch.request_id: (dispatch, True) for dispatch in expired.prefills}
            for dispatch in expired.lives:
                del model[dispatch.request_id]
        assert_equal(ledger, model)


def assert_equal(ledger: Ledger, model: dict[str, tuple[Dispatch, bool]]) -> None:
    """Compares the ledger's sums with the model's."""
    assert len(ledger) == len(model) <= PARAMETERS.capacity
    for pod in ("a:0", "a:1", "a:2"):
        mine = [(dispatch, decoding) for dispatch, decoding in model.values() if dispatch.pod == pod]
        queued = [dispatch.uncached_tokens for dispatch, decoding in mine if not decoding]
        held = sum(dispatch.uncached_tokens for dispatch, _ in mine)
        assert ledger.work(pod) == PodWork(len(queued), sum(queued), len(mine) - len(queued), held)
