"""What one streamed token costs the HTTP side: the real server, with the model's arithmetic taken out.

In: how many rounds. Out: CPU time of the event loop's thread per token, the clients being another process.
Steps are paced, so that each token is decoded, encoded and written alone, as it is behind a real model.
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

import uvloop

from benchmarks.against_transformers import Figure
from model_server.build import build_engine
from model_server.config import TINY_MODEL, EngineConfig
from model_server.events import NullSink
from model_server.requests import ChosenToken
from model_server.scheduler import Chunk
from model_server.serve import ServeOptions, Server, load_tokenizer, reserve

_STREAMS = (1, 32)
_TOKENS = 100
_STEP_S = 0.02
_FIRST_TOKEN_ID = 300
_READY_S = 60.0


def measure(rounds: int, _: Callable[[], float]) -> Iterator[Figure]:
    """Yields `http_token_cpu_us` for one stream and for many at once.

    Args:
        rounds: The figure is their median.
        _: The other parts' clock; here it is always the thread's CPU time.
    """
    with _server() as (port, loop):
        for streams in _STREAMS:
            _stream_all(port, streams)
            costs = []
            for _ in range(rounds):
                before_s = _loop_cpu_s(loop)
                _stream_all(port, streams)
                costs.append((_loop_cpu_s(loop) - before_s) / (streams * _TOKENS))
            setting = {"streams": streams, "tokens": _TOKENS, "step_s": _STEP_S}
            yield Figure("http_token_cpu_us", "us", statistics.median(costs) * 1e6, setting)


@contextmanager
def _server() -> Iterator[tuple[int, asyncio.AbstractEventLoop]]:
    options = ServeOptions(EngineConfig(), "127.0.0.1", 0, (TINY_MODEL,), None, 1 << 20)
    engine = build_engine(options.engine, NullSink())
    engine._runner.run = _paced_tokens  # type: ignore[method-assign]
    engine.start()
    server = Server(options, engine, None, load_tokenizer(TINY_MODEL))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, reserve("127.0.0.1", 0) as listener:
        loop, ready = runner.get_loop(), threading.Event()
        thread = threading.Thread(target=lambda: runner.run(server.serve(listener, ready.set)))
        thread.start()
        try:
            assert ready.wait(_READY_S)
            yield listener.getsockname()[1], loop
        finally:
            loop.call_soon_threadsafe(server.stop)
            thread.join()
            engine.close()


def _paced_tokens(chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
    time.sleep(_STEP_S)
    sampling = [chunk.live for chunk in chunks if chunk.samples]
    return {live.request_id: ChosenToken(_FIRST_TOKEN_ID + live.num_generated) for live in sampling}


def _loop_cpu_s(loop: asyncio.AbstractEventLoop) -> float:
    async def read() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(read(), loop).result()


def _stream_all(port: int, streams: int) -> None:
    arguments = map(str, (port, streams, _TOKENS))
    subprocess.run([sys.executable, "-m", "benchmarks.stream_client", *arguments], check=True)
