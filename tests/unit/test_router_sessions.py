"""Sessions: where ids come from, where they stay, and how they are forgotten."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.feedback.lifecycle import REPORT
from router.picking.decision import Decision
from router.picking.sessions import Sessions, session_of
from tests.unit.router_support import Bench, completion, ready_pod

A, B = ready_pod("10.0.0.1:8000", model="m"), ready_pod("10.0.0.2:8000", model="m")


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-session-id": "one"}, "one"),
        ({"session-id": "two"}, "two"),
        ({"x-session-id": "one", "x-claude-code-session-id": "two"}, "one"),
        ({"x-session-id": ""}, None),
        ({"x-session-id": "x" * 257}, None),
        ({}, None),
    ],
)
def test_a_sessions_id_comes_from_its_header(headers: dict[str, str], session: str | None) -> None:
    """x-session-id counts first, then agents' own headers; ids of no or senseless length are none."""
    assert session_of(headers) == session


def test_a_session_is_forgotten_when_it_is_not_heard_of() -> None:
    """Its pod is known for the TTL after the last request."""
    sessions = Sessions(ttl_s=300.0)
    sessions.moved("s", A.address, 10.0)
    assert sessions.pod_of("s", 310.0) == A.address
    assert sessions.pod_of("s", 310.1) is None


def test_the_longest_unheard_of_session_goes_first() -> None:
    """At capacity a new session takes the place of the one that was silent longest."""
    sessions = Sessions(capacity=2)
    for number, name in enumerate(["one", "two", "one", "three"]):
        sessions.moved(name, A.address, float(number))
    assert [sessions.pod_of(name, 4.0) is not None for name in ("one", "two", "three")] == [True, False, True]


def test_a_session_stays_with_each_of_its_models() -> None:
    """A session that turns from one base model to another and back stays at its pod for each of them."""
    others = [ready_pod(f"10.0.1.{number}:8000", model="other") for number in (1, 2)]
    for seed in range(8):
        bench = Bench(seed=seed).with_pods(A, B, *others)
        pods: dict[str, set[str]] = {"m": set(), "other": set()}
        for number in range(6):
            for model, seen in pods.items():
                request = completion(f"{model}{number}", "x" * 40, model=model)
                decision = bench.router.route(replace(request, headers={"x-session-id": "s"}), float(number))
                bench.lifecycle.ended(decision.request_id, REPORT, number + 0.5)
                seen.add(decision.primary.pod)
        assert {model: len(seen) for model, seen in pods.items()} == {"m": 1, "other": 1}


def test_a_session_decides_among_equals_alone() -> None:
    """A session stays at its pod as long as no other pod is cheaper."""
    for seed in range(8):
        bench = Bench(seed=seed).with_pods(A, B)

        def pick(number: int, bench: Bench = bench) -> Decision:
            request = replace(completion(f"r{number}", "x" * 40, model="m"), headers={"x-session-id": "s"})
            return bench.router.route(request, float(number))

        home = pick(0).primary.pod
        for number in range(1, 5):
            bench.lifecycle.ended(f"r{number - 1}", REPORT, float(number))
            decision = pick(number)
            assert decision.primary.pod == home
            assert decision.reason.startswith("by load alone")
        # Its pod has work now, the other has none.
        assert pick(5).primary.pod != home
