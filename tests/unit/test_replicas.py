"""What routers tell each other of their ledgers: whoever follows prices pods as the teller does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from indexer.errors import PeerError
from router.feedback import fleet as fleet_module
from router.feedback.change_log import Journal
from router.feedback.fleet import OthersWork
from router.feedback.lifecycle import DONE, FIRST_TOKEN, REPORT, Heard
from router.feedback.messages import News, Sent
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import RateSample
from tests.support.depth import examples
from tests.unit.replica_support import PEER, Follower, told
from tests.unit.router_support import Bench, completion, long_text, ready_pod

PODS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
ONE = Dispatch("r1", PODS[0], 100, 0.0, 0.5, 77, RateSample.EXACT, 0.0)
KEYS = np.arange(1, 6, dtype=np.uint64)
SENT = Sent(1, PODS[0], "r1", uncached_tokens=100, key_bytes=KEYS.tobytes())


def bench(count: int = 3) -> Bench:
    """A router that knows some pods."""
    return Bench().with_pods(*map(ready_pod, PODS[:count]))


class Teller:
    """A ledger whose journal is told by hand."""

    def __init__(self, **limits: Any) -> None:
        self.now_s = 0.0
        self.bench = bench()
        self.ledger = Ledger(LedgerParameters(**limits), self.bench.pods.board)
        self.journal = Journal(self.ledger, lambda: self.now_s)


def test_a_follower_counts_what_the_other_has_in_flight() -> None:
    """Sent, first token, end: each changes the follower's board as it does the teller's."""
    teller, follower = Teller(), Follower(bench())
    reader = teller.journal.join()
    steps = (
        lambda: teller.ledger.dispatch(ONE, KEYS),
        lambda: teller.ledger.first_token("r1", 1.0),
        lambda: teller.ledger.end("r1", 2.0),
    )
    for step in steps:
        step()
        follower.follow(teller.journal, reader, 0.0)
        assert follower.board.work(PODS[0]) == teller.ledger.board.work(PODS[0])
        assert len(follower.work) == len(teller.ledger)


def test_who_joins_late_is_told_what_is_in_flight() -> None:
    """Requests that wait and requests that decode are told first, each as old as it is."""
    teller, follower = Teller(), Follower(bench())
    teller.ledger.dispatch(ONE, KEYS)
    teller.ledger.dispatch(replace(ONE, request_id="r2", dispatched_s=1.0))
    teller.ledger.first_token("r1", 1.5)
    teller.now_s = 3.0
    (news,) = told(teller.journal, teller.journal.join())
    assert [(sent.request_id, sent.age_s, sent.is_prefilled) for sent in news.sent] == [
        ("r1", 3.0, True),
        ("r2", 2.0, False),
    ]
    follower.work.take(PEER, news, 10.0)
    assert follower.board.work(PODS[0]) == teller.ledger.board.work(PODS[0])


def test_the_blocks_that_a_request_brings_are_assumed_until_its_first_token() -> None:
    """A burst that reaches several routers finds its pod through each; the clock's guess ends nothing."""
    teller, follower = Teller(timeout_factor=1.0, timeout_slack_s=0.1), Follower(bench())
    reader = teller.journal.join()
    teller.ledger.dispatch(replace(ONE, confirm_key=None), KEYS)
    follower.follow(teller.journal, reader, 0.0)
    assert list(follower.index.speculative.values()) == [(PODS[0], {1, 2, 3, 4, 5})]
    teller.ledger.expire(0.7)
    follower.follow(teller.journal, reader, 0.7)
    assert (follower.board.work(PODS[0]).awaiting, len(follower.index.speculative)) == (0, 1)
    teller.ledger.first_token("r1", 1.0)
    follower.follow(teller.journal, reader, 1.0)
    assert not follower.index.speculative


def test_a_lost_router_leaves_nothing_behind() -> None:
    """Its requests, adapters and assumed blocks are gone, those of others are not."""
    follower = Follower(bench())
    with_adapter = replace(SENT, adapter="sql")
    follower.work.take(PEER, News(sent=[with_adapter, replace(SENT, number=2)]), 0.0)
    follower.work.take("other", News(sent=[replace(SENT, pod=PODS[1])]), 0.0)
    assert follower.bench.ledger.adapters.on(PODS[0]) == ("sql",)
    assert follower.work.lose(PEER, 1.0) == 2
    assert follower.bench.ledger.adapters.on(PODS[0]) == ()
    assert [follower.board.work(pod).awaiting for pod in PODS] == [0, 1, 0]
    assert [pod for pod, _ in follower.index.speculative.values()] == [PODS[1]]
    assert (follower.work.lose(PEER, 1.0), len(follower.work)) == (0, 1)


def test_a_request_prefilled_elsewhere_is_the_prefill_pods_work_first() -> None:
    """Where two pods share a request, a follower counts it where the teller does."""
    teller, follower = Teller(), Follower(bench())
    reader = teller.journal.join()
    teller.ledger.dispatch(replace(ONE, prefill_pod=PODS[1]), KEYS)
    follower.follow(teller.journal, reader, 0.0)
    assert follower.board.work(PODS[1]).awaiting_tokens == 100
    teller.ledger.first_token("r1", 1.0)
    follower.follow(teller.journal, reader, 1.0)
    assert [follower.board.work(pod) for pod in PODS] == [teller.ledger.board.work(pod) for pod in PODS]
    assert follower.board.work(PODS[0]).decoding == 1


def test_both_pods_of_a_request_are_believed_to_hold_its_blocks() -> None:
    """Where one pod prefills for another, blocks are assumed of both: all of them, for one may hold fewer."""
    follower, taken = Follower(bench()), []
    follower.index.speculate = lambda _key, pod, keys, _now_s, _prompt: taken.append((pod, keys.tolist()))  # type: ignore[method-assign]
    follower.work.take(PEER, News(sent=[replace(SENT, prefill_pod=PODS[1])]), 0.0)
    assert taken == [(PODS[0], KEYS.tolist()), (PODS[1], KEYS.tolist())]


def test_a_number_that_is_told_again_is_the_new_request() -> None:
    """A peer that is confused is not counted twice."""
    follower = Follower(bench())
    follower.work.take(PEER, News(sent=[SENT]), 0.0)
    follower.work.take(PEER, News(sent=[replace(SENT, pod=PODS[1], request_id="r2")]), 0.0)
    assert [follower.board.work(pod).awaiting for pod in PODS] == [0, 1, 0]
    assert ("r1" in follower.work, "r2" in follower.work) == (False, True)


def test_what_others_ledger_gives_up_is_assumed_no_more() -> None:
    """Beyond its capacity the oldest goes, with its blocks."""
    follower = Follower(bench())
    follower.work = OthersWork(
        Ledger(LedgerParameters(capacity=1), follower.board), follower.index, follower.bench.pods
    )
    follower.work.take(PEER, News(sent=[SENT, replace(SENT, number=2, pod=PODS[1])]), 0.0)
    assert [pod for pod, _ in follower.index.speculative.values()] == [PODS[1]]


def test_a_request_is_as_old_here_as_it_is_there() -> None:
    """How long the pod has computed it already counts in the price of its queue."""
    follower = Follower(bench())
    follower.work.take(PEER, News(sent=[replace(SENT, age_s=3.0)]), 10.0)
    (row,) = follower.board.rows(PODS[:1])
    assert follower.board.pods[row]["head_since_s"] == 7.0


def test_who_joins_is_told_what_came_before_once() -> None:
    """Changes that were noted before it joined, and not told yet, are in its first account alone."""
    teller = Teller()
    first = teller.journal.join()
    teller.ledger.dispatch(ONE, KEYS)
    second = teller.journal.join()
    for reader in (first, second):
        assert [sent.request_id for news in told(teller.journal, reader) for sent in news.sent] == ["r1"]


def test_a_pick_sees_what_another_router_has_just_sent() -> None:
    """Two routers, one long prompt each: unshared both go to the same pod, shared they do not."""
    first, second = bench(2), bench(2)
    journal = Journal(first.ledger, lambda: 0.0)
    reader = journal.join()
    follower = Follower(second)
    for number in range(4):
        here = first.router.route(completion(f"a{number}", long_text(300, number)), 0.0)
        follower.follow(journal, reader, 0.0)
        there = second.router.route(completion(f"b{number}", long_text(300, 100 + number)), 0.0)
        assert there.ranked.best.pod != here.ranked.best.pod
        first.outcomes.ended(f"a{number}", REPORT, 0.0)
        second.outcomes.ended(f"b{number}", REPORT, 0.0)
        follower.follow(journal, reader, 0.0)
    assert len(follower.work) == 0


def test_a_burst_of_one_prompt_sticks_through_two_routers() -> None:
    """The second router knows that the first's pod will soon hold the prompt, and how much of it."""
    first, second = bench(), bench()
    journal = Journal(first.ledger, lambda: 0.0)
    reader = journal.join()
    follower = Follower(second)
    prompt = long_text(300)
    here = first.router.route(completion("a", prompt), 0.0)
    follower.follow(journal, reader, 0.0)
    there = second.router.route(completion("b", prompt + " and one more"), 0.0)
    assert there.ranked.best.pod == here.ranked.best.pod
    assert there.ranked.best.cached_tokens >= 16 * (here.prompt_tokens // 16 - 1)


def test_only_what_a_pod_does_not_hold_is_told() -> None:
    """A long conversation's next turn takes a few keys on the wire, not all."""
    router = bench(1)
    journal = Journal(router.ledger, lambda: 0.0)
    reader = journal.join()
    prompt = long_text(300)
    keys = router.keys(prompt)
    router.index.hold(PODS[0], keys[:-2])
    router.router.route(completion("a", prompt), 0.0)
    (news,) = told(journal, reader)
    assert news.sent[0].keys.tolist() == keys[-2:].tolist()


def test_what_is_over_before_it_was_told_is_not_told() -> None:
    """A request that begins and ends between two messages is nobody's news."""
    teller = Teller()
    reader = teller.journal.join()
    teller.ledger.dispatch(ONE, KEYS)
    teller.ledger.first_token("r1", 0.0)
    teller.ledger.end("r1", 0.0)
    assert told(teller.journal, reader) == []


def test_nothing_is_noted_while_nobody_follows() -> None:
    """A router alone pays nothing: before anybody joins, and when the last one has left."""
    teller = Teller()
    assert teller.ledger.changes is None
    readers = [teller.journal.join(), teller.journal.join()]
    assert teller.ledger.changes is teller.journal
    for reader in readers:
        teller.journal.leave(reader)
    assert teller.ledger.changes is None


def test_one_that_takes_nothing_is_given_up() -> None:
    """Its messages are bounded; it is told so, and the others go on."""
    teller = Teller()
    journal = Journal(teller.ledger, lambda: 0.0, unread_bytes_max=1_000)
    slow, quick = journal.join(), journal.join()
    for number in range(20):
        teller.ledger.dispatch(replace(ONE, request_id=str(number)), KEYS)
        assert len(told(journal, quick)) == 1
    with pytest.raises(PeerError, match=r"^behind: "):
        slow.take(0.0)


def test_too_many_changes_end_all_accounts() -> None:
    """What nobody has told in time is dropped with all accounts; who asks again is told all."""
    teller = Teller()
    journal = Journal(teller.ledger, lambda: 0.0, changes_max=10)
    reader = journal.join()
    for number in range(20):
        teller.ledger.dispatch(replace(ONE, request_id=str(number)), KEYS)
    journal.tell()
    with pytest.raises(PeerError, match=r"^behind: "):
        reader.take(0.0)
    (news,) = told(journal, journal.join())
    assert len(news.sent) == 20


def test_who_follows_is_bounded() -> None:
    """One more than so many is refused, by a reason that has it ask again."""
    teller = Teller()
    readers = [teller.journal.join() for _ in range(64)]
    with pytest.raises(PeerError, match=r"^busy: "):
        teller.journal.join()
    teller.journal.leave(readers[0])
    teller.journal.join()


def test_a_peer_that_tells_of_too_many_requests_is_broken() -> None:
    """What one peer may make us remember is bounded."""
    follower = Follower()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "REQUESTS_MAX", 3)
        follower.work.take(PEER, News(sent=[replace(SENT, number=number) for number in range(3)]), 0.0)
        with pytest.raises(PeerError, match=r"^broken: "):
            follower.work.take(PEER, News(sent=[replace(SENT, number=4)]), 0.0)
    assert follower.work.lose(PEER, 0.0) == 3


def test_news_of_unknown_numbers_are_passed_over() -> None:
    """A peer that is confused cannot end what is not its own."""
    follower = Follower(bench())
    follower.work.take(PEER, News(sent=[SENT]), 0.0)
    follower.work.take("other", News(overdue=[1], prefilled=[1], ended=[1, 2]), 0.0)
    assert follower.board.work(PODS[0]).awaiting == 1


def test_of_unknown_pods_nothing_is_assumed() -> None:
    """A pod that we do not have yet gets the load that others sent it, and no blocks."""
    follower = Follower(bench(1))
    follower.work.take(PEER, News(sent=[replace(SENT, pod=PODS[2])]), 0.0)
    assert (follower.board.work(PODS[2]).awaiting, follower.index.speculative) == (1, {})


def test_an_end_that_reached_the_wrong_router_reaches_the_right_one() -> None:
    """What one router hears of a request that is none of its own ends it at the router whose it is."""
    ours, theirs = bench(1), bench(1)
    journal = Journal(ours.ledger, lambda: 0.0)
    ours.outcomes.join(_Others(journal, set()))
    reader = journal.join()
    decision = theirs.router.route(completion("x", long_text(50)), 0.0)
    ours.outcomes.first_token("x", REPORT, 1.0, pod=PODS[0])
    ours.outcomes.ended("x", REPORT, 2.0, pod=PODS[0], cached_tokens=7)
    (news,) = told(journal, reader)
    assert news.heard == [
        Heard("x", FIRST_TOKEN, REPORT, PODS[0]),
        Heard("x", DONE, REPORT, PODS[0], None, 7),
    ]
    theirs.outcomes.told(news.heard[0], 1.0)
    assert theirs.ledger.prefill_ended_s("x") == 1.0
    theirs.outcomes.told(news.heard[1], 2.0)
    assert "x" not in theirs.ledger
    assert theirs.sample("kvroute_router_request_ends_total", source=REPORT, outcome="done") == 1
    assert theirs.explain.one(decision.request_id)["delivered_cached_tokens"] == 7


def test_what_another_router_heard_is_not_passed_on_again() -> None:
    """News goes one way once: no router tells others what others told it."""
    ours = bench(1)
    journal = Journal(ours.ledger, lambda: 0.0)
    ours.outcomes.join(_Others(journal, set()))
    reader = journal.join()
    ours.outcomes.told(Heard("x", DONE, REPORT), 0.0)
    ours.outcomes.told(Heard("x", FIRST_TOKEN, REPORT), 0.0)
    assert told(journal, reader) == []


def test_a_request_that_two_routers_were_asked_for_ends_where_it_was_served() -> None:
    """Of two picks for one id, news that names the other's pod is not ours."""
    ours = bench(1)
    ours.outcomes.join(_Others(Journal(ours.ledger), {"x"}))
    ours.router.route(completion("x", long_text(50)), 0.0)
    ours.outcomes.told(Heard("x", DONE, REPORT, PODS[1]), 0.0)
    assert "x" in ours.ledger
    ours.outcomes.told(Heard("x", DONE, REPORT, PODS[0]), 0.0)
    assert "x" not in ours.ledger


class _Others:
    """The other routers: those who follow a journal, with these requests in flight."""

    def __init__(self, journal: Journal, known: set[str]) -> None:
        self.heard = journal.heard
        self.known = known

    def know(self, request_id: str) -> bool:
        return request_id in self.known


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "shared", "first", "end", "stored", "expire", "tell", "join", "lose"]),
        st.integers(0, 5),
        st.sampled_from(PODS),
        st.integers(0, 3000),
    ),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(steps=STEPS)
def test_after_any_history_a_follower_counts_what_the_teller_counts(steps: list[tuple[Any, ...]]) -> None:
    """Whatever happens, and whenever one joins or is lost, told means equal: each sum of each pod."""
    teller, follower = Teller(capacity=6, per_id_max=2), Follower(bench())
    reader = None
    for number, (kind, who, pod, tokens) in enumerate(steps):
        teller.now_s = now_s = 0.3 * number
        dispatch = replace(ONE, request_id=f"r{who}", pod=pod, uncached_tokens=tokens, dispatched_s=now_s)
        match kind:
            case "dispatch":
                teller.ledger.dispatch(replace(dispatch, confirm_key=who), KEYS[who:])
            case "shared":
                teller.ledger.dispatch(replace(dispatch, confirm_key=None, prefill_pod=PODS[who % 3]), KEYS)
            case "first":
                teller.ledger.first_token(f"r{who}", now_s, pod)
            case "end":
                teller.ledger.end(f"r{who}", now_s, pod)
            case "stored":
                teller.ledger.stored(pod, np.array([who], np.uint64), now_s)
            case "expire":
                teller.ledger.expire(now_s)
            case "tell" if reader is not None:
                follower.follow(teller.journal, reader, now_s)
            case "join" if reader is None:
                reader = teller.journal.join()
            case "lose" if reader is not None:
                teller.journal.leave(reader)
                reader = None
                follower.work.lose(PEER, now_s)
                assert not follower.index.speculative
    if reader is not None:
        follower.follow(teller.journal, reader, teller.now_s)
        assert [follower.board.work(pod) for pod in PODS] == [teller.ledger.board.work(pod) for pod in PODS]
        assert len(follower.work) == len(teller.ledger)
    follower.work.lose(PEER, teller.now_s)
    assert all(follower.board.work(pod).held_tokens == 0 for pod in PODS)
    assert (len(follower.work), follower.index.speculative) == (0, {})
