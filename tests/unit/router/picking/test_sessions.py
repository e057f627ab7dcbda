"""Session affinity: session ids, last pods, expiry and eviction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.feedback.outcomes import REPORT
from router.picking.candidates import SessionPods
from router.picking.decision import Decision
from router.prompts.request import session_of
from tests.support.router.bench import Bench, completion, ended, ready_pod

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
    """x-session-id precedes agents' headers; an empty or oversized id is ignored."""
    assert session_of(replace(completion("r", "x"), headers=headers)) == session


@pytest.mark.parametrize(
    ("key", "session"), [("k", "k"), ("", None), ("x" * 1_000_000, None), (7, None), (["k"], None)]
)
def test_openais_cache_key_is_a_session(key: object, session: str | None) -> None:
    """A prompt_cache_key is the session of a request without a session header; other types are ignored."""
    request = completion("r", "x", prompt_cache_key=key)
    assert session_of(request) == session
    assert session_of(replace(request, headers={"x-session-id": "s"})) == "s"


def test_a_session_expires_after_its_last_request() -> None:
    """The pod of a session is known until the TTL after its last request."""
    sessions = SessionPods(ttl_s=300.0)
    sessions.record("s", A.address, 10.0)
    assert sessions.pod_of("s", 310.0) == A.address
    assert sessions.pod_of("s", 310.1) is None


def test_the_least_recently_used_session_is_evicted() -> None:
    """At capacity a new session evicts the least recently used one."""
    sessions = SessionPods(capacity=2)
    for number, name in enumerate(["one", "two", "one", "three"]):
        sessions.record(name, A.address, float(number))
    assert [sessions.pod_of(name, 4.0) is not None for name in ("one", "two", "three")] == [True, False, True]


def test_a_session_has_one_pod_per_base_model() -> None:
    """A session that alternates between base models keeps one pod for each of them."""
    others = [ready_pod(f"10.0.1.{number}:8000", model="other") for number in (1, 2)]
    for seed in range(8):
        bench = Bench(seed=seed).with_pods(A, B, *others)
        pods: dict[str, set[str]] = {"m": set(), "other": set()}
        for number in range(6):
            for model, seen in pods.items():
                request = completion(f"{model}{number}", "x" * 40, model=model)
                decision = bench.router.route(replace(request, headers={"x-session-id": "s"}), float(number))
                ended(bench.lifecycle, decision.request_id, REPORT, number + 0.5)
                seen.add(decision.primary.pod)
        assert {model: len(seen) for model, seen in pods.items()} == {"m": 1, "other": 1}


@pytest.mark.parametrize(
    ("headers", "fields"), [({"x-session-id": "s"}, {}), ({}, {"prompt_cache_key": "s"})]
)
def test_a_session_only_decides_between_equal_costs(headers: dict[str, str], fields: dict[str, str]) -> None:
    """A session stays at its pod while no other pod has a lower cost."""
    for seed in range(8):
        bench = Bench(seed=seed).with_pods(A, B)

        def pick(number: int, bench: Bench = bench) -> Decision:
            request = completion(f"r{number}", "x" * 40, model="m", **fields)
            request = replace(request, headers=dict(headers))
            return bench.router.route(request, float(number))

        home = pick(0).primary.pod
        for number in range(1, 5):
            ended(bench.lifecycle, f"r{number - 1}", REPORT, float(number))
            decision = pick(number)
            assert decision.primary.pod == home
            assert decision.reason.startswith("by load alone")
        # The session's pod is busy now, the other one idle.
        assert pick(5).primary.pod != home
