"""Stalled engines: queued requests and no progress while other pods of the model go on."""

from __future__ import annotations

from dataclasses import replace

from router.pods.engine_load import EngineLoad
from router.pods.pod_set import STALL_S, Pod, stall_checked
from tests.support.router.bench import ready_pod

A, B = ready_pod("10.0.0.1:8000"), ready_pod("10.0.0.2:8000")


def load(now_s: float, tokens: float | None = 5.0, waiting: int = 3, kv_usage: float = 0.5) -> EngineLoad:
    """Return a load scraped at this time."""
    return EngineLoad(waiting, 0, kv_usage, 1000, now_s, tokens=tokens)


def probed(pod: Pod, *loads: EngineLoad, others: tuple[Pod, ...] = ()) -> Pod:
    """Return the pod after probes with these loads, while it is healthy."""
    for each in loads:
        pod = stall_checked(replace(pod, ready=True, silent=False, why="", load=each), (pod, *others))
    return pod


def going_on(pod: Pod = B, until_s: float = STALL_S) -> Pod:
    """Return a pod that computed tokens until this time."""
    return probed(pod, load(0.0), load(until_s, tokens=100.0))


def test_a_pod_without_a_token_is_out_while_others_go_on() -> None:
    """A pod whose requests wait without progress is not ready, with the reason, and back once tokens move."""
    stalled = probed(A, load(0.0), load(STALL_S), others=(going_on(),))
    assert (stalled.ready, stalled.stalled) == (False, True)
    assert stalled.why == f"stalled: requests wait, no token for {STALL_S:g} s"
    # Where no pod is ready, it is a candidate.
    assert stalled.silent
    still = probed(stalled, load(10 * STALL_S))
    assert (still.ready, still.stalled) == (False, True)
    for moved in (load(11 * STALL_S, tokens=6.0), load(11 * STALL_S, waiting=0)):
        assert probed(still, moved).ready


def test_a_pod_that_makes_progress_is_not_stalled() -> None:
    """Neither tokens, nor a prefill that fills the cache, nor an empty queue is a stall."""
    others = (going_on(),)
    for last in (load(STALL_S, tokens=6.0), load(STALL_S, kv_usage=0.6), load(STALL_S, waiting=0)):
        assert probed(A, load(0.0), last, others=others).ready
    assert probed(A, load(0.0), load(STALL_S - 1.0), others=others).ready


def test_a_pod_is_not_stalled_without_evidence() -> None:
    """No pod is stalled while no other of its model goes on, while it sleeps, or without counters."""
    twice = load(0.0), load(STALL_S)
    assert probed(A, *twice).ready
    assert probed(A, *twice, others=(going_on(until_s=-1.0),)).ready
    assert probed(A, *twice, others=(going_on(ready_pod("10.0.0.2:8000", model="other")),)).ready
    assert probed(A, *twice, others=(replace(going_on(), ready=False),)).ready
    assert probed(replace(A, asleep=True), *twice, others=(going_on(),)).ready
    assert probed(A, load(0.0, tokens=None), load(STALL_S, tokens=None), others=(going_on(),)).ready
