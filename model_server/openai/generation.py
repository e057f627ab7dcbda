"""Delivery of engine outputs to HTTP requests: one Generation per request, one text per choice.

The engine thread appends outputs to a deque and wakes the event loop once for all of them; detokenization
runs on the loop. Deltas are iterated, or written by the waking callback, which saves a task switch per token.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import msgspec

from model_server.engine.core import EngineCore
from model_server.errors import RequestError
from model_server.openai.metrics import ChoiceObserver, RequestMetrics
from model_server.openai.types import ApiError, GenerationBody, from_exception
from model_server.requests import ChosenToken, EngineCoreOutput, EngineCoreRequest
from tokenization import IncrementalDecoder, PromptTokenizer

ChoiceEnd = Literal["stop", "length"]


class Delta(msgspec.Struct, frozen=True, gc=False):
    """Increment of one choice's answer."""

    text: str  # may be empty
    finish_reason: ChoiceEnd | None  # set in the last delta
    stop_reason: str | int | None = None  # matched stop string or stop token id
    tokens: tuple[ChosenToken, ...] = ()  # with log probabilities, if requested
    token_ids: tuple[int, ...] = ()  # token ids, if requested


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return the concatenation of a choice's deltas."""
    last = deltas[-1]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return Delta(text, last.finish_reason, last.stop_reason, tokens, token_ids)


@dataclass(eq=False, repr=False)
class TextAssembler:
    """Detokenizer of one choice, which also applies stop strings."""

    tokenizer: PromptTokenizer
    fields: GenerationBody = field(default_factory=GenerationBody)  # of the request
    completion_tokens: int = 0  # tokens generated so far
    cached_tokens: int = 0  # prompt tokens found in the cache
    finished: bool = False  # whether the choice has ended

    def __post_init__(self) -> None:
        fields = self.fields
        skips_special = fields.skip_special_tokens is not False
        self._decoder = IncrementalDecoder(self.tokenizer, skip_special_tokens=skips_special)
        self._shows_stop = bool(fields.include_stop_str_in_output)
        self._stops = StopStrings(fields.stop_strings, show=self._shows_stop)
        self._min_tokens = fields.min_tokens or 0  # stop strings are ignored before this many tokens
        self._needs_details = bool(fields.stop_strings or fields.return_token_ids)

    def push(self, output: EngineCoreOutput) -> Delta:
        """Return the delta of one engine output, whose finish reason is not "abort" or "error"."""
        assert not self.finished
        assert output.finish_reason in (None, "stop", "length")
        self.cached_tokens = output.cached_tokens
        if not (self._needs_details or output.finish_reason or output.logprobs):  # fast path of most tokens
            self.completion_tokens += len(output.token_ids)
            return Delta("".join(map(self._decoder.push, output.token_ids)), None)
        counted_before = self.completion_tokens
        text, reason, stop_reason = self._assemble(output)
        self.finished = reason is not None
        counted = self.completion_tokens - counted_before
        tokens = tuple(islice(map(ChosenToken, output.token_ids, output.logprobs or ()), counted))
        token_ids = tuple(output.token_ids[:counted]) if self.fields.return_token_ids else ()
        return Delta(text, reason, stop_reason, tokens, token_ids)

    def _assemble(self, output: EngineCoreOutput) -> tuple[str, ChoiceEnd | None, str | int | None]:
        # The stop token counts as generated but is not shown.
        hides_last = output.finish_reason == "stop" and not self._shows_stop
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
        stop_reason = ended_by if ended_by in (self.fields.stop_token_ids or ()) else None
        assert output.finish_reason in ("stop", "length")
        return text + self._stops.release(), output.finish_reason, stop_reason

    def _show(self, text: str) -> str:
        return self._stops.push(text) if self.completion_tokens > self._min_tokens else text


@dataclass(slots=True, eq=False)
class StopStrings:
    """Search for the first of several stop strings in streamed text."""

    stops: tuple[str, ...]
    show: bool = False  # whether the text includes the stop string
    matched: str | None = None  # found stop string; the search has ended
    _held: str = ""

    def push(self, piece: str) -> str:
        """Add a piece of text; return the text that cannot be part of a stop string."""
        if not self.stops:
            return piece
        text = self._held + piece
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            # The stop string that ends first wins, independently of how the text is split into pieces.
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            return text[: at + len(self.matched)] if self.show else text[:at]
        held_from = self._first_open_match(text)
        self._held = text[held_from:]
        return text[:held_from]

    def release(self) -> str:
        """Return the held-back text at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_open_match(self, text: str) -> int:
        """Return the start of the longest tail that may begin a stop string, else the text's length."""
        first = max(0, len(text) - max(map(len, self.stops)) + 1)
        may_begin = (any(stop.startswith(text[at:]) for stop in self.stops) for at in range(first, len(text)))
        return next((at for at, may in enumerate(may_begin, first) if may), len(text))


@dataclass(eq=False, repr=False)
class AsyncEngine:
    """Bridge between the engine thread and the event loop.

    Pending outputs are bounded: no request generates more than its max_tokens.
    """

    engine: EngineCore
    loop: asyncio.AbstractEventLoop
    metrics: RequestMetrics

    def __post_init__(self) -> None:
        self._arrived: deque[EngineCoreOutput] = deque()
        self._wake_pending = False
        self._choices: dict[str, tuple[Generation, int]] = {}  # by request id

    def generate(
        self, requests: tuple[EngineCoreRequest, ...], texts: tuple[TextAssembler, ...], arrived_s: float
    ) -> "Generation":
        """Submit one engine request per choice; raises an ApiError, and runs none, if the engine rejects one.

        The caller closes the result.
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
        """End every generation with an error at server shutdown."""
        for generation, _ in list(self._choices.values()):
            generation.fail(ApiError(503, "the server is shutting down; send the request again"))

    def adapters_in_use(self) -> tuple[list[str], list[str]]:
        """Return names of adapters of running requests, and of requests without a first token."""
        running: set[str] = set()
        waiting: set[str] = set()
        for generation, index in self._choices.values():
            if (name := generation.requests[index].lora_name) is not None:
                (running if generation.observers[index].began else waiting).add(name)
        return sorted(running), sorted(waiting)

    def release(self, request_id: str, *, finished: bool) -> bool:
        """Remove a request, and abort it unless it has finished. Return False if it was removed before."""
        if self._choices.pop(request_id, None) is None:
            return False
        if not finished:
            self.engine.abort_request(request_id)
        return True

    def _on_output(self, output: EngineCoreOutput) -> None:
        self._arrived.append(output)
        if not self._wake_pending:
            self._wake_pending = True
            # The loop may have been closed during the engine's last step.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared before the deque is read, so that an output appended meanwhile is read now or wakes the loop
        # again.
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
    """All choices of one HTTP request, as an asynchronous iterator of [(choice index, delta)]."""

    engine: AsyncEngine
    requests: tuple[EngineCoreRequest, ...]  # one per choice, as are `texts` and `observers`
    texts: tuple[TextAssembler, ...]
    arrived_s: float
    # Called on the loop when outputs arrive while the iteration waits. Returns True if it has consumed the
    # result of `take`, and False to leave it to the iteration.
    pass_on: Callable[[], bool] | None = None
    _woken: asyncio.Future[None] | None = None
    _error: Exception | None = None

    def __post_init__(self) -> None:
        metrics, arrived_s = self.engine.metrics, self.arrived_s
        self.observers = [
            ChoiceObserver(metrics, arrived_s, len(request.prompt_token_ids)) for request in self.requests
        ]
        self.arrived: list[tuple[int, EngineCoreOutput]] = []  # (choice index, output)
        self._unfinished = len(self.texts)

    def wake(self) -> None:
        """Pass arrived outputs to `pass_on`, or wake the iteration; at the end, always wake it."""
        if self._woken is None or self._woken.done():
            return  # The iteration does not wait, and checks for outputs before it does.
        passed_on = False
        try:
            passed_on = self.pass_on is not None and self._error is None and self.pass_on()
        except Exception as error:  # raised in the request's own task, not in others
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
        """Abort unfinished requests. Idempotent."""
        self.pass_on = None
        for request in self.requests:
            if self.engine.release(request.request_id, finished=False):
                self.engine.metrics.success["abort"].inc()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        """Return all arrived deltas; raises the ApiError of a failed generation."""
        while True:
            if self._unfinished and (deltas := self.take()):
                return deltas
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                raise StopAsyncIteration
            self._woken = self.engine.loop.create_future()
            await self._woken

    def _push(self, index: int, output: EngineCoreOutput) -> Delta | None:
        text, observer = self.texts[index], self.observers[index]
        if text.finished:
            return None
        if output.finish_reason in ("abort", "error"):
            self.engine.release(output.request_id, finished=True)
            self.engine.metrics.success[output.finish_reason].inc()
            self._error = ApiError(500, f"the engine failed: {output.error or 'no reason given'}")
            if output.finish_reason == "abort":
                self._error = ApiError(503, "the server aborted the request; send it again")
            return None
        now_s = time.monotonic()
        if output.token_ids:
            observer.tokens(now_s, output.started_s)
        delta = text.push(output)
        if delta.finish_reason is not None:
            observer.finished(now_s, delta.finish_reason, text.completion_tokens)
            # After a stop string the engine request still runs and is aborted.
            self.engine.release(output.request_id, finished=output.finish_reason is not None)
            constraint = self.requests[index].constraint
            if constraint is not None and (reason := constraint.get_error().partition("\n")[0]):
                self._error = ApiError(500, f"the structured output failed: {reason}")
        return delta
