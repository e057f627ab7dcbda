"""The engine: takes requests from any thread, runs them step by step on its own, hands out tokens.

One step is drain the inbox -> schedule -> run the model -> publish cache events -> deliver tokens. It knows
no text and no HTTP; the model is behind `Executor`, the listeners behind two callables.
"""

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from model_server.config import EngineConfig
from model_server.engine.scheduler import PrefillRate, Scheduler
from model_server.errors import EngineClosedError, QueueFullError, RequestError, WorkerError
from model_server.kv_cache.manager import KvCache
from model_server.kv_cache.request import Chunk, LiveRequest
from model_server.kv_events.events import EventSink
from model_server.model.lora import LoraRegistry
from model_server.requests import (
    ChosenToken,
    EngineStats,
    FinishReason,
    GenerationRequest,
    TokenOutput,
    check_request,
)
from model_server.worker.executor import Executor

logger = logging.getLogger(__name__)

T = TypeVar("T")

OutputSink = Callable[[TokenOutput], None]

_HEARTBEAT_S = 1.0  # how often an idle loop shows that it lives


class Engine:
    """Continuous batching over one model.

    Other threads only append to the inbox; everything else belongs to the thread that steps: the engine's
    own after `start`, or the caller's of `step`.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        events: EventSink,
        max_model_len: int,
        loras: LoraRegistry | None = None,
    ) -> None:
        self.vocab_size = executor.vocab_size  # token ids are below this
        self.max_model_len = max_model_len  # most tokens of prompt and answer together
        self.block_tokens = config.block_tokens  # tokens in one KV block
        self.loras = loras  # the adapters that requests can name; None where there can be none
        self._max_waiting = config.max_waiting
        self._caching = config.enable_prefix_caching
        self.executor = executor
        self._events = events
        self.cache = KvCache(config, executor, max_model_len)
        self.scheduler = Scheduler(
            self.cache.manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
        )
        self._rate = PrefillRate()
        self.is_sleeping = False  # whether it has given its memory back and runs nothing
        self._serials = itertools.count()
        self._seeds = random.Random(config.seed)
        self._wake = threading.Condition()  # guards the next four
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: dict[str, tuple[LiveRequest, OutputSink]] = {}
        self._aborting: set[str] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._healthy = True
        self._steps = 0
        self._generated_tokens = 0
        self._turned_s = time.monotonic()

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Queue a request.

        Args:
            sink: Called on the engine's thread with each output; must not block. If it raises, the request
                is aborted.

        Raises:
            RequestError: It can never run as asked.
            QueueFullError: Too many requests wait already.
            EngineClosedError: The engine takes nothing more.
        """
        check_request(request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
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
            if len(self._live) - len(self.scheduler.running) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests are waiting already; try again later")
            seed = request.sampling.seed
            live = LiveRequest(
                request,
                self._seeds.getrandbits(63) if seed is None else seed,
                adapter,
                arrived_s=time.monotonic(),
                serial=next(self._serials),
            )
            self._live[request.request_id] = (live, sink)
            self._post(lambda: self.scheduler.add(live))

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step. Unknown ids are ignored."""
        with self._wake:
            if request_id in self._live and request_id not in self._aborting:
                live, _ = self._live[request_id]
                self._aborting.add(request_id)
                self._post(lambda: self._finish(live, "abort"))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and announce it; False, with nothing done, while requests hold blocks."""
        return self._ask(self._reset_pool)

    def sleep(self) -> bool:
        """Forget all cached blocks, announce it, and give the memory of both tiers back.

        Returns False, with nothing done, while requests hold blocks. Those that come wait until `wake_up`.
        """
        return self._ask(self._fall_asleep)

    def wake_up(self) -> bool:
        """Take the memory again and go on; returns False if the engine did not sleep."""
        return self._ask(self._wake_up)

    def stats(self) -> EngineStats:
        scheduler, running = self.scheduler, len(self.scheduler.running)
        pool, host, offload = self.cache.pool, self.cache.host, self.cache.offload
        return EngineStats(
            running=running,
            waiting=max(len(self._live) - running, 0),
            prefix_queries_tokens=scheduler.prompt_tokens if self._caching else 0,
            prefix_hits_tokens=scheduler.cached_prompt_tokens,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            last_step_monotonic_s=self._turned_s,
            healthy=self._healthy,
            host_hits_tokens=scheduler.host_prompt_tokens,
            prefill_tokens_per_s=self._rate.tokens_per_s,
            asleep=self.is_sleeping,
            kv_usage=1.0 - pool.num_free / pool.num_blocks,
            total_blocks=pool.num_blocks,
            host_blocks=host.num_blocks,
            host_usage=host.num_used / max(1, host.num_blocks),
            swapped_in_blocks=offload.swapped_in_blocks,
            swapped_out_blocks=offload.swapped_out_blocks,
            block_bytes=offload.copies.block_bytes,
            restores=offload.restores,
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
        self.executor.close()

    def step(self) -> bool:
        """Run one step on the caller's thread. Returns False when there was nothing to compute."""
        self._drain_inbox()
        if self.is_sleeping:
            return False
        chunks: list[Chunk] = []
        try:
            chunks = self.scheduler.schedule(self._rate.seconds_per_token)
            if not chunks:
                return self._idle()
            tokens = self._compute(chunks)
        except WorkerError:
            raise
        except Exception as error:
            self._fail([chunk.live for chunk in chunks], error)
        else:
            self._publish()
            self._deliver(chunks, tokens)
        self._publish()  # what requests that ended leave in windowed groups
        return True

    def _loop(self) -> None:
        try:
            while not self._closing:
                self._turned_s = time.monotonic()
                self.executor.check()
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

    def _idle(self) -> bool:
        """Settle copies when there is nothing to compute; returns whether there may be something now."""
        waits = self.cache.offload.restoring
        if waits:
            self.cache.offload.wait()
        self._publish()
        return waits

    def _fail(self, computed: Sequence[LiveRequest], error: Exception) -> None:
        """End the requests that a failed step was for; what it was to compute is cached nowhere.

        These are `computed`, those that were scheduled; none if scheduling failed, for whichever of them.
        """
        scheduler = self.scheduler
        # Some end in any case, so that an error that always comes again does not come for ever.
        failed = computed or list(scheduler.running) or list(scheduler.waiting)
        logger.error("step failed: step=%d requests=%d", self._steps, len(failed), exc_info=error)
        scheduler.distrust(self.cache.pool.forget_registered(), failed)
        self._publish()
        what = "the model failed" if computed else "the step could not be scheduled"
        for live in failed:
            self._finish(live, "error", f"{what}: {error}")

    def _compute(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        self._steps += 1
        decodes = sum(chunk.length == 1 for chunk in chunks)
        started_s = time.monotonic()
        for chunk in chunks:
            chunk.live.started_s = chunk.live.started_s or started_s
        tokens = self.executor.run(chunks)
        prefills = sum(chunk.length for chunk in chunks) - decodes
        self._rate.observe(prefills, decodes, time.monotonic() - started_s)
        return tokens

    def between_steps(self, action: Callable[[], T]) -> T:
        """Have the stepping thread do something between two steps, all events of the first published.

        An EngineClosedError where the engine closes.
        """
        answer: Future[T] = Future()

        def act() -> None:
            self._publish()
            try:
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)

        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self._post(act)
        if self._thread is None:
            self._drain_inbox()
        return answer.result()

    def _ask(self, action: Callable[[], bool]) -> bool:
        """Have the stepping thread change something; returns False once the engine closes."""
        try:
            return self.between_steps(action)
        except EngineClosedError:
            return False

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
                self._emit(live, live.output(token))

    def _finish_reason(self, live: LiveRequest, token: int) -> FinishReason | None:
        sampling = live.request.sampling
        is_eos = token in self.executor.eos_token_ids and not sampling.ignore_eos
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
            self.scheduler.remove(live)
        finally:
            try:
                sink(live.output(token, reason, error))
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
        events = self.cache.pool.take_events()
        if not events:
            return
        try:
            self._events.publish(events)
        except Exception:
            logger.exception("the event sink raised; %d cache events are lost", len(events))

    def _reset_pool(self) -> bool:
        done = self.cache.reset()
        self._publish()
        return done

    def _fall_asleep(self) -> bool:
        if self.is_sleeping or not self._reset_pool():
            return self.is_sleeping
        self.is_sleeping = True
        self.executor.free()
        return True

    def _wake_up(self) -> bool:
        if not self.is_sleeping:
            return False
        self.executor.allocate(self.cache.host.num_blocks)
        self.is_sleeping = False
        return True

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
