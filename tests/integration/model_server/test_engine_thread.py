"""The engine on its own thread: concurrent submissions, aborts, reset, loop failure, close."""

import logging
import threading
from collections.abc import Iterator

import pytest

from model_server.engine.core import EngineCore
from model_server.errors import EngineClosedError
from model_server.requests import EngineCoreOutput
from tests.support.model_server.engine import CheckingRunner, EventLog, checking_engine, next_token, request

DEADLINE_S = 300.0


class Waiter:
    """Output callback whose last output can be awaited."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: EngineCoreOutput | None = None
        self.first = threading.Event()
        self.done = threading.Event()

    def __call__(self, output: EngineCoreOutput) -> None:
        """Record one output."""
        self.tokens.extend(output.token_ids)
        self.first.set()
        if output.finish_reason is not None:
            self.last = output
            self.done.set()

    def wait(self) -> EngineCoreOutput:
        """Wait for the last output and return it."""
        assert self.done.wait(DEADLINE_S), "the request did not end"
        assert self.last is not None
        return self.last


@pytest.fixture
def threaded() -> Iterator[tuple[EngineCore, CheckingRunner, EventLog]]:
    """Yield an engine that runs on its own thread."""
    engine, runner, events = checking_engine(gpu_blocks=64, max_num_batched_tokens=32)
    engine.start()
    yield engine, runner, events
    engine.close()


def test_many_threads_submit_at_once(threaded: tuple[EngineCore, CheckingRunner, EventLog]) -> None:
    """Requests from many threads each get their own tokens."""
    engine, _, _ = threaded
    waiters = {index: Waiter() for index in range(24)}

    def submit(offset: int) -> None:
        for index in range(offset, 24, 4):
            engine.add_request(request(f"r{index}", [index + 1, 2, 3], max_tokens=5), waiters[index])

    threads = [threading.Thread(target=submit, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, waiter in waiters.items():
        assert waiter.wait().finish_reason == "length"
        text = [index + 1, 2, 3]
        for token in waiter.tokens:
            assert token == next_token(text)
            text.append(token)


def test_abort_from_another_thread_ends_a_running_request(
    threaded: tuple[EngineCore, CheckingRunner, EventLog],
) -> None:
    """An abort ends a long request soon and frees its blocks."""
    engine, _, _ = threaded
    waiter = Waiter()
    engine.add_request(request("a", [1, 2], max_tokens=250), waiter)
    assert waiter.first.wait(DEADLINE_S)
    engine.abort_request("a")
    assert waiter.wait().finish_reason in ("abort", "length")
    assert engine.reset_prefix_cache()


def test_reset_is_published_by_an_idle_engine(threaded: tuple[EngineCore, CheckingRunner, EventLog]) -> None:
    """reset_prefix_cache returns after the clear event is published, even without requests."""
    engine, _, events = threaded
    waiter = Waiter()
    engine.add_request(request("a", range(1, 9), max_tokens=1), waiter)
    waiter.wait()
    assert events.mirror
    assert engine.reset_prefix_cache()
    assert events.mirror == {}


def test_idle_loop_updates_its_heartbeat(threaded: tuple[EngineCore, CheckingRunner, EventLog]) -> None:
    """An idle loop updates its heartbeat, so that it differs from a stuck loop."""
    engine, _, _ = threaded
    before = engine.stats().last_step_monotonic_s
    waiter = Waiter()
    engine.add_request(request("a", [1], max_tokens=1), waiter)
    waiter.wait()
    assert engine.stats().last_step_monotonic_s > before
    assert engine.stats().healthy


def test_dead_loop_ends_all_requests_and_is_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    """An error outside the model ends all requests, clears health, and rejects new requests."""
    engine, _, _ = checking_engine()
    engine.executor.check_health = lambda: 1 / 0  # type: ignore[assignment, return-value, method-assign]
    waiter = Waiter()
    with caplog.at_level(logging.CRITICAL + 1):
        engine.add_request(request("a", [1]), waiter)
        engine.start()
        last = waiter.wait()
        with pytest.raises(EngineClosedError):
            engine.add_request(request("b", [1]), waiter)
        engine.close()
    assert (last.finish_reason, last.error) == ("error", "the engine failed")
    assert not engine.stats().healthy


def test_close_ends_running_requests() -> None:
    """Close returns after the thread has ended and every request has its last output."""
    engine, _, _ = checking_engine()
    engine.start()
    waiters = [Waiter() for _ in range(6)]
    for index, waiter in enumerate(waiters):
        engine.add_request(request(f"r{index}", [index + 1], max_tokens=60), waiter)
    engine.close()
    assert all(waiter.done.is_set() for waiter in waiters)
    assert all(thread.name != "engine" for thread in threading.enumerate())
