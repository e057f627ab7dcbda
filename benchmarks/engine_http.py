"""CPU per streamed token in the HTTP server, without the model's arithmetic.

Measures CPU time of the event loop's thread per token, with clients in another process. In turns with it run
two floors with constant chunks: uvicorn, and a bare event loop that is woken and writes. Steps are paced, so
that each token is decoded, encoded and written by itself with cold caches, as behind a real model. Costs per
request are excluded.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import uvloop

from benchmarks.bare_stream import BareStream
from benchmarks.bare_wakeup import BareWakeup
from benchmarks.report import Figure
from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine.build import build_engine
from model_server.kv_cache.request import ScheduledRequest
from model_server.openai.api_server import ServeOptions, load_tokenizer, reserve
from model_server.openai.app import Server
from model_server.requests import ChosenToken

_STREAMS = (1, 4, 32)
_TOKENS = 100
_SHORT_TOKENS = 20
_STEP_S = 0.02
_FIRST_TOKEN_ID = 300
_READY_S = 60.0


class Serving(Protocol):
    """Interface of the measured servers."""

    async def serve(self, listener: object, on_ready: Callable[[], None], /) -> None:
        """Answer requests until `stop`."""

    def stop(self) -> None:
        """End `serve`."""


def measure(rounds: int, _: Callable[[], float]) -> Iterator[Figure]:
    """Yield `http_token_cpu_us` and its two floors for one stream and for several at once.

    Args:
        rounds: Number of rounds; the figures are medians.
        _: Clock of the other parts; here it is always the thread's CPU time.
    """
    options = ServeOptions(EngineConfig(), "127.0.0.1", 0, (TINY_MODEL,), None, 1 << 20)
    engine = build_engine(options.engine)
    engine.executor.execute_model = _paced_tokens  # type: ignore[method-assign]
    engine.start()
    server = Server(options, engine, None, load_tokenizer(TINY_MODEL))
    try:
        with (
            serving(lambda _: server) as real,
            serving(lambda loop: BareStream(loop, _STEP_S)) as bare,
            serving(lambda loop: BareWakeup(loop, _STEP_S)) as wakeup,
        ):
            sides = {
                "http_token_cpu_us": real,
                "http_token_floor_cpu_us": bare,
                "http_token_wakeup_floor_cpu_us": wakeup,
            }
            for streams in _STREAMS:
                costs_s: dict[str, list[float]] = {name: [] for name in sides}
                for number in range(rounds + 1):
                    for name, side in sides.items():
                        cost_s = _token_s(*side, streams)
                        if number:  # the first warms up
                            costs_s[name].append(cost_s)
                setting = {"streams": streams, "tokens": _TOKENS, "step_s": _STEP_S}
                for name, taken_s in costs_s.items():
                    yield Figure(name, "us", round(statistics.median(taken_s) * 1e6, 1), setting)
    finally:
        engine.close()


@contextmanager
def serving(
    new: Callable[[asyncio.AbstractEventLoop], Serving],
) -> Iterator[tuple[int, asyncio.AbstractEventLoop]]:
    """Serve on a thread; yield the port and the loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, reserve("127.0.0.1", 0) as listener:
        loop, ready = runner.get_loop(), threading.Event()
        server = new(loop)
        thread = threading.Thread(target=lambda: runner.run(server.serve(listener, ready.set)))
        thread.start()
        try:
            assert ready.wait(_READY_S)
            yield listener.getsockname()[1], loop
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join()


def _paced_tokens(chunks: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
    time.sleep(_STEP_S)
    sampling = [chunk.request for chunk in chunks if chunk.samples]
    return {
        request.request_id: ChosenToken(_FIRST_TOKEN_ID + request.num_output_tokens) for request in sampling
    }


def _token_s(port: int, loop: asyncio.AbstractEventLoop, streams: int) -> float:
    """Return the CPU seconds per additional token of a stream."""
    short_s, long_s = (
        _stream_all_s(port, loop, streams, tokens) for tokens in (_SHORT_TOKENS, _SHORT_TOKENS + _TOKENS)
    )
    return (long_s - short_s) / (streams * _TOKENS)


def _stream_all_s(port: int, loop: asyncio.AbstractEventLoop, streams: int, tokens: int) -> float:
    before_s = _loop_cpu_s(loop)
    arguments = map(str, (port, streams, tokens))
    subprocess.run([sys.executable, "-m", "benchmarks.stream_client", *arguments], check=True)
    return _loop_cpu_s(loop) - before_s


def _loop_cpu_s(loop: asyncio.AbstractEventLoop) -> float:
    async def read() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(read(), loop).result()
