"""Block accounting under any sequence of submissions, aborts, failures, resets and steps."""

import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.depth import examples
from tests.support.model_server.engine import (
    Outputs,
    cached_copies,
    checking_engine,
    next_token,
    request,
    run_to_end,
)
from tests.support.model_server.invariants import check_engine


@dataclass
class Submit:
    """Submission of a prompt with a shared prefix and a suffix of its own."""

    shared: int
    own: list[int] = field(default_factory=list)
    max_tokens: int = 4
    salt: str | None = None
    priority: int = 0
    copies: int = 1


SUBMIT = st.builds(
    Submit,
    shared=st.integers(0, 14),
    own=st.lists(st.integers(1, 3), max_size=6),
    max_tokens=st.integers(1, 30),
    salt=st.sampled_from([None, None, None, "salt"]),
    priority=st.integers(0, 2),
    copies=st.sampled_from([1, 1, 1, 3]),
)
STEPS = st.integers(1, 12)
RARE = st.one_of(st.tuples(st.just("abort"), st.integers(0, 20)), st.just("fail"), st.just("reset"))
ACTIONS = st.one_of(SUBMIT, STEPS, SUBMIT, STEPS, RARE)


SETTINGS = st.fixed_dictionaries(
    {
        "gpu_blocks": st.integers(8, 20),
        "max_num_batched_tokens": st.integers(4, 24),
        "block_tokens": st.sampled_from([2, 3, 4]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "aged"]),
        "cpu_blocks": st.sampled_from([0, 3, 12, 40]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "swap": st.booleans(),
    }
)
# Full attention, one window, and both, each with its own block table.
WINDOWS = st.sampled_from([(None,), (5,), (5, None), (None, 3), (6, 6, None)])


# Swap into a host tier of three blocks: a block once evicted another block of its own request.
SWAPPED_APART = [
    *[Submit(shared=0, max_tokens=1) for _ in range(13)],
    Submit(shared=0, max_tokens=11, copies=3),
    Submit(shared=0, max_tokens=1),
]


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    actions=st.lists(ACTIONS, min_size=15, max_size=50),
    chosen=SETTINGS,
    windows=WINDOWS,
    polls_per_copy=st.integers(0, 3),
)
@example(
    actions=SWAPPED_APART,
    chosen={
        "gpu_blocks": 8,
        "max_num_batched_tokens": 4,
        "block_tokens": 2,
        "scheduling_policy": "fcfs",
        "cpu_blocks": 3,
        "enable_prefix_caching": True,
        "swap": True,
    },
    windows=(None,),
    polls_per_copy=0,
)
def test_block_accounting_holds_under_any_schedule(
    actions: list,
    chosen: dict,
    windows: tuple[int | None, ...],
    polls_per_copy: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After every step, block owners and counts, a subscriber's mirror, and all tokens are correct."""
    caplog.set_level(logging.CRITICAL + 1)
    chosen = dict(chosen, gpu_blocks=chosen["gpu_blocks"] + 12 * (len(set(windows)) - 1))
    swap = chosen.pop("swap") and chosen["cpu_blocks"] > 0 and chosen["enable_prefix_caching"]
    engine, runner, events = checking_engine(
        windows, polls_per_copy, preemption_mode="swap" if swap else "recompute", **chosen
    )
    outputs, prompts = Outputs(), {}
    for action in actions:
        if isinstance(action, Submit):
            prompt = [*range(1, action.shared + 1), *action.own, 9][-engine.max_model_len + 1 :]
            for _ in range(action.copies):
                name = f"r{len(prompts)}"
                prompts[name] = prompt
                fields = {"cache_salt": action.salt, "priority": action.priority}
                engine.add_request(request(name, prompt, action.max_tokens, **fields), outputs)
        elif isinstance(action, tuple):
            engine.abort_request(f"r{action[1]}")
        elif action == "fail":
            runner.fail_next = True
        elif action == "reset":
            engine.reset_prefix_cache()
        for _ in range(action if isinstance(action, int) else 0):
            engine.step()
            check_engine(engine)
            assert events.mirror == cached_copies(engine)
    run_to_end(engine)
    engine.reset_prefix_cache()
    assert events.mirror == cached_copies(engine) == {}
    assert engine.stats().kv_usage == engine.stats().host_usage == 0
    assert set(outputs.last) == set(prompts)
    for name, prompt in prompts.items():
        text = list(prompt)
        for token in outputs.tokens[name]:
            assert token == next_token(text)
            text.append(token)
