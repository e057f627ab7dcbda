"""The engine's outputs on the event loop: one Generation per HTTP request, one text per choice.

The engine thread only appends to a deque and wakes the loop once for all it has appended; decoding happens on
the loop. Deltas are iterated, or passed on by the callback that brings them, which saves a task's turn with
every token.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import msgspec

from model_server.engine.core import EngineCore
from model_server.errors import RequestError
from model_server.openai.metrics import ChoiceObserver, RequestMetrics
from model_server.openai.types import ApiError, from_exception
from model_server.requests import ChosenToken, EngineCoreOutput, EngineCoreRequest
from tokenization import IncrementalDecoder, PromptTokenizer

ChoiceEnd = Literal["stop", "length"]


class Delta(msgspec.Struct, frozen=True, gc=False):
    """News of one choice."""

    text: str  # may be empty while text is held back
    finish_reason: ChoiceEnd | None  # set on a choice's last delta
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it, if one did
    # The tokens that were counted, with their log probabilities, where these were asked for.
    tokens: tuple[ChosenToken, ...] = ()
    token_ids: tuple[int, ...] = ()  # ids of the tokens that were counted, where these were asked for


def joined(deltas: Sequence[Delta]) -> Delta:
    """All that one choice said, from its first delta to its last."""
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return Delta(text, last.finish_reason, last.stop_reason, tokens, token_ids)


@dataclass(eq=False, repr=False)
class TextAssembler:
    """Assembles one choice's text."""

    tokenizer: PromptTokenizer
    stop_strings: tuple[str, ...] = ()  # end the text at their first occurrence, however tokens split them
    # The request's own stop ids; the one that ended generation becomes the stop reason.
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # no stop string counts before this many tokens
    show_stop: bool = False  # whether the stop string or stop token that ended the text is kept in it
    skip_special_tokens: bool = True  # whether special tokens are left out of the text
    tells_ids: bool = False  # whether each delta has the ids of the counted tokens
    completion_tokens: int = 0  # tokens generated so far
    cached_tokens: int = 0  # prompt tokens that came from the cache
    finished: bool = False  # no more output is wanted

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer, skip_special_tokens=self.skip_special_tokens)
        self._stops = StopStrings(self.stop_strings, show=self.show_stop)
        self._takes_whole = bool(self.stop_strings) or self.tells_ids

    def push(self, output: EngineCoreOutput) -> Delta:
        """Take one output of the engine; its finish reason must not be "abort" or "error"."""
        assert not self.finished
        assert output.finish_reason in (None, "stop", "length")
        self.cached_tokens = output.cached_tokens
        if not (self._takes_whole or output.finish_reason or output.logprobs):  # as nearly every token
            self.completion_tokens += len(output.token_ids)
            return Delta("".join(map(self._decoder.push, output.token_ids)), None)
        counted_before = self.completion_tokens
        text, reason, stop_reason = self._take(output)
        self.finished = reason is not None
        counted = self.completion_tokens - counted_before
        tokens = tuple(islice(map(ChosenToken, output.token_ids, output.logprobs or ()), counted))
        token_ids = tuple(output.token_ids[:counted]) if self.tells_ids else ()
        return Delta(text, reason, stop_reason, tokens, token_ids)

    def _take(self, output: EngineCoreOutput) -> tuple[str, ChoiceEnd | None, str | int | None]:
        # The stop token itself counts as generated but is not shown.
        hides_last = output.finish_reason == "stop" and not self.show_stop
        shown = output.token_ids[:-1] if hides_last else output.token_ids
        text = ""
        for token_id in shown:
            self.completion_tokens += 1
            text += self._show(self._decoder.push(token_id))
            if self._stops.matched is not None:
                return text, "stop", self._stops.matched
        if output.finish_reason is None:
            return text, None, None
        self.completion_tokens += len(output.token_ids) - len(shown)
        text += self._show(self._decoder.flush())
        if self._stops.matched is not None:
            return text, "stop", self._stops.matched
        ended_by = output.token_ids[-1] if output.finish_reason == "stop" and output.token_ids else None
        stop_reason = ended_by if ended_by in self.stop_token_ids else None
        assert output.finish_reason in ("stop", "length")
        return text + self._stops.release(), output.finish_reason, stop_reason

    def _show(self, text: str) -> str:
        return self._stops.push(text) if self.completion_tokens > self.min_tokens else text


@dataclass(slots=True, eq=False)
class StopStrings:
    """Finds the first of several strings in a text that comes in pieces."""

    stops: tuple[str, ...]
    show: bool = False  # whether the string is kept in the text
    matched: str | None = None  # the string that was found; nothing may be pushed after it
    _held: str = ""

    def push(self, piece: str) -> str:
        """Take the next piece; returns what can no longer be part of a stop string."""
        if not self.stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            # The first to be complete wins: the answer must not depend on how the text was cut into pieces.
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[: at + len(self.matched)] if self.show else text[:at]
        held_from = self._first_open_match(text)
        self._held = text[held_from:]
        return text[:held_from]

    def release(self) -> str:
        """Return what is held back: no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_open_match(self, text: str) -> int:
        """Return where the longest tail begins that could become a stop string; else the end of the text."""
        longest = max(map(len, self.stops))
        for at in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[at:]
            if any(stop.startswith(tail) for stop in self.stops):
                return at
        return len(text)


@dataclass(eq=False, repr=False)
class AsyncEngine:
    """Carries outputs from the engine thread to the event loop.

    What waits here is bounded by what the engine may run: no request makes more than its max_tokens.
    """

    engine: EngineCore
    loop: asyncio.AbstractEventLoop
    metrics: RequestMetrics

    now_s = staticmethod(time.monotonic)

    def __post_init__(self) -> None:
        self._arrived: deque[EngineCoreOutput] = deque()
        self._wake_pending = False
        self._choices: dict[str, tuple[Generation, int]] = {}  # by request id

    def generate(
        self, requests: tuple[EngineCoreRequest, ...], texts: tuple[TextAssembler, ...], arrived_s: float
    ) -> "Generation":
        """Submit the requests of one HTTP request, one per choice; the caller closes the result.

        An ApiError where the engine did not take one of them; then none of them runs.
        """
        generation = Generation(self, requests, texts, arrived_s)
        try:
            for index, request in enumerate(requests):
                self._choices[request.request_id] = generation, index
                self.engine.add_request(request, self._on_output)
        except BaseException as error:
            generation.close()
            if isinstance(error, RequestError):
                raise from_exception(error) from error
            raise
        return generation

    def abort_all(self) -> None:
        """End every generation with an error, because the server is stopping."""
        for generation, _ in list(self._choices.values()):
            generation.fail(ApiError(503, "the server is shutting down; send the request again"))

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of requests that run, and of those that wait for their first token."""
        running: set[str] = set()
        waiting: set[str] = set()
        for generation, index in self._choices.values():
            if (name := generation.requests[index].lora_name) is not None:
                (running if generation.observers[index].began else waiting).add(name)
        return sorted(running), sorted(waiting)

    def release(self, request_id: str, *, finished: bool) -> bool:
        """Forget a request, aborting it unless it has finished; False if it was forgotten before."""
        if self._choices.pop(request_id, None) is None:
            return False
        if not finished:
            self.engine.abort_request(request_id)
        return True

    def _on_output(self, output: EngineCoreOutput) -> None:
        self._arrived.append(output)
        if not self._wake_pending:
            self._wake_pending = True
            # The loop may have closed while the engine was finishing its step.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared before the deque is emptied: an output appended meanwhile is either seen now or wakes again.
        self._wake_pending = False
        met: dict[Generation, None] = {}
        while self._arrived:
            output = self._arrived.popleft()
            generation, index = self._choices.get(output.request_id, (None, 0))
            if generation is not None:
                generation.arrived.append((index, output))
                met[generation] = None
        for generation in met:
            generation.wake()


@dataclass(eq=False, repr=False)
class Generation:
    """All choices of one HTTP request: iterate it for (choice index, delta) pairs; close aborts the rest."""

    engine: AsyncEngine
    requests: tuple[EngineCoreRequest, ...]  # one per choice, as are `texts` and `observers`
    texts: tuple[TextAssembler, ...]
    arrived_s: float
    # Called on the loop for what arrives while the iteration waits: it uses what `take` gives and returns
    # True, or takes nothing and returns False, so that the iteration goes on.
    pass_on: Callable[[], bool] | None = None
    _woken: asyncio.Future[None] | None = None
    _error: Exception | None = None

    def __post_init__(self) -> None:
        metrics, arrived_s = self.engine.metrics, self.arrived_s
        self.observers = [
            ChoiceObserver(metrics, arrived_s, len(request.prompt_token_ids)) for request in self.requests
        ]
        self.arrived: list[tuple[int, EngineCoreOutput]] = []  # with the choice's index; `wake` follows
        self._unfinished = len(self.texts)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, all choices together."""
        return sum(text.completion_tokens for text in self.texts)

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """Prompt tokens that came from the cache, per choice."""
        return tuple(text.cached_tokens for text in self.texts)

    def wake(self) -> None:
        """Have what arrived passed on, or wake the iteration for it; for its end in any case."""
        if self._woken is None or self._woken.done():
            return  # it is not waiting, and looks again before it does
        passed_on = False
        try:
            passed_on = self.pass_on is not None and self._error is None and self.pass_on()
        except Exception as error:  # told to the request's own task: other requests must not suffer from it
            self._error = error
        if not passed_on or self._error is not None or not self._unfinished:
            self._woken.set_result(None)

    def take(self) -> list[tuple[int, Delta]]:
        outputs, self.arrived = self.arrived, []
        deltas = []
        for index, output in outputs:
            delta = self._push(index, output)
            if delta is not None:
                deltas.append((index, delta))
                self._unfinished -= delta.finish_reason is not None
        return deltas

    def fail(self, error: ApiError) -> None:
        self._error = error
        self.wake()

    def close(self) -> None:
        """Abort what still runs, and let the diversion go. Idempotent."""
        self.pass_on = None
        for request, observer in zip(self.requests, self.observers, strict=True):
            if self.engine.release(request.request_id, finished=False):
                observer.broken("abort")

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        """Return what has arrived, all at once, until every choice has finished; or raise the ApiError."""
        while self._unfinished:
            if deltas := self.take():
                return deltas
            if self._error is not None:
                raise self._error
            self._woken = self.engine.loop.create_future()
            await self._woken
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def _push(self, index: int, output: EngineCoreOutput) -> Delta | None:
        text, observer = self.texts[index], self.observers[index]
        if text.finished:
            return None
        if output.finish_reason in ("abort", "error"):
            self.engine.release(output.request_id, finished=True)
            observer.broken(output.finish_reason)
            self._error = ApiError(500, f"the engine failed: {output.error or 'no reason given'}")
            if output.finish_reason == "abort":
                self._error = ApiError(503, "the server aborted the request; send it again")
            return None
        now_s = self.engine.now_s()
        if output.token_ids:
            observer.tokens(now_s, output.started_s)
        delta = text.push(output)
        if delta.finish_reason is not None:
            observer.finished(now_s, delta.finish_reason, text.completion_tokens)
            # A stop string ends the text here while the engine still runs.
            self.engine.release(output.request_id, finished=output.finish_reason is not None)
            constraint = self.requests[index].constraint
            if constraint is not None and constraint.error is not None:
                self._error = ApiError(500, f"the answer's shape could not be kept: {constraint.error}")
        return delta
