"""The engine with an asynchronous executor: a step's results are sent while the next step is computed."""

import logging
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from model_server.engine.core import EngineCore
from model_server.errors import EngineClosedError, RequestError, WorkerError
from model_server.kv_cache.request import ScheduledRequest
from model_server.kv_events.events import KVEvent
from model_server.requests import ChosenToken, EngineCoreOutput
from tests.integration.model_server.test_engine_invariants import SETTINGS, STEPS, SUBMIT, WINDOWS, Submit
from tests.integration.model_server.test_engine_thread import Waiter
from tests.support.depth import examples
from tests.support.model_server.engine import (
    CheckingRunner,
    Outputs,
    cached_copies,
    checking_engine,
    request,
    run_to_end,
)
from tests.support.model_server.http import wait_until
from tests.support.model_server.invariants import check_engine

RARE = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 20)), st.sampled_from(["fail", "fail launch", "reset"])
)
ACTIONS = st.one_of(SUBMIT, STEPS, SUBMIT, STEPS, RARE)


@pytest.fixture(autouse=True)
def _switch_interval() -> Iterator[None]:
    # An asynchronous engine changes it for its process.
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


class LoggedOutputs(Outputs):
    """Outputs that are appended to a runner's log, too, as "request token" or "request reason"."""

    def __init__(self, log: list[object]) -> None:
        super().__init__()
        self._log = log

    def __call__(self, output: EngineCoreOutput) -> None:
        """Record one output."""
        self._log.append(f"{output.request_id} {output.finish_reason or 'token'}")
        super().__call__(output)


def logged_engine(*, is_async: bool = True) -> tuple[EngineCore, CheckingRunner, LoggedOutputs]:
    """Return an engine, its runner, and outputs; the runner's log shows everything in order."""
    engine, runner, events = checking_engine(is_async=is_async)
    publish = events.publish

    def log_and_publish(batch: Sequence[KVEvent]) -> None:
        runner.log.append("events")
        publish(batch)

    events.publish = log_and_publish  # type: ignore[method-assign]
    return engine, runner, LoggedOutputs(runner.log)


def test_results_are_sent_while_the_next_step_is_computed() -> None:
    """Between launch and result the engine sends the events, then the outputs, of the step before."""
    engine, runner, outputs = logged_engine()
    engine.add_request(request("a", range(1, 7), max_tokens=3), outputs)
    run_to_end(engine)
    first = ["launch", "result"]
    second = ["launch", "events", "a token", "result"]
    third = ["launch", "a token", "result"]
    at_once = ["events", "a length"]
    assert runner.log == [*first, *second, *third, *at_once]


def test_a_synchronous_executor_sends_at_the_end_of_the_step() -> None:
    """Without a device to wait for, no event or output is later than the end of its step."""
    engine, runner, outputs = logged_engine(is_async=False)
    engine.add_request(request("a", range(1, 7), max_tokens=2), outputs)
    engine.step()
    assert runner.log == ["launch", "result", "events", "a token"]
    engine.step()
    assert runner.log[4:] == ["launch", "result", "a length"]


def test_an_abort_is_sent_after_the_token_before_it() -> None:
    """An abort between two steps does not overtake the token of the step before; nothing is held back."""
    engine, runner, outputs = logged_engine()
    engine.add_request(request("a", [1], max_tokens=9), outputs)
    engine.add_request(request("b", [2], max_tokens=9), outputs)
    engine.step()
    engine.abort_request("a")
    engine.step()
    assert runner.log == ["launch", "result", "launch", "a token", "b token", "a abort", "result"]
    engine.abort_request("b")
    assert not engine.step()
    assert runner.log[-2:] == ["b token", "b abort"]


def test_an_action_between_steps_sees_everything_sent() -> None:
    """Snapshots, resets and sleep run after all events and outputs of the steps before."""
    engine, runner, outputs = logged_engine()
    engine.add_request(request("a", range(1, 7), max_tokens=1), outputs)
    engine.step()
    engine.between_steps(lambda: runner.log.append("action"))
    assert runner.log == ["launch", "result", "events", "a length", "action"]
    engine.add_request(request("b", range(11, 17), max_tokens=1), outputs)
    engine.step()
    assert engine.sleep()
    assert runner.log[-3:] == ["events", "b length", "events"]
    engine.add_request(request("c", [1]), outputs)
    engine.abort_request("c")
    assert not engine.step()
    assert runner.log[-1] == "c abort"


@pytest.mark.parametrize("max_tokens", [2, 9])
def test_a_callback_that_raises_ends_its_request_and_no_other(
    max_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The token that is computed while a callback raises is dropped: the next output is the abort."""
    engine, runner, events = checking_engine(is_async=True, cpu_blocks=8)
    outputs, calls = Outputs(), []

    def broken(output: EngineCoreOutput) -> None:
        calls.append(output)
        raise ValueError("no one is listening")

    with caplog.at_level(logging.CRITICAL):
        engine.add_request(request("bad", range(1, 8), max_tokens), broken)
        engine.add_request(request("good", [4], max_tokens=9), outputs)
        engine.step()
        engine.step()
        assert [name for name, _, _ in runner.chunks[-1]] == ["bad", "good"]
        check_engine(engine)
        run_to_end(engine)
    assert [(len(call.token_ids), call.finish_reason) for call in calls] == [(1, None), (0, "abort")]
    assert len(outputs.tokens["good"]) == 9
    assert events.mirror == cached_copies(engine)
    assert engine.stats().kv_usage == 0


@pytest.mark.parametrize("failure", ["fail_launch", "fail_next"])
def test_a_failed_step_loses_nothing_of_the_one_before(
    failure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If launch or result fails, the step before is sent first; the failed one announces no block."""
    engine, runner, outputs = logged_engine()
    engine.add_request(request("a", range(1, 4), max_tokens=9), outputs)
    engine.step()
    setattr(runner, failure, True)
    with caplog.at_level(logging.CRITICAL):
        engine.step()
    run_to_end(engine)
    assert [entry for entry in runner.log if entry not in ("launch", "result")] == ["a token", "a error"]
    assert outputs.last["a"].error == "the model failed: out of luck"
    assert cached_copies(engine) == {}


def test_a_lost_device_loses_nothing_of_the_step_before(caplog: pytest.LogCaptureFixture) -> None:
    """When the engine ends in the middle of a step, the step before is sent before the requests' errors."""
    engine, runner, outputs = logged_engine()
    compute, answers = runner.execute_model, []

    def lost(chunks: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
        if len(runner.chunks) == 2:
            asking.start()
            wait_until(lambda: engine.stats().waiting == 1)
            raise WorkerError("the device failed")
        return compute(chunks)

    def ask() -> None:
        engine.add_request(request("late", [1]), outputs)
        answers.append(engine.reset_prefix_cache())

    asking = threading.Thread(target=ask)
    runner.execute_model = lost  # type: ignore[method-assign]
    engine.add_request(request("a", range(1, 7), max_tokens=9), outputs)
    with caplog.at_level(logging.CRITICAL + 1):
        engine.start()
        wait_until(lambda: "late" in outputs.last)
        engine.close()
    asking.join()
    sent = [entry for entry in runner.log if entry not in ("launch", "result")]
    assert sent == ["events", "a token", "a token", "a error", "late error"]
    assert answers == [False]
    assert not engine.stats().healthy


def test_close_with_a_step_in_flight_sends_its_tokens() -> None:
    """Close waits for the launched step; its tokens are sent before the requests' aborts."""
    engine, runner, outputs = logged_engine()
    compute = runner.execute_model
    closing = threading.Thread(target=engine.close)

    def is_closed() -> bool:
        try:
            engine.add_request(request("a", [1]), outputs)  # its id is in use
        except RequestError as error:
            return isinstance(error, EngineClosedError)
        return False

    def close_meanwhile(chunks: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
        if len(runner.chunks) == 1:
            closing.start()
            wait_until(is_closed)
        return compute(chunks)

    runner.execute_model = close_meanwhile  # type: ignore[method-assign]
    engine.add_request(request("a", [1, 2], max_tokens=9), outputs)
    engine.start()
    wait_until(lambda: "a" in outputs.last)
    closing.join()
    assert runner.log == ["launch", "result", "launch", "a token", "result", "a token", "a abort"]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_engines_thread_is_bound_to_the_device(is_async: bool) -> None:
    """The engine's thread makes the device current; with an asynchronous one it gets the GIL back sooner."""
    engine, runner, _ = checking_engine(is_async=is_async)
    before_s = sys.getswitchinterval()
    waiter = Waiter()
    engine.start()
    engine.add_request(request("a", [1], max_tokens=1), waiter)
    waiter.wait()
    engine.close()
    assert (sys.getswitchinterval() < before_s) == is_async
    assert runner.bound == ["engine"]


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    actions=st.lists(ACTIONS, min_size=15, max_size=50),
    chosen=SETTINGS,
    windows=WINDOWS,
    polls_per_copy=st.integers(0, 3),
)
def test_outputs_and_events_equal_those_of_a_synchronous_engine(
    actions: list,
    chosen: dict,
    windows: tuple[int | None, ...],
    polls_per_copy: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under any schedule with aborts and failures, both engines send the same batches and outputs."""
    caplog.set_level(logging.CRITICAL + 1)
    chosen = dict(chosen, gpu_blocks=chosen["gpu_blocks"] + 12 * (len(set(windows)) - 1))
    swap = chosen.pop("swap") and chosen["cpu_blocks"] > 0 and chosen["enable_prefix_caching"]
    mode = "swap" if swap else "recompute"
    sent = []
    for is_async in (False, True):
        engine, runner, events = checking_engine(
            windows, polls_per_copy, is_async, preemption_mode=mode, **chosen
        )
        outputs: list[EngineCoreOutput] = []
        names = play(engine, runner, actions, outputs.append)
        assert {output.request_id for output in outputs if output.finish_reason} == names
        assert events.mirror == cached_copies(engine)
        sent.append(([replace(output, started_s=None) for output in outputs], events.batches))
    assert sent[1] == sent[0]


def play(engine: EngineCore, runner: CheckingRunner, actions: list, on_output: object) -> set[str]:
    """Run actions on an engine, then run it to its end; return the names of the requests."""
    names: set[str] = set()
    for action in actions:
        if isinstance(action, Submit):
            prompt = [*range(1, action.shared + 1), *action.own, 9][-engine.max_model_len + 1 :]
            for _ in range(action.copies):
                names.add(f"r{len(names)}")
                fields = {"cache_salt": action.salt, "priority": action.priority}
                item = request(f"r{len(names) - 1}", prompt, action.max_tokens, **fields)
                engine.add_request(item, on_output)  # type: ignore[arg-type]
        elif isinstance(action, tuple):
            engine.abort_request(f"r{action[1]}")
        elif action == "fail":
            runner.fail_next = True
        elif action == "fail launch":
            runner.fail_launch = True
        elif action == "reset":
            engine.reset_prefix_cache()
        else:
            for _ in range(action):
                engine.step()
                check_engine(engine)
    run_to_end(engine)
    return names
