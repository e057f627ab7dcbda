"""Generations between the engine's thread and the event loop, with a scripted engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from model_server.errors import EngineClosedError, QueueFullError, RequestError
from model_server.openai.generation import AsyncEngine, Generation, TextAssembler
from model_server.openai.metrics import RequestMetrics
from model_server.openai.types import ApiError, GenerationBody
from model_server.requests import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams
from tokenization import TINY_DIRECTORY, PromptTokenizer

TOKENIZER = PromptTokenizer.from_directory(TINY_DIRECTORY)


class ScriptedEngine:
    """Engine stub that records requests; the test supplies the outputs."""

    def __init__(self, refuse_at: int | None = None, error: RequestError | None = None) -> None:
        self.sinks: dict[str, Callable[[EngineCoreOutput], None]] = {}
        self.aborted: list[str] = []
        self._refuse_at, self._error = refuse_at, error

    def add_request(self, request: EngineCoreRequest, sink: Callable[[EngineCoreOutput], None]) -> None:
        """Record a request, or reject the n-th."""
        if self._error is not None and len(self.sinks) == self._refuse_at:
            raise self._error
        self.sinks[request.request_id] = sink

    def abort_request(self, request_id: str) -> None:
        """Record the abort."""
        self.aborted.append(request_id)

    def tell(
        self, request_id: str, text: str, reason: FinishReason | None = None, error: str | None = None
    ) -> None:
        """Deliver tokens from another thread, as the engine does."""
        ids = tuple(TOKENIZER.encode(text))
        output = EngineCoreOutput(request_id, ids, reason, 16, error)
        thread = threading.Thread(target=self.sinks[request_id], args=(output,))
        thread.start()
        thread.join()


def generation(engine: ScriptedEngine, choices: int = 1, stop: tuple[str, ...] = ()) -> Generation:
    """Start requests named "0", "1", ..."""
    metrics = RequestMetrics("m", CollectorRegistry())
    bridge = AsyncEngine(engine, asyncio.get_running_loop(), metrics)
    requests = tuple(EngineCoreRequest(str(at), (1,), SamplingParams(9)) for at in range(choices))
    texts = tuple(TextAssembler(TOKENIZER, GenerationBody(stop=list(stop))) for _ in requests)
    return bridge.generate(requests, texts, time.monotonic())


async def collect(generation: Generation) -> dict[int, str]:
    """Return the text of each choice."""
    texts: dict[int, str] = {}
    async for deltas in generation:
        for index, delta in deltas:
            texts[index] = texts.get(index, "") + delta.text
    return texts


def test_choices_keep_their_texts_apart() -> None:
    """Outputs of several requests in any order reach their own choice."""

    async def scenario() -> dict[int, str]:
        engine = ScriptedEngine()
        running = generation(engine, choices=2)
        engine.tell("1", "one")
        engine.tell("0", "zero")
        engine.tell("1", " more", "length")
        engine.tell("0", "", "length")
        texts = await collect(running)
        running.close()
        assert engine.aborted == []
        assert [text.cached_tokens for text in running.texts] == [16, 16]
        return texts

    assert asyncio.run(scenario()) == {0: "zero", 1: "one more"}


def test_a_stop_string_aborts_the_engines_request() -> None:
    """A stop string aborts the engine's request; later outputs are ignored."""

    async def scenario() -> dict[int, str]:
        engine = ScriptedEngine()
        running = generation(engine, stop=(" two",))
        engine.tell("0", "one two three")
        engine.tell("0", " four")
        texts = await collect(running)
        assert engine.aborted == ["0"]
        running.close()
        assert engine.aborted == ["0"]
        return texts

    assert asyncio.run(scenario()) == {0: "one"}


def test_closing_aborts_what_still_runs() -> None:
    """Closing a generation aborts its unfinished requests once."""

    async def scenario() -> list[str]:
        engine = ScriptedEngine()
        running = generation(engine, choices=3)
        engine.tell("1", "done", "length")
        await anext(aiter(running))
        running.close()
        running.close()
        return engine.aborted

    assert asyncio.run(scenario()) == ["0", "2"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFullError("full"), 503),
        (EngineClosedError("closed"), 503),
        (RequestError("wrong", "prompt"), 400),
    ],
)
def test_rejected_choice_aborts_the_accepted_ones(error: RequestError, status: int) -> None:
    """If the engine rejects one of several requests, the accepted ones are aborted."""

    async def scenario() -> list[str]:
        engine = ScriptedEngine(refuse_at=2, error=error)
        with pytest.raises(ApiError) as caught:
            generation(engine, choices=3)
        assert (caught.value.status, caught.value.param) == (status, error.param)
        return engine.aborted

    assert {"0", "1"} <= set(asyncio.run(scenario()))


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_the_engines_failure_ends_the_iteration(reason: FinishReason, status: int) -> None:
    """Text before a failure is delivered, then the failure is raised."""

    async def scenario() -> None:
        engine = ScriptedEngine()
        running = generation(engine, choices=2)
        engine.tell("0", "some")
        engine.tell("1", "", reason, "out of memory")
        deltas = aiter(running)
        assert [(index, delta.text) for index, delta in await anext(deltas)] == [(0, "some")]
        with pytest.raises(ApiError) as caught:
            await anext(deltas)
        assert caught.value.status == status
        running.close()
        assert engine.aborted == ["0"]

    asyncio.run(scenario())


def test_diverted_tokens_do_not_wake_the_iteration() -> None:
    """Diverted tokens are written in order without waking the iteration, which receives only the end."""

    async def scenario() -> tuple[list[str], dict[int, str]]:
        engine = ScriptedEngine()
        running = generation(engine, stop=("five",))
        passed: list[str] = []

        def pass_on() -> bool:
            passed.extend(delta.text for _, delta in running.take())
            return True

        running.pass_on = pass_on
        engine.tell("0", "one")
        iterated = asyncio.create_task(collect(running))
        while not running.texts[0].completion_tokens:
            await asyncio.sleep(0)
        for word in (" two", " three", " four five six"):
            engine.tell("0", word)
            await asyncio.sleep(0)
        assert engine.aborted == ["0"]
        return passed, await iterated

    assert asyncio.run(scenario()) == ([" two", " three", " four "], {0: "one"})


def test_tokens_rejected_by_the_diversion_are_iterated() -> None:
    """While the diversion rejects tokens, the iteration receives all of them once, in order."""

    async def scenario() -> tuple[str, dict[int, str]]:
        engine = ScriptedEngine()
        running = generation(engine)
        passed: list[str] = []
        takes = True

        def pass_on() -> bool:
            if takes:
                passed.extend(delta.text for _, delta in running.take())
            return takes

        running.pass_on = pass_on
        iterated = asyncio.create_task(collect(running))
        await asyncio.sleep(0)
        for willing, word in ((True, "a"), (False, "b"), (False, "c"), (True, "d")):
            takes = willing
            engine.tell("0", word)
            for _ in range(3):  # the loop's callback, the iteration's step, its next wait
                await asyncio.sleep(0)
        engine.tell("0", "", "length")
        texts = await iterated
        return "".join(passed), texts

    assert asyncio.run(scenario()) == ("ad", {0: "bc"})


def test_a_broken_diversion_ends_its_own_request_alone() -> None:
    """An error in a diversion is raised by its own iteration; other requests continue."""

    async def scenario() -> None:
        engine = ScriptedEngine()
        metrics = RequestMetrics("m", CollectorRegistry())
        bridge = AsyncEngine(engine, asyncio.get_running_loop(), metrics)
        bad, good = (
            bridge.generate(
                (EngineCoreRequest(name, (1,), SamplingParams(9)),),
                (TextAssembler(TOKENIZER),),
                time.monotonic(),
            )
            for name in ("bad", "good")
        )

        def pass_on() -> bool:
            raise ValueError("no bytes for this")

        bad.pass_on = pass_on
        ends = [asyncio.create_task(collect(running)) for running in (bad, good)]
        await asyncio.sleep(0)
        for name in ("bad", "good"):
            engine.tell(name, "text", "length")
        with pytest.raises(ValueError, match="no bytes"):
            await ends[0]
        assert await ends[1] == {0: "text"}

    asyncio.run(scenario())


def test_closed_generation_is_freed_by_reference_counting() -> None:
    """A closed generation is freed by reference counting, even if its consumer refers to it."""

    class Taker:
        def __init__(self, running: Generation) -> None:
            self.running = running
            running.pass_on = self.take

        def take(self) -> bool:
            return self.running.take() is not None

    async def scenario() -> weakref.ref[Generation]:
        running = generation(ScriptedEngine())
        Taker(running)
        running.close()
        return weakref.ref(running)

    collects = gc.isenabled()
    gc.disable()
    try:
        assert asyncio.run(scenario())() is None
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 503)])
def test_a_failure_ends_the_iteration_of_what_is_diverted(reason: FinishReason, status: int) -> None:
    """An engine failure is raised even if a diversion accepts all tokens."""

    async def scenario() -> int:
        engine = ScriptedEngine()
        running = generation(engine)
        running.pass_on = lambda: running.take() is not None
        iterated = asyncio.create_task(collect(running))
        await asyncio.sleep(0)
        engine.tell("0", "", reason, "out of memory")
        with pytest.raises(ApiError) as caught:
            await iterated
        return caught.value.status

    assert asyncio.run(scenario()) == status


def test_an_output_after_the_loops_end_is_no_error() -> None:
    """An output that arrives after the event loop has closed is ignored."""
    engine = ScriptedEngine()

    async def scenario() -> None:
        generation(engine)

    asyncio.run(scenario())
    engine.sinks["0"](EngineCoreOutput("0", (1,), None, 0))
