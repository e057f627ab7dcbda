"""The engine's books hold under any order of submissions, aborts, failures, resets and steps."""

import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.engine_support import Outputs, checking_engine, next_token, request, run_to_end


@dataclass
class Submit:
    """A prompt made of a shared start, so that prefixes are hit, and an own end."""

    shared: int
    own: list[int] = field(default_factory=list)
    max_tokens: int = 4
    salt: str | None = None


SUBMIT = st.builds(
    Submit,
    shared=st.integers(0, 14),
    own=st.lists(st.integers(1, 3), max_size=6),
    max_tokens=st.integers(1, 30),
    salt=st.sampled_from([None, None, None, "salt"]),
)
STEPS = st.integers(1, 12)
RARE = st.one_of(st.tuples(st.just("abort"), st.integers(0, 20)), st.just("fail"), st.just("reset"))
ACTIONS = st.one_of(SUBMIT, STEPS, SUBMIT, STEPS, RARE)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(ACTIONS, min_size=15, max_size=50),
    gpu_blocks=st.integers(8, 20),
    budget=st.integers(4, 24),
    block_tokens=st.sampled_from([2, 3, 4]),
)
def test_books_hold_under_any_schedule(
    actions: list, gpu_blocks: int, budget: int, block_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """At any time blocks have their right owners, a counting mirror equals the pool, and tokens are right."""
    caplog.set_level(logging.CRITICAL + 1)
    engine, runner, events = checking_engine(
        gpu_blocks=gpu_blocks, max_num_batched_tokens=budget, block_tokens=block_tokens
    )
    outputs, prompts = Outputs(), {}
    for action in actions:
        if isinstance(action, Submit):
            name = f"r{len(prompts)}"
            prompt = [*range(1, action.shared + 1), *action.own, 9][-engine.max_model_len + 1 :]
            prompts[name] = prompt
            engine.submit(request(name, prompt, action.max_tokens, cache_salt=action.salt), outputs)
        elif isinstance(action, tuple):
            engine.abort(f"r{action[1]}")
        elif action == "fail":
            runner.fail_next = True
        elif action == "reset":
            engine.reset_prefix_cache()
        for _ in range(action if isinstance(action, int) else 0):
            engine.step()
            engine.check_invariants()
            assert events.mirror == engine._pool.cached_copies()
    run_to_end(engine)
    assert events.mirror == engine._pool.cached_copies()
    assert engine.stats().kv_usage == 0
    assert set(outputs.last) == set(prompts)
    for name, prompt in prompts.items():
        text = list(prompt)
        for token in outputs.tokens[name]:
            assert token == next_token(text)
            text.append(token)
