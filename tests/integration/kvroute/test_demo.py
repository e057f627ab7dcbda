"""The demonstration on a running stack: what it reports is what the engines counted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from kvroute.demo.load import SMALL_LOAD
from kvroute.demo.report import KVROUTE, LEAST_REQUESTS, ROUND_ROBIN
from kvroute.demo.run import run_demo
from tests.support.kvroute.stack import RunningStack, running_stack


def test_computed_tokens_are_the_engines(tmp_path: Path) -> None:
    """The engines count the computed tokens that are reported of each policy; kvroute needs the least."""
    counted: list[float] = []
    with running_stack(tmp_path) as stack:
        load = replace(SMALL_LOAD, rounds=2)
        # The stack is checked after the requests of each policy.
        results = run_demo(stack.plan, lambda: counted.append(computed(stack)), lambda _line: None, load)
    halves = {
        policy: [
            sum(answer.prompt_tokens - answer.cached_tokens for answer in half)
            for half in (answers[: len(answers) // 2], answers[len(answers) // 2 :])
        ]
        for policy, answers in results.items()
    }
    # What was counted before the first check includes the warm-up.
    assert [after - before for before, after in pairwise(counted)] == [
        halves[ROUND_ROBIN][0],
        halves[LEAST_REQUESTS][0],
        halves[LEAST_REQUESTS][1],
        halves[ROUND_ROBIN][1],
        halves[KVROUTE][1],
    ]
    assert sum(halves[KVROUTE]) < min(sum(halves[ROUND_ROBIN]), sum(halves[LEAST_REQUESTS]))


def computed(stack: RunningStack) -> float:
    """Return the prompt tokens that all engines have computed."""
    return sum(
        stack.metric("vllm:prompt_tokens_total", url) - stack.metric("vllm:prompt_tokens_cached_total", url)
        for url in stack.plan.pod_urls.values()
    )
