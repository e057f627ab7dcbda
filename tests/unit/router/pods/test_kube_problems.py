"""Discovery problems: what is detected, how long it must last, and how often it is reported."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from indexer import EngineFault, FaultKind, PodStream, StreamState
from indexer.streams.engine_registry import EngineState
from router.config.kube import KubeConfig
from router.errors import ClusterError
from router.pods.kube.problems import (
    DiscoveryState,
    Problems,
    Reason,
    Symptom,
    cluster_symptoms,
    pod_symptoms,
)
from router.pods.pod_set import EventSources, Pod
from router.pods.probe import ProbeResult
from router.pods.watch import judge
from tests.support.paths import ROOT
from tests.support.router.bench import ready_pod

CONFIG = KubeConfig(pool="p")
GOOD = DiscoveryState(pool_listed=True, pool=True, selector="app=x", pods_listed=True, pods=2, ready=1)
POD = ready_pod("10.0.0.1:8000")
ENGINE = EngineState(
    PodStream(POD.address, "m", "tcp://10.0.0.1:5557"), StreamState.EXACT, "", settled=True, linked=True
)
FOR_EVER_S = 1000.0
CACHING_OFF = EngineFault(FaultKind.CACHING_OFF, "prefix caching is off")
UNPROVEN = EngineFault(FaultKind.TIER_NOT_PROVEN, "no removals")


def found_after(
    lasts_s: float,
    found: DiscoveryState = GOOD,
    pod: Pod = POD,
    engines: tuple[EngineState, ...] = (ENGINE,),
    probed: tuple[str, ...] = (),
) -> dict[Reason, str]:
    """Return the problems after this state has lasted for so long."""
    problems = fresh()
    for now_s in (5.0, 5.0 + lasts_s):
        problems.update(
            [*cluster_symptoms(found, CONFIG, "ns"), *pod_symptoms([pod], engines, probed)], now_s
        )
    return {reason: problem.detail for reason, problem in problems.current.items()}


def fresh(posted: list[tuple[Reason, str]] | None = None) -> Problems:
    """Return an empty set of problems; `posted` collects the reported ones."""
    told = [] if posted is None else posted
    return Problems(CollectorRegistry(), lambda reason, text: told.append((reason, text)))


def test_a_healthy_pool_has_no_problem() -> None:
    """A pool with Ready pods that serve and publish has no problem."""
    assert found_after(FOR_EVER_S) == {}


@pytest.mark.parametrize(
    ("fields", "reason", "part"),
    [
        ({"pool": False}, Reason.POOL_NOT_FOUND, "InferencePool p"),
        ({"pool_problem": "spec: bad"}, Reason.BAD_POOL, "spec: bad"),
        ({"pods": 0, "ready": 0}, Reason.NO_PODS_MATCH, "app=x"),
        (
            {"ready": 0},
            Reason.PODS_NOT_READY,
            "none of the 2 pods of namespace ns that match app=x is Ready",
        ),
        ({"errors": {"pool": ClusterError(404, "gone")}}, Reason.CRD_MISSING, "CRD"),
        ({"errors": {"pods": ClusterError(404, "gone")}}, Reason.API_UNREACHABLE, "gone"),
        (
            {"errors": {"pods": ClusterError(400, "unable to parse")}},
            Reason.BAD_POOL,
            "invalid selector app=x",
        ),
        ({"errors": {"pods": ClusterError(0, "refused")}}, Reason.API_UNREACHABLE, "refused"),
        ({"errors": {"pods": ClusterError(403, "no")}}, Reason.FORBIDDEN, "no"),
        ({"errors": {"objectives": ClusterError(401, "who")}}, Reason.FORBIDDEN, "who"),
        ({"bad": {Reason.BAD_POD: {"a": "x"}}}, Reason.BAD_POD, "a: x"),
        ({"bad": {Reason.BAD_ANNOTATION: {"a": "x"}}}, Reason.BAD_ANNOTATION, "a: x"),
        ({"bad": {Reason.BAD_OBJECTIVE: {"a": "x"}}}, Reason.BAD_OBJECTIVE, "a: x"),
        ({"bad": {Reason.BAD_REWRITE: {"": "x"}}}, Reason.BAD_REWRITE, "x"),
    ],
)
def test_each_mistake_has_one_reason(fields: dict[str, Any], reason: Reason, part: str) -> None:
    """Each mistake in the cluster is one problem whose text says what is wrong."""
    problems = found_after(FOR_EVER_S, replace(GOOD, **fields))
    assert list(problems) == [reason]
    assert part in problems[reason]


@pytest.mark.parametrize(
    ("pod", "engines", "reason"),
    [
        (replace(POD, ready=False, refused=True), (), Reason.WRONG_TARGET_PORT),
        (replace(POD, ready=False, refused=True, unreachable=True), (), Reason.WRONG_TARGET_PORT),
        (replace(POD, ready=False, unreachable=True), (), Reason.POD_UNREACHABLE),
        (replace(POD, ready=False, stalled=True, why="stalled: "), (), Reason.POD_STALLED),
        (POD, (), Reason.ENGINE_WITHOUT_EVENTS),
        (replace(POD, models=None), (), Reason.ENGINE_WITHOUT_EVENTS),
        (POD, (replace(ENGINE, linked=False),), Reason.ENGINE_WITHOUT_EVENTS),
        (POD, (ENGINE, replace(ENGINE, stream_state=StreamState.STALE)), Reason.ENGINE_WITHOUT_EVENTS),
        (replace(POD, sources=EventSources(reported=True, off=True)), (), Reason.ENGINE_WITHOUT_EVENTS),
        (replace(POD, reloaded=frozenset({"tuned"})), (ENGINE,), Reason.ADAPTER_RELOADED),
        (replace(POD, faults=(CACHING_OFF,)), (ENGINE,), Reason.ENGINE_WITHOUT_CACHE),
        (
            replace(POD, faults=(UNPROVEN,)),
            (replace(ENGINE, invalid_reasons={"tiers": UNPROVEN.kind}),),
            Reason.TIER_NOT_PROVEN,
        ),
    ],
)
def test_each_mistake_of_a_pod_has_one_reason(
    pod: Pod, engines: tuple[EngineState, ...], reason: Reason
) -> None:
    """Each mistake of a pod is one problem that names the pod, once it lasts."""
    problems = found_after(FOR_EVER_S, GOOD, pod, engines)
    assert list(problems) == [reason]
    assert POD.name in problems[reason]


def test_a_refused_port_that_a_probe_reaches_is_not_a_wrong_port() -> None:
    """If the readiness probe reaches a port that refuses the router, the problem is PodUnreachable."""
    refusing = replace(POD, ready=False, refused=True)
    problems = found_after(FOR_EVER_S, GOOD, refusing, (), probed=(POD.address,))
    assert list(problems) == [Reason.POD_UNREACHABLE]
    assert "NetworkPolicy" in problems[Reason.POD_UNREACHABLE]
    others = found_after(FOR_EVER_S, GOOD, refusing, (), probed=("10.0.0.9:8000",))
    assert list(others) == [Reason.WRONG_TARGET_PORT]


def test_alternating_drops_and_refusals_are_one_problem() -> None:
    """Connection timeouts between refusals do not interrupt the problem."""
    problems, pod = fresh(), replace(POD, entry=replace(POD.entry, ready=True))
    dropped = ProbeResult(POD.address, False, timed_out=True, unreachable=True)
    refused = ProbeResult(POD.address, False, refused=True)
    seen = []
    for second in range(40):
        pod = judge(pod, refused if second % 4 == 0 else dropped)
        problems.update(pod_symptoms([pod], ()), float(second))
        seen.append(set(problems.current))
    assert seen[:3] == [set()] * 3
    assert seen[3:] == [{Reason.WRONG_TARGET_PORT}] * 37
    pod = judge(pod, ProbeResult(POD.address, True))
    problems.update(pod_symptoms([pod], (ENGINE,)), 40.0)
    assert problems.current == {}


@pytest.mark.parametrize(
    ("found", "pod", "engines"),
    [
        (replace(GOOD, pods=0, ready=0), POD, (ENGINE,)),
        (replace(GOOD, ready=0), POD, (ENGINE,)),
        (replace(GOOD, errors={"pods": ClusterError(503, "starting")}), POD, (ENGINE,)),
        (GOOD, replace(POD, ready=False, refused=True), ()),
        (GOOD, replace(POD, ready=False, unreachable=True), ()),
        (GOOD, POD, (replace(ENGINE, linked=False),)),
        (GOOD, POD, (replace(ENGINE, stream_state=StreamState.RECOVERING),)),
    ],
)
def test_a_short_state_is_no_problem(
    found: DiscoveryState, pod: Pod, engines: tuple[EngineState, ...]
) -> None:
    """A state that is normal during a rollout or restart is no problem at once."""
    assert found_after(1.0, found, pod, engines) == {}


def test_an_interruption_restarts_the_duration() -> None:
    """A symptom that disappears for a moment must last for the full duration again."""
    problems, bad = fresh(), Symptom(Reason.NO_PODS_MATCH, "", "none", 5.0)
    for now_s, facts in ((0.0, [bad]), (4.0, [bad]), (4.5, []), (5.0, [bad]), (9.0, [bad])):
        problems.update(facts, now_s)
        assert problems.current == {}
    problems.update([bad], 11.0)
    assert list(problems.current) == [Reason.NO_PODS_MATCH]


def test_a_few_of_many_pods_are_named() -> None:
    """The text of a problem names three pods and counts the others."""
    many = {f"pod-{number:03}": "x" for number in range(500)}
    text = found_after(0.0, replace(GOOD, bad={Reason.BAD_ANNOTATION: many}))[Reason.BAD_ANNOTATION]
    assert text == "pod-000: x; pod-001: x; pod-002: x; and 497 more"


def gauge(registry: CollectorRegistry, reason: Reason) -> float | None:
    """Return the metric of a reason."""
    return registry.get_sample_value("kvroute_discovery_problem", {"reason": reason})


def test_a_problem_is_reported_once_per_text(caplog: pytest.LogCaptureFixture) -> None:
    """A problem gives one log line and one Event, and again when its text changes."""
    caplog.set_level(logging.INFO)
    registry, posted = CollectorRegistry(), []
    problems = Problems(registry, lambda reason, text: posted.append((reason, text)))
    assert {gauge(registry, reason) for reason in Reason} == {0.0}
    for now_s in range(100):
        problems.update([Symptom(Reason.FORBIDDEN, "", "a")], float(now_s))
    assert (len(caplog.records), gauge(registry, Reason.FORBIDDEN)) == (1, 1.0)
    problems.update([Symptom(Reason.FORBIDDEN, "", "b")], 100.0)
    # A further change within 30 s is delayed.
    problems.update([Symptom(Reason.FORBIDDEN, "", "c")], 101.0)
    assert posted == [(Reason.FORBIDDEN, "a"), (Reason.FORBIDDEN, "b")]
    problems.update([Symptom(Reason.FORBIDDEN, "", "c")], 131.0)
    problems.update([], 132.0)
    assert posted[2:] == [(Reason.FORBIDDEN, "c"), (Reason.FORBIDDEN, "")]
    assert gauge(registry, Reason.FORBIDDEN) == 0.0
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "WARNING", "INFO"]


def test_an_unreachable_server_keeps_its_first_text(caplog: pytest.LogCaptureFixture) -> None:
    """Different errors of further attempts to reach the API server are not reported."""
    problems = fresh()
    for number in range(10):
        problems.update([Symptom(Reason.API_UNREACHABLE, "", f"attempt {number}")], 100.0 * number)
    assert [record.getMessage() for record in caplog.records] == [
        "discovery problem: reason=ApiUnreachable detail=attempt 0"
    ]


def test_every_reason_is_documented() -> None:
    """docs/operations.md has a row for each reason."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert [reason for reason in Reason if f"\n| {reason} | " not in page] == []


def test_the_event_of_a_lasting_problem_is_repeated() -> None:
    """An Event is posted again before Kubernetes expires it."""
    posted: list[tuple[Reason, str]] = []
    problems = fresh(posted)
    for minute in range(120):
        problems.update([Symptom(Reason.FORBIDDEN, "", "a")], 60.0 * minute)
    assert posted == [(Reason.FORBIDDEN, "a")] * 4
