"""Tests of shared ledgers: a follower's load table matches the sender's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from indexer.errors import PeerError
from router.feedback import fleet as fleet_module
from router.feedback.change_log import ChangeLog, LedgerChanges, Sent
from router.feedback.fleet import RemoteLoad
from router.feedback.outcomes import DONE, FIRST_TOKEN, REPORT, RequestReport
from router.inflight.dispatch import Dispatch
from router.inflight.ledger import Ledger, LedgerParameters
from router.inflight.rates import RateSample
from tests.support.depth import examples
from tests.support.router.bench import Bench, completion, ended, long_text, ready_pod
from tests.support.router.replicas import PEER, Follower, received

PODS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
ONE = Dispatch("r1", PODS[0], 100, 0.0, 0.5, 77, RateSample.EXACT, 0.0)
KEYS = np.arange(1, 6, dtype=np.uint64)
SENT = Sent(1, PODS[0], "r1", uncached_tokens=100, key_bytes=KEYS.tobytes())


def bench(count: int = 3) -> Bench:
    """Return a router with the first `count` pods."""
    return Bench().with_pods(*map(ready_pod, PODS[:count]))


class Sender:
    """Ledger whose changes are sent when a test flushes them."""

    def __init__(self, **limits: Any) -> None:
        self.now_s = 0.0
        self.bench = bench()
        self.ledger = Ledger(LedgerParameters(**limits), self.bench.pods.load_table)
        self.change_log = ChangeLog(self.ledger, lambda: self.now_s)


def test_each_change_updates_the_followers_load() -> None:
    """Dispatch, first token and end change the follower's load table as they do the sender's."""
    sender, follower = Sender(), Follower(bench())
    queue = sender.change_log.subscribe()
    steps = (
        lambda: sender.ledger.dispatch(ONE, KEYS),
        lambda: sender.ledger.first_token("r1", 1.0),
        lambda: sender.ledger.end("r1", 2.0),
    )
    for step in steps:
        step()
        follower.follow(sender.change_log, queue, 0.0)
        assert follower.load_table.work(PODS[0]) == sender.ledger.load_table.work(PODS[0])
        assert len(follower.remote) == len(sender.ledger)


def test_new_follower_receives_requests_in_flight() -> None:
    """A new follower receives all waiting and decoding requests first, with their ages."""
    sender, follower = Sender(), Follower(bench())
    sender.ledger.dispatch(ONE, KEYS)
    sender.ledger.dispatch(replace(ONE, request_id="r2", dispatched_s=1.0))
    sender.ledger.first_token("r1", 1.5)
    sender.now_s = 3.0
    (changes,) = received(sender.change_log, sender.change_log.subscribe())
    assert [(sent.request_id, sent.age_s, sent.is_prefilled) for sent in changes.sent] == [
        ("r1", 3.0, True),
        ("r2", 2.0, False),
    ]
    follower.remote.apply(PEER, changes, 10.0)
    assert follower.load_table.work(PODS[0]) == sender.ledger.load_table.work(PODS[0])


def test_remote_blocks_are_speculative_until_the_first_token() -> None:
    """A remote request's blocks are speculative entries until its first token; a timeout keeps them."""
    sender, follower = Sender(timeout_factor=1.0, timeout_slack_s=0.1), Follower(bench())
    queue = sender.change_log.subscribe()
    sender.ledger.dispatch(replace(ONE, confirm_key=None), KEYS)
    follower.follow(sender.change_log, queue, 0.0)
    assert list(follower.index.speculative.values()) == [(PODS[0], {1, 2, 3, 4, 5})]
    sender.ledger.expire(0.7)
    follower.follow(sender.change_log, queue, 0.7)
    assert (follower.load_table.work(PODS[0]).awaiting, len(follower.index.speculative)) == (0, 1)
    sender.ledger.first_token("r1", 1.0)
    follower.follow(sender.change_log, queue, 1.0)
    assert not follower.index.speculative


def test_lost_peer_leaves_nothing_behind() -> None:
    """A lost peer's requests, adapters and speculative blocks are removed, those of others are kept."""
    follower = Follower(bench())
    with_adapter = replace(SENT, adapter="sql")
    follower.remote.apply(PEER, LedgerChanges(sent=[with_adapter, replace(SENT, number=2)]), 0.0)
    follower.remote.apply("other", LedgerChanges(sent=[replace(SENT, pod=PODS[1])]), 0.0)
    assert follower.bench.ledger.adapters.on(PODS[0]) == ("sql",)
    assert follower.remote.drop(PEER, 1.0) == 2
    assert follower.bench.ledger.adapters.on(PODS[0]) == ()
    assert [follower.load_table.work(pod).awaiting for pod in PODS] == [0, 1, 0]
    assert [pod for pod, _ in follower.index.speculative.values()] == [PODS[1]]
    assert (follower.remote.drop(PEER, 1.0), len(follower.remote)) == (0, 1)


def test_remote_prefill_counts_at_the_prefill_pod() -> None:
    """A request with a prefill pod counts there until its first token, then at the decoding pod."""
    sender, follower = Sender(), Follower(bench())
    queue = sender.change_log.subscribe()
    sender.ledger.dispatch(replace(ONE, prefill_pod=PODS[1]), KEYS)
    follower.follow(sender.change_log, queue, 0.0)
    assert follower.load_table.work(PODS[1]).awaiting_tokens == 100
    sender.ledger.first_token("r1", 1.0)
    follower.follow(sender.change_log, queue, 1.0)
    assert [follower.load_table.work(pod) for pod in PODS] == [
        sender.ledger.load_table.work(pod) for pod in PODS
    ]
    assert follower.load_table.work(PODS[0]).decoding == 1


def test_both_pods_of_a_request_get_speculative_blocks() -> None:
    """With a prefill pod, all blocks are speculative on both pods, because either may lack some."""
    follower, added = Follower(bench()), []
    follower.index.speculate = lambda _key, pod, keys, _now_s, _prompt: added.append((pod, keys.tolist()))  # type: ignore[method-assign]
    follower.remote.apply(PEER, LedgerChanges(sent=[replace(SENT, prefill_pod=PODS[1])]), 0.0)
    assert added == [(PODS[0], KEYS.tolist()), (PODS[1], KEYS.tolist())]


def test_repeated_number_replaces_the_request() -> None:
    """A request with a number in use replaces the former request instead of counting twice."""
    follower = Follower(bench())
    follower.remote.apply(PEER, LedgerChanges(sent=[SENT]), 0.0)
    follower.remote.apply(PEER, LedgerChanges(sent=[replace(SENT, pod=PODS[1], request_id="r2")]), 0.0)
    assert [follower.load_table.work(pod).awaiting for pod in PODS] == [0, 1, 0]
    assert ("r1" in follower.remote, "r2" in follower.remote) == (False, True)


def test_eviction_of_a_remote_request_ends_its_speculation() -> None:
    """A remote request that the full ledger evicts loses its speculative blocks."""
    follower = Follower(bench())
    follower.remote = RemoteLoad(
        Ledger(LedgerParameters(capacity=1), follower.load_table), follower.index, follower.bench.pods
    )
    follower.remote.apply(PEER, LedgerChanges(sent=[SENT, replace(SENT, number=2, pod=PODS[1])]), 0.0)
    assert [pod for pod, _ in follower.index.speculative.values()] == [PODS[1]]


def test_age_of_a_remote_request_counts() -> None:
    """The time that the pod has already spent on a remote request counts in its queueing delay."""
    follower = Follower(bench())
    follower.remote.apply(PEER, LedgerChanges(sent=[replace(SENT, age_s=3.0)]), 10.0)
    (row,) = follower.load_table.rows(PODS[:1])
    assert follower.load_table.pods[row]["head_since_s"] == 7.0


def test_new_follower_receives_earlier_changes_once() -> None:
    """Changes recorded before a follower joins, and not sent yet, are in its first message only."""
    sender = Sender()
    first = sender.change_log.subscribe()
    sender.ledger.dispatch(ONE, KEYS)
    second = sender.change_log.subscribe()
    for queue in (first, second):
        assert [
            sent.request_id for changes in received(sender.change_log, queue) for sent in changes.sent
        ] == ["r1"]


def test_pick_includes_requests_of_other_routers() -> None:
    """With a shared ledger, long prompts that reach two routers go to different pods."""
    first, second = bench(2), bench(2)
    change_log = ChangeLog(first.ledger, lambda: 0.0)
    queue = change_log.subscribe()
    follower = Follower(second)
    for number in range(4):
        here = first.router.route(completion(f"a{number}", long_text(300, number)), 0.0)
        follower.follow(change_log, queue, 0.0)
        there = second.router.route(completion(f"b{number}", long_text(300, 100 + number)), 0.0)
        assert there.ranked.best.pod != here.ranked.best.pod
        ended(first.lifecycle, f"a{number}", REPORT, 0.0)
        ended(second.lifecycle, f"b{number}", REPORT, 0.0)
        follower.follow(change_log, queue, 0.0)
    assert len(follower.remote) == 0


def test_burst_of_one_prompt_goes_to_one_pod() -> None:
    """The second router predicts a cache hit on the pod to which the first has sent the same prompt."""
    first, second = bench(), bench()
    change_log = ChangeLog(first.ledger, lambda: 0.0)
    queue = change_log.subscribe()
    follower = Follower(second)
    prompt = long_text(300)
    here = first.router.route(completion("a", prompt), 0.0)
    follower.follow(change_log, queue, 0.0)
    there = second.router.route(completion("b", prompt + " and one more"), 0.0)
    assert there.ranked.best.pod == here.ranked.best.pod
    assert there.ranked.best.cached_tokens >= 16 * (here.prompt_tokens // 16 - 1)


def test_only_keys_of_new_blocks_are_sent() -> None:
    """Only the keys of blocks that the pod does not hold yet are sent with a request."""
    router = bench(1)
    change_log = ChangeLog(router.ledger, lambda: 0.0)
    queue = change_log.subscribe()
    prompt = long_text(300)
    keys = router.keys(prompt)
    router.index.hold(PODS[0], keys[:-2])
    router.router.route(completion("a", prompt), 0.0)
    (changes,) = received(change_log, queue)
    assert changes.sent[0].keys.tolist() == keys[-2:].tolist()


def test_short_request_is_omitted() -> None:
    """A request that is dispatched and ends between two messages is not sent."""
    sender = Sender()
    queue = sender.change_log.subscribe()
    sender.ledger.dispatch(ONE, KEYS)
    sender.ledger.first_token("r1", 0.0)
    sender.ledger.end("r1", 0.0)
    assert received(sender.change_log, queue) == []


def test_nothing_is_recorded_without_followers() -> None:
    """The ledger has no listener before the first follower joins and after the last one leaves."""
    sender = Sender()
    assert sender.ledger.changes is None
    queues = [sender.change_log.subscribe(), sender.change_log.subscribe()]
    assert sender.ledger.changes == sender.change_log.record
    for queue in queues:
        sender.change_log.unsubscribe(queue)
    assert sender.ledger.changes is None


def test_slow_follower_is_disconnected() -> None:
    """A follower with too many queued bytes is disconnected with a reason; others are not affected."""
    sender = Sender()
    change_log = ChangeLog(sender.ledger, lambda: 0.0, queue_bytes_max=1_000)
    slow, quick = change_log.subscribe(), change_log.subscribe()
    for number in range(20):
        sender.ledger.dispatch(replace(ONE, request_id=str(number)), KEYS)
        assert len(received(change_log, quick)) == 1
    with pytest.raises(PeerError, match=r"^behind: "):
        slow.get(0.0)


def test_too_many_unsent_changes_disconnect_all_followers() -> None:
    """When too many changes are unsent, all followers are disconnected; a new one receives everything."""
    sender = Sender()
    change_log = ChangeLog(sender.ledger, lambda: 0.0, changes_max=10)
    queue = change_log.subscribe()
    for number in range(20):
        sender.ledger.dispatch(replace(ONE, request_id=str(number)), KEYS)
    change_log.flush()
    with pytest.raises(PeerError, match=r"^behind: "):
        queue.get(0.0)
    (changes,) = received(change_log, change_log.subscribe())
    assert len(changes.sent) == 20


def test_number_of_followers_is_limited() -> None:
    """A follower beyond the limit is rejected as "busy", and accepted once another has left."""
    sender = Sender()
    queues = [sender.change_log.subscribe() for _ in range(64)]
    with pytest.raises(PeerError, match=r"^busy: "):
        sender.change_log.subscribe()
    sender.change_log.unsubscribe(queues[0])
    sender.change_log.subscribe()


def test_peer_with_too_many_requests_is_rejected() -> None:
    """A peer that sends more than `REQUESTS_MAX` requests in flight is rejected as "broken"."""
    follower = Follower()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "REQUESTS_MAX", 3)
        follower.remote.apply(
            PEER, LedgerChanges(sent=[replace(SENT, number=number) for number in range(3)]), 0.0
        )
        with pytest.raises(PeerError, match=r"^broken: "):
            follower.remote.apply(PEER, LedgerChanges(sent=[replace(SENT, number=4)]), 0.0)
    assert follower.remote.drop(PEER, 0.0) == 3


def test_unknown_numbers_are_ignored() -> None:
    """Changes of numbers that a peer has not sent are ignored, even if another peer uses them."""
    follower = Follower(bench())
    follower.remote.apply(PEER, LedgerChanges(sent=[SENT]), 0.0)
    follower.remote.apply("other", LedgerChanges(overdue=[1], prefilled=[1], ended=[1, 2]), 0.0)
    assert follower.load_table.work(PODS[0]).awaiting == 1


def test_unknown_pod_gets_load_but_no_blocks() -> None:
    """A remote request to a pod that this router does not know yet counts as load, without blocks."""
    follower = Follower(bench(1))
    follower.remote.apply(PEER, LedgerChanges(sent=[replace(SENT, pod=PODS[2])]), 0.0)
    assert (follower.load_table.work(PODS[2]).awaiting, follower.index.speculative) == (1, {})


def test_report_is_forwarded_to_the_requests_router() -> None:
    """A report on a request that is not this router's is forwarded and applied by the router that has it."""
    ours, theirs = bench(1), bench(1)
    change_log = ChangeLog(ours.ledger, lambda: 0.0)
    ours.lifecycle.forward_to(change_log.forward, set().__contains__)
    queue = change_log.subscribe()
    decision = theirs.router.route(completion("x", long_text(50)), 0.0)
    ours.lifecycle.first_token("x", REPORT, 1.0, pod=PODS[0])
    ended(ours.lifecycle, "x", REPORT, 2.0, pod=PODS[0], cached_tokens=7)
    (changes,) = received(change_log, queue)
    assert changes.reports == [
        RequestReport("x", FIRST_TOKEN, REPORT, PODS[0]),
        RequestReport("x", DONE, REPORT, PODS[0], None, 7),
    ]
    theirs.lifecycle.peer_reported(changes.reports[0], 1.0)
    assert theirs.ledger.prefill_ended_s("x") == 1.0
    theirs.lifecycle.peer_reported(changes.reports[1], 2.0)
    assert "x" not in theirs.ledger
    assert theirs.sample("kvroute_router_request_ends_total", source=REPORT, outcome="done") == 1
    assert theirs.decision_log.find(decision.request_id)["delivered_cached_tokens"] == 7


def test_forwarded_report_is_not_forwarded_again() -> None:
    """A router does not forward reports that it has received from other routers."""
    ours = bench(1)
    change_log = ChangeLog(ours.ledger, lambda: 0.0)
    ours.lifecycle.forward_to(change_log.forward, set().__contains__)
    queue = change_log.subscribe()
    ours.lifecycle.peer_reported(RequestReport("x", DONE, REPORT), 0.0)
    ours.lifecycle.peer_reported(RequestReport("x", FIRST_TOKEN, REPORT), 0.0)
    assert received(change_log, queue) == []


def test_report_on_another_routers_pick_is_ignored() -> None:
    """If two routers picked for one id, a report that names the other router's pod is ignored."""
    ours = bench(1)
    ours.lifecycle.forward_to(ChangeLog(ours.ledger).forward, {"x"}.__contains__)
    ours.router.route(completion("x", long_text(50)), 0.0)
    ours.lifecycle.peer_reported(RequestReport("x", DONE, REPORT, PODS[1]), 0.0)
    assert "x" in ours.ledger
    ours.lifecycle.peer_reported(RequestReport("x", DONE, REPORT, PODS[0]), 0.0)
    assert "x" not in ours.ledger


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["dispatch", "shared", "first", "end", "stored", "expire", "flush", "join", "lose"]),
        st.integers(0, 5),
        st.sampled_from(PODS),
        st.integers(0, 3000),
    ),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(steps=STEPS)
def test_followers_load_matches_the_senders(steps: list[tuple[Any, ...]]) -> None:
    """After any sequence of changes, joins and losses, an up-to-date follower has the sender's load."""
    sender, follower = Sender(capacity=6, per_id_max=2), Follower(bench())
    queue = None
    for number, (kind, who, pod, tokens) in enumerate(steps):
        sender.now_s = now_s = 0.3 * number
        dispatch = replace(ONE, request_id=f"r{who}", pod=pod, uncached_tokens=tokens, dispatched_s=now_s)
        match kind:
            case "dispatch":
                sender.ledger.dispatch(replace(dispatch, confirm_key=who), KEYS[who:])
            case "shared":
                sender.ledger.dispatch(replace(dispatch, confirm_key=None, prefill_pod=PODS[who % 3]), KEYS)
            case "first":
                sender.ledger.first_token(f"r{who}", now_s, pod)
            case "end":
                sender.ledger.end(f"r{who}", now_s, pod)
            case "stored":
                sender.ledger.stored(pod, np.array([who], np.uint64), now_s)
            case "expire":
                sender.ledger.expire(now_s)
            case "flush" if queue is not None:
                follower.follow(sender.change_log, queue, now_s)
            case "join" if queue is None:
                queue = sender.change_log.subscribe()
            case "lose" if queue is not None:
                sender.change_log.unsubscribe(queue)
                queue = None
                follower.remote.drop(PEER, now_s)
                assert not follower.index.speculative
    if queue is not None:
        follower.follow(sender.change_log, queue, sender.now_s)
        assert [follower.load_table.work(pod) for pod in PODS] == [
            sender.ledger.load_table.work(pod) for pod in PODS
        ]
        assert len(follower.remote) == len(sender.ledger)
    follower.remote.drop(PEER, sender.now_s)
    assert all(follower.load_table.work(pod).held_tokens == 0 for pod in PODS)
    assert (len(follower.remote), follower.index.speculative) == (0, {})


def test_failures_of_pods_are_shared() -> None:
    """A failure that one router sees costs the pod at others, until that router sees a success."""
    sender, receiver = bench(1), bench(1)
    sender.lifecycle.forward_to(
        lambda report: receiver.lifecycle.peer_reported(report, 1.0), lambda _request_id: False
    )
    sender.lifecycle.failures.failed(PODS[0], 0.0, 0.0)
    assert receiver.failure_s(ready_pod(PODS[0])) > 0.0
    sender.lifecycle.failures.succeeded(PODS[0], 0.5)
    assert receiver.failure_s(ready_pod(PODS[0])) == 0.0
