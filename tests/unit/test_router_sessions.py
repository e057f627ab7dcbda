"""Sessions: where ids come from, where they stay, and how they are forgotten."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.outcomes import REPORT
from router.sessions import SessionParameters, Sessions
from tests.unit.router_support import Bench, completion, ready_pod

A, B = ready_pod("10.0.0.1:8000", model="m"), ready_pod("10.0.0.2:8000", model="m")
BY_HEADER = SessionParameters(header="x-session-id", stay_s=1.0, ttl_s=300.0)


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({"x-session-id": "one"}, "one"),
        ({"cookie": 'theme=dark; sid="two"; sid2=no'}, "two"),
        ({"x-session-id": "one", "cookie": "sid=two"}, "one"),
        ({"cookie": "sid"}, None),
        ({"x-session-id": ""}, None),
        ({"x-session-id": "x" * 257}, None),
        ({}, None),
    ],
)
def test_a_sessions_id_comes_from_the_header_or_the_cookie(
    headers: dict[str, str], session: str | None
) -> None:
    """The header counts first; ids of no or senseless length are none."""
    sessions = Sessions(SessionParameters(header="x-session-id", cookie="sid"))
    assert sessions.id_of(headers) == session


def test_a_session_is_forgotten_when_it_is_not_heard_of() -> None:
    """Its pod is known for the TTL after the last request."""
    sessions = Sessions(BY_HEADER)
    sessions.moved("s", A.address, 10.0)
    assert sessions.pod_of("s", 310.0) == A.address
    assert sessions.pod_of("s", 310.1) is None


def test_the_longest_unheard_of_session_goes_first() -> None:
    """At capacity a new session takes the place of the one that was silent longest."""
    sessions = Sessions(SessionParameters(capacity=2))
    for number, name in enumerate(["one", "two", "one", "three"]):
        sessions.moved(name, A.address, float(number))
    assert [sessions.pod_of(name, 4.0) is not None for name in ("one", "two", "three")] == [True, False, True]


def test_a_session_stays_with_each_of_its_models() -> None:
    """A session that turns from one base model to another and back stays at its pod for each of them."""
    others = [ready_pod(f"10.0.1.{number}:8000", model="other") for number in (1, 2)]
    for seed in range(8):
        bench = Bench(seed=seed, sessions=Sessions(BY_HEADER)).with_pods(A, B, *others)
        pods: dict[str, set[str]] = {"m": set(), "other": set()}
        for number in range(6):
            for model, seen in pods.items():
                request = completion(f"{model}{number}", "x" * 40, model=model)
                decision = bench.router.route(replace(request, headers={"x-session-id": "s"}), float(number))
                bench.outcomes.ended(decision.request_id, REPORT, number + 0.5)
                seen.add(decision.primary.pod)
        assert {model: len(seen) for model, seen in pods.items()} == {"m": 1, "other": 1}


def test_a_session_changes_a_pick() -> None:
    """A session without known tokens stays at its pod, though the other is idle, until waiting costs more."""
    bench = Bench(sessions=Sessions(BY_HEADER)).with_pods(A, B)

    def pick(number: int, body_bytes: int, session: str) -> str:
        request = completion(f"{session}{number}", "x" * body_bytes, model="m")
        request = replace(request, headers={"x-session-id": session})
        return bench.router.route(request, 0.0).primary.pod

    home = pick(0, 4 * 6000, "s")
    assert [pick(number, 40, "s") for number in range(1, 5)] == [home] * 4
    pick(5, 4 * 60_000, "s")
    assert pick(6, 40, "s") != home
