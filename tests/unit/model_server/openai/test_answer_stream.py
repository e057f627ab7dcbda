"""model_server.openai.answers: a stream has the same bytes, iterated or written directly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from model_server.engine.core import OutputCallback
from model_server.openai.answers import Answer
from model_server.openai.generation import AsyncEngine, TextAssembler
from model_server.openai.metrics import RequestMetrics
from model_server.openai.prompts import Job
from model_server.openai.types import generation_body
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams
from tokenization import TINY_DIRECTORY, PromptTokenizer

TOKENIZER = PromptTokenizer.from_directory(TINY_DIRECTORY)
WORDS = ["one", " two", " three", "", " five", " six"]


class Hands:
    """Engine whose outputs the test provides."""

    def add_request(self, request: EngineCoreRequest, sink: OutputCallback) -> None:
        """Store the output callback."""
        self.sink = sink

    def abort_request(self, request_id: str) -> None:
        """Do nothing: no request runs."""

    def say(self, words: str, *, last: bool = False) -> None:
        """Deliver the tokens of one step."""
        ids = tuple(TOKENIZER.encode(words))
        self.sink(EngineCoreOutput("0", ids, "length" if last else None, 0))


class Page:
    """Connection that is writable or not."""

    def __init__(self) -> None:
        self.written = b""
        self.writable = True

    def write_chunk(self, chunk: bytes) -> None:
        """Record a chunk; only a writable connection may get one."""
        assert self.writable
        assert chunk
        self.written += chunk


def streamed(options: object, before: Callable[[Page, int], None] | None) -> tuple[bytes, bytes]:
    """Return the bytes of an answer's stream, and those of them that were written directly.

    Args:
        options: The request's stream options.
        before: Called before each word; None: everything is iterated.
    """

    async def scenario() -> tuple[bytes, bytes]:
        engine, page, said = Hands(), Page(), b""
        bridge = AsyncEngine(engine, asyncio.get_running_loop(), RequestMetrics("m", CollectorRegistry()))
        texts = (TextAssembler(TOKENIZER),)
        generation = bridge.generate((EngineCoreRequest("0", (1,), SamplingParams(99)),), texts, 0.0)
        fields = generation_body("chat", {"stream": True, "stream_options": options})
        answer = Answer(Job("chat", "id", "m", fields, ((1, 2),), (), ("",)), TOKENIZER, generation)
        if before is not None:
            answer.write_to(page)  # type: ignore[arg-type]

        async def read() -> None:
            nonlocal said
            async for piece in answer.pieces():
                said += page.written + piece
                page.written = b""

        reading = asyncio.create_task(read())
        direct = b""
        for at, word in enumerate(WORDS):
            for _ in range(4):  # until the answer waits for more
                await asyncio.sleep(0)
            direct += page.written
            said, page.written = said + page.written, b""
            if before is not None:
                before(page, at)
            engine.say(word, last=at == len(WORDS) - 1)
        await reading
        # Two answers may start in different seconds.
        return re.sub(rb'"created":\d+', b'"created":0', said), direct

    return asyncio.run(scenario())


def test_direct_writes_equal_iterated_bytes() -> None:
    """Iterated and direct streams have the same bytes, for writable and slow clients, and with usage."""
    for options in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        awaited, _ = streamed(options, None)
        assert awaited.endswith(b"data: [DONE]\n\n")

        def keeps_up(_: Page, __: int) -> None:
            pass

        def stalls(page: Page, at: int) -> None:
            page.writable = at % 3 == 0

        assert streamed(options, keeps_up)[0] == awaited
        assert streamed(options, stalls)[0] == awaited


def test_a_client_that_keeps_up_gets_its_tokens_without_a_task() -> None:
    """All but the last event is written directly; a slow connection gets none directly."""

    def never(page: Page, _: int) -> None:
        page.writable = False

    _, direct = streamed(None, lambda page, at: None)
    assert direct.count(b'"content":"') == 1 + sum(map(bool, WORDS[:-1]))
    assert streamed(None, never)[1] == b""
