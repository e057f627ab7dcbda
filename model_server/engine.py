"""The engine: takes requests from any thread, runs them step by step on its own, hands out tokens.

One step is drain the inbox -> schedule -> run the model -> publish cache events -> deliver tokens. It knows
no text and no HTTP; the model is behind `Runner`, the listeners behind two callables.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import torch

from model_server.admission import check_request
from model_server.block_manager import BlockManager
from model_server.blocks import BlockPool
from model_server.config import TINY_MODEL, EngineConfig
from model_server.engine_stats import EngineStats
from model_server.errors import ConfigError, EngineClosedError, QueueFullError, RequestError
from model_server.events import EventSink
from model_server.live_request import LiveRequest
from model_server.lora_registry import LoraRegistry
from model_server.requests import ChosenToken, FinishReason, GenerationRequest, TokenOutput
from model_server.runner import TorchRunner
from model_server.scheduler import Chunk, Scheduler
from model_server.tiny import load_tiny
from model_server.weights import load_checkpoint, torch_device

__all__ = ["Engine", "EngineStats", "OutputSink", "Runner", "build_engine"]

logger = logging.getLogger(__name__)

OutputSink = Callable[[TokenOutput], None]

_HEARTBEAT_S = 1.0  # how often an idle loop shows that it lives


class Runner(Protocol):
    """What computes a step: the model, its KV pool and the sampler."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def run(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        """Compute the chunks; return the next token by request id for each chunk that samples."""


class Engine:
    """Continuous batching over one model.

    Other threads only append to the inbox; everything else belongs to the thread that steps: the engine's
    own after `start`, or the caller's of `step`.

    Attributes:
        max_model_len: Most tokens of prompt and answer together.
        block_tokens: Tokens in one KV block.
        loras: The adapters that requests can name; None where there can be none.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        events: EventSink,
        max_model_len: int,
        loras: LoraRegistry | None = None,
    ) -> None:
        if max_model_len > config.gpu_blocks * config.block_tokens:
            # With this a request that runs alone always fits, so preemption cannot go round in circles.
            raise ConfigError(
                f"max_model_len is {max_model_len}, but {config.gpu_blocks} blocks of {config.block_tokens} "
                f"tokens hold {config.gpu_blocks * config.block_tokens}; add blocks or lower max_model_len"
            )
        self.max_model_len = max_model_len
        self.block_tokens = config.block_tokens
        self.loras = loras
        self._max_waiting = config.max_waiting
        self._caching = config.enable_prefix_caching
        self._runner = runner
        self._events = events
        self._pool = BlockPool(config.gpu_blocks, config.block_tokens)
        self._scheduler = Scheduler(
            BlockManager(self._pool, enable_prefix_caching=config.enable_prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._seeds = random.Random(config.seed)
        self._wake = threading.Condition()  # guards the next five
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: dict[str, tuple[LiveRequest, OutputSink]] = {}
        self._aborting: set[str] = set()
        self._reset: Future[bool] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        self._healthy = True
        self._steps = 0
        self._generated_tokens = 0
        self._turned_s = time.monotonic()

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Queue a request.

        Args:
            request: What to generate.
            sink: Called on the engine's thread with each output; must not block. If it raises, the request
                is aborted.

        Raises:
            RequestError: It can never run as asked.
            QueueFullError: Too many requests wait already.
            EngineClosedError: The engine takes nothing more.
        """
        check_request(request, vocab_size=self._runner.vocab_size, max_model_len=self.max_model_len)
        adapter = None
        if request.lora_name is not None:
            if self.loras is None:
                raise RequestError("this engine takes no adapters", "model")
            adapter = self.loras.find(request.lora_name)
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            if request.request_id in self._live:
                raise RequestError(f"request id {request.request_id!r} is in use", "request_id")
            if len(self._live) - len(self._scheduler.running) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests are waiting already; try again later")
            seed = request.sampling.seed
            live = LiveRequest(request, self._seeds.getrandbits(63) if seed is None else seed, adapter)
            self._live[request.request_id] = (live, sink)
            self._post(lambda: self._scheduler.add(live))

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step. Unknown ids are ignored."""
        with self._wake:
            if request_id in self._live and request_id not in self._aborting:
                live, _ = self._live[request_id]
                self._aborting.add(request_id)
                self._post(lambda: self._finish(live, "abort"))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and announce it at once.

        Returns:
            False, with nothing done, while requests hold blocks.
        """
        with self._wake:
            if self._closing:
                return False
            if self._reset is None:
                self._reset = Future()
                self._post(self._reset_pool)
            answer = self._reset
        if self._thread is None:
            self._drain_inbox()
        return answer.result()

    def stats(self) -> EngineStats:
        """Return the counters; callable from any thread."""
        scheduler, pool = self._scheduler, self._pool
        running = len(scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(len(self._live) - running, 0),
            kv_usage=1.0 - pool.num_free / pool.num_blocks,
            total_blocks=pool.num_blocks,
            prefix_queries_tokens=scheduler.prompt_tokens if self._caching else 0,
            prefix_hits_tokens=scheduler.cached_prompt_tokens,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            last_step_monotonic_s=self._turned_s,
            healthy=self._healthy,
        )

    def start(self) -> None:
        """Begin to step on a thread of the engine's own."""
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort everything and stop; may be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all("abort", None)

    def step(self) -> bool:
        """Run one step on the caller's thread. Returns False when there was nothing to compute."""
        self._drain_inbox()
        chunks = self._scheduler.schedule()
        if not chunks:
            return False
        self._steps += 1
        try:
            tokens = self._runner.run(chunks)
        except Exception as error:
            logger.exception("step %d failed; its %d requests end with an error", self._steps, len(chunks))
            self._pool.forget_registered()
            self._publish()
            for chunk in chunks:
                self._finish(chunk.live, "error", f"the model failed: {error}")
        else:
            self._publish()
            self._deliver(chunks, tokens)
        return True

    def check_invariants(self) -> None:
        """Assert that the pool's books agree with the requests'; call it between steps."""
        self._pool.check_invariants(live.blocks for live in self._scheduler.running)
        assert not any(live.blocks for live in self._scheduler.waiting), "a waiting request holds blocks"
        for live in self._scheduler.running:
            assert [block.block_id for block in live.blocks] == list(live.block_ids)
            assert 0 <= live.computed <= len(live.blocks) * self.block_tokens

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._turned_s = time.monotonic()
                if not self.step():
                    with self._wake:
                        if not self._inbox and not self._closing:
                            self._wake.wait(_HEARTBEAT_S)
        except Exception:
            logger.critical("the engine loop died", exc_info=True)
            self._healthy = False
            self._end_all("error", "the engine failed")
        else:
            self._end_all("abort", None)

    def _post(self, action: Callable[[], None]) -> None:
        """Leave work for the stepping thread; the caller holds the lock."""
        self._inbox.append(action)
        self._wake.notify()

    def _drain_inbox(self) -> None:
        while self._inbox:  # only this thread takes from it
            self._inbox.popleft()()

    def _deliver(self, chunks: Sequence[Chunk], tokens: dict[str, ChosenToken]) -> None:
        for chunk in chunks:
            live = chunk.live
            live.computed = chunk.stop
            if not chunk.samples:
                continue
            token = tokens[live.request_id]
            live.token_ids.append(token.token_id)
            self._generated_tokens += 1
            reason = self._finish_reason(live, token.token_id)
            if reason is not None:
                self._finish(live, reason, token=token)
            else:
                self._emit(live, _output(live, token, None))

    def _finish_reason(self, live: LiveRequest, token: int) -> FinishReason | None:
        sampling = live.request.sampling
        is_eos = token in self._runner.eos_token_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            return "stop"
        if live.num_generated >= sampling.max_tokens or live.num_tokens >= self.max_model_len:
            return "length"
        return None

    def _finish(
        self,
        live: LiveRequest,
        reason: FinishReason,
        error: str | None = None,
        token: ChosenToken | None = None,
    ) -> None:
        """Take a request out, free its blocks, and tell its sink. One that has ended already is ignored."""
        with self._wake:
            current, sink = self._live.get(live.request_id, (None, None))
            if current is not live or sink is None:
                return
            del self._live[live.request_id]
            self._aborting.discard(live.request_id)
        try:
            self._scheduler.remove(live)
        finally:
            try:
                sink(_output(live, token, reason, error))
            except Exception:
                logger.warning("the sink of request %s raised at its end", live.request_id, exc_info=True)

    def _emit(self, live: LiveRequest, output: TokenOutput) -> None:
        _, sink = self._live[live.request_id]
        try:
            sink(output)
        except Exception:
            logger.warning("the sink of request %s raised; aborting it", live.request_id, exc_info=True)
            self._finish(live, "abort")

    def _publish(self) -> None:
        events = self._pool.take_events()
        if not events:
            return
        try:
            self._events.publish(events)
        except Exception:
            logger.exception("the event sink raised; %d cache events are lost", len(events))

    def _reset_pool(self) -> None:
        done = self._pool.reset()
        self._publish()
        with self._wake:
            answer, self._reset = self._reset, None
        assert answer is not None
        answer.set_result(done)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        """Refuse new requests, then end those there are."""
        with self._wake:
            self._closing = True
        self._drain_inbox()
        for live, _ in list(self._live.values()):
            try:
                self._finish(live, reason, error)
            except Exception:
                logger.exception("request %s could not be taken out of the scheduler", live.request_id)


def _output(
    live: LiveRequest, token: ChosenToken | None, reason: FinishReason | None, error: str | None = None
) -> TokenOutput:
    token_ids = () if token is None else (token.token_id,)
    logprobs = () if token is None or token.logprobs is None else (token.logprobs,)
    return TokenOutput(live.request_id, token_ids, reason, live.cached_tokens or 0, error, logprobs)


def build_engine(config: EngineConfig, sink: EventSink) -> Engine:
    """Load the model and make an engine for it, not yet started.

    Args:
        config: Which model, and how much of everything.
        sink: Where the cache events of each step go.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        ConfigError: A setting does not fit the model or the machine.
    """
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    device = torch_device(config.device)
    if config.model == TINY_MODEL:
        loaded = load_tiny(config.dtype, device)
    else:
        loaded = load_checkpoint(Path(config.model), config.dtype, device)
    max_model_len = _max_model_len(config, loaded.max_positions)
    runner = TorchRunner(
        loaded.model,
        loaded.eos_token_ids,
        num_blocks=config.gpu_blocks,
        block_tokens=config.block_tokens,
        fp8_kv=config.kv_cache_dtype == "fp8",
    )
    return Engine(config, runner, sink, max_model_len, LoraRegistry(loaded.model, config.max_loras))


def _max_model_len(config: EngineConfig, max_positions: int) -> int:
    if config.max_model_len is None:
        return min(max_positions, config.gpu_blocks * config.block_tokens)
    if config.max_model_len > max_positions:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for {max_positions} positions"
        )
    return config.max_model_len
