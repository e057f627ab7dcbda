"""Engine core: accepts requests from any thread and runs them step by step on its own thread.

One step: drain the inbox, schedule, launch the model, send what is queued, wait for the tokens, append them.
A step's cache events and outputs are sent at its end; with CUDA, while the device computes the next step. The
engine works on token ids, without text or HTTP. The model is behind `Executor`.
"""

import itertools
import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from common.repeated_log import RepeatedLog
from model_server.config import EngineConfig
from model_server.engine.outbox import Outbox, OutputCallback
from model_server.engine.scheduler import PrefillRate, Scheduler
from model_server.errors import EngineClosedError, QueueFullError, RequestError
from model_server.kv_cache.manager import KVCache
from model_server.kv_cache.request import Request, ScheduledRequest
from model_server.kv_events.events import PublishEvents
from model_server.model.lora import LoraRegistry
from model_server.requests import ChosenToken, EngineCoreRequest, EngineStats, FinishReason, check_request
from model_server.shapes.deployment import size_text
from model_server.worker.executor import Executor

logger = logging.getLogger(__name__)
_repeated = RepeatedLog(logger, lines=20)

T = TypeVar("T")

_HEARTBEAT_S = 1.0  # longest wait of an idle loop, so that its health can be observed
_SWITCH_INTERVAL_S = 0.0005  # longest wait for the GIL when the device is done; Python's 5 ms equal a step


class EngineCore:
    """Continuous batching over one model.

    Other threads only append to the inbox. Everything else belongs to the stepping thread: the engine's own
    thread after `start`, or the thread that calls `step`.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, publish: PublishEvents | None, max_model_len: int
    ) -> None:
        self.vocab_size = executor.vocab_size  # token ids are below this
        self.max_model_len = max_model_len  # maximum tokens of prompt and output together
        self.block_tokens = config.block_tokens  # tokens in one KV block
        self.loras = LoraRegistry(executor.load_adapter, config.max_loras)  # adapters that requests can name
        self._max_waiting = config.max_waiting
        self._caching = config.enable_prefix_caching
        self.executor = executor
        self._outbox = Outbox(publish)
        self.kv_cache = KVCache(config, executor, max_model_len)
        self.scheduler = Scheduler(
            self.kv_cache.manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
        )
        self._rate = PrefillRate()
        self.is_sleeping = False  # whether KV memory is released and no step runs
        self.freed_bytes = 0  # bytes that the last sleep gave back
        self._arrival_indices = itertools.count()
        self._seeds = random.Random(config.seed)
        self._wake = threading.Condition()  # guards the next four fields
        self._inbox: deque[Callable[[], None]] = deque()
        self._requests: dict[str, tuple[Request, OutputCallback]] = {}
        self._aborting: set[str] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._healthy = True
        self._steps = 0
        self._generated_tokens = 0
        self._last_turn_s = time.monotonic()

    def add_request(self, core_request: EngineCoreRequest, on_output: OutputCallback) -> None:
        """Queue a request.

        Args:
            core_request: Request to run; its id must not be in use.
            on_output: Called on the engine's thread with each output. Must not block. If it raises, the
                request is aborted, and its next output is the last.

        Raises:
            RequestError: The request can never run.
            QueueFullError: The waiting queue is full.
            EngineClosedError: The engine is closed.
        """
        check_request(core_request, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        adapter = None if core_request.lora_name is None else self.loras.find(core_request.lora_name)
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            if core_request.request_id in self._requests:
                raise RequestError(f"request id {core_request.request_id!r} is in use", "request_id")
            if len(self._requests) - len(self.scheduler.running) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests are waiting already; try again later")
            seed = core_request.sampling.seed
            request = Request(
                core_request,
                self._seeds.getrandbits(63) if seed is None else seed,
                adapter,
                arrived_s=time.monotonic(),
                arrival_index=next(self._arrival_indices),
            )
            self._requests[request.request_id] = (request, on_output)
            self._post(lambda: self.scheduler.add_request(request))

    def abort_request(self, request_id: str) -> None:
        """Abort a request and free its blocks before the next step. Unknown ids are ignored."""
        with self._wake:
            if request_id in self._requests and request_id not in self._aborting:
                request, _ = self._requests[request_id]
                self._aborting.add(request_id)
                self._post(lambda: self._finish(request, "abort"))

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Return False, and change nothing, while requests use blocks."""
        return self._run_between_steps(self._reset_kv_cache)

    def sleep(self) -> bool:
        """Clear the cache and free its memory until `wake_up`; return False while blocks are in use."""
        return self._run_between_steps(self._sleep)

    def wake_up(self) -> bool:
        """Allocate KV memory again and resume; return False if the engine was not asleep."""
        return self._run_between_steps(self._wake_up)

    def stats(self) -> EngineStats:
        scheduler, running = self.scheduler, len(self.scheduler.running)
        pool, host, offload = self.kv_cache.block_pool, self.kv_cache.host_tier, self.kv_cache.offloading
        return EngineStats(
            running=running,
            waiting=max(len(self._requests) - running, 0),
            prefix_queries_tokens=scheduler.prompt_tokens if self._caching else 0,
            prefix_hits_tokens=scheduler.cached_prompt_tokens,
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=self._generated_tokens,
            steps=self._steps,
            last_step_monotonic_s=self._last_turn_s,
            healthy=self._healthy,
            host_hits_tokens=scheduler.host_prompt_tokens,
            prefill_tokens_per_s=self._rate.tokens_per_s,
            asleep=self.is_sleeping,
            kv_usage=1.0 - pool.num_free_blocks / pool.num_blocks,
            total_blocks=pool.num_blocks,
            host_blocks=host.num_blocks,
            host_usage=host.num_used / max(1, host.num_blocks),
            swapped_in_blocks=offload.swapped_in_blocks,
            swapped_out_blocks=offload.swapped_out_blocks,
            block_bytes=offload.copies.block_bytes,
            restores=offload.restores,
        )

    def start(self) -> None:
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Abort all requests and stop. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._end_all("abort", None)
        self.executor.close()

    def step(self) -> bool:
        """Run one step on the caller's thread. Return False when there was nothing to compute."""
        self._drain_inbox()
        scheduled: list[ScheduledRequest] = []
        try:
            if not self.is_sleeping:
                scheduled = self.scheduler.schedule(self._rate.seconds_per_token)
            self._log_preemptions()
            if not scheduled:
                self._flush()
                return self.kv_cache.offloading.wait_for_restore()
            tokens = self._compute(scheduled)
        except Exception as error:
            self.executor.raise_if_fatal(error)
            self._fail([item.request for item in scheduled], error)
        else:
            self._append_tokens(scheduled, tokens)
        if not self.executor.is_async:
            self._flush()
        return True

    def _loop(self) -> None:
        try:
            self.executor.bind_thread()
            if self.executor.is_async:
                sys.setswitchinterval(_SWITCH_INTERVAL_S)
            while not self._closing:
                self._last_turn_s = time.monotonic()
                self.executor.check_health()
                if not self.step():
                    with self._wake:
                        if not self._inbox and not self._closing:
                            self._wake.wait(_HEARTBEAT_S)
        except BaseException:
            self._healthy = False  # first: from now on /health reports the failure
            logger.critical("engine loop died", exc_info=True)
            self.kv_cache.block_pool.uncache_uncomputed()  # neither published nor in a snapshot
            self._end_all("error", "the engine failed")
        else:
            self._end_all("abort", None)

    def _fail(self, computed: Sequence[Request], error: Exception) -> None:
        """End a failed step's requests (`computed` is empty if scheduling failed) and uncache its blocks."""
        scheduler = self.scheduler
        # Always end at least one request, so that a persistent error does not repeat forever.
        failed = computed or list(scheduler.running) or list(scheduler.waiting)
        logger.error("step failed: step=%d requests=%d", self._steps, len(failed), exc_info=error)
        scheduler.invalidate_blocks(self.kv_cache.block_pool.uncache_uncomputed(), failed)
        self._queue_events()
        what = "the model failed" if computed else "the step could not be scheduled"
        for request in failed:
            self._finish(request, "error", f"{what}: {error}")
        self._flush()

    def _compute(self, scheduled: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
        self._steps += 1
        decodes = sum(item.num_tokens == 1 for item in scheduled)
        started_s = time.monotonic()
        for item in scheduled:
            item.request.started_s = item.request.started_s or started_s
        launched = self.executor.launch(scheduled)
        self._outbox.send()  # if the executor is asynchronous, the previous step's, while the device computes
        tokens = launched.result()
        prefills = sum(item.num_tokens for item in scheduled) - decodes
        self._rate.observe(prefills, decodes, time.monotonic() - started_s)
        return tokens

    def between_steps(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps, after events and outputs are sent, or raise EngineClosedError."""
        answer: Future[T] = Future()

        def act() -> None:
            try:
                self._flush()
                answer.set_result(action())
            except Exception as error:
                answer.set_exception(error)
                self.executor.raise_if_fatal(error)

        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self._post(act)
        if self._thread is None:
            self._drain_inbox()
        return answer.result()

    def _run_between_steps(self, action: Callable[[], bool]) -> bool:
        try:
            return self.between_steps(action)
        except EngineClosedError:
            return False

    def _post(self, action: Callable[[], None]) -> None:
        """Queue an action for the stepping thread. The caller holds the lock."""
        self._inbox.append(action)
        self._wake.notify()

    def _log_preemptions(self) -> None:
        """Log the requests that were preempted since the last step."""
        for each in self.scheduler.preempted:
            _repeated.event(
                "preemption",
                each.cause,
                "request preempted: request=%s cause=%s mode=%s computed_tokens=%d swapped_blocks=%d",
                *each,
                level=logging.INFO,
            )
        self.scheduler.preempted.clear()

    def _drain_inbox(self) -> None:
        while self._inbox:  # only this thread removes entries
            self._inbox.popleft()()

    def _append_tokens(self, scheduled: Sequence[ScheduledRequest], tokens: dict[str, ChosenToken]) -> None:
        """Append the sampled tokens, finish requests that are complete, and queue events and outputs."""
        self._queue_events()  # before any block is freed, because a free block counts as computed
        while self._outbox.failed:  # callbacks raised during this step
            self._finish(self._outbox.failed.pop(), "abort")
        for item in scheduled:
            request = item.request
            if not request.block_tables:  # just aborted
                continue
            request.num_computed_tokens = item.stop
            if not item.samples:
                continue
            token = tokens[request.request_id]
            request.token_ids.append(token.token_id)
            self._generated_tokens += 1
            reason = self._finish_reason(request, token.token_id)
            if reason is not None:
                self._finish(request, reason, token=token)
            else:
                _, on_output = self._requests[request.request_id]
                self._outbox.add_output(request, on_output, request.make_output(token))
        self._queue_events()  # events of blocks cached when requests were freed

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        sampling = request.core_request.sampling
        is_eos = token in self.executor.eos_token_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            return "stop"
        if request.num_output_tokens >= sampling.max_tokens or request.num_tokens >= self.max_model_len:
            return "length"
        return None

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        token: ChosenToken | None = None,
    ) -> None:
        """Remove a request, free its blocks and queue its last output. Ignore one that has ended already."""
        with self._wake:
            current, on_output = self._requests.get(request.request_id, (None, None))
            if current is not request or on_output is None:
                return
            del self._requests[request.request_id]
            self._aborting.discard(request.request_id)
        try:
            self.scheduler.remove_request(request)
        finally:
            self._outbox.add_output(request, on_output, request.make_output(token, reason, error))

    def _flush(self) -> None:
        """Send all events and outputs. Called between steps only, because it may free blocks."""
        self._queue_events()
        self._outbox.send()
        while self._outbox.failed:
            self._finish(self._outbox.failed.pop(), "abort")
            self._queue_events()
            self._outbox.send()

    def _queue_events(self) -> None:
        self._outbox.add_events(self.kv_cache.block_pool.take_events())

    def _reset_kv_cache(self) -> bool:
        done = self.kv_cache.reset()
        self._flush()
        return done

    def _sleep(self) -> bool:
        if self.is_sleeping or not self._reset_kv_cache():
            return self.is_sleeping
        self.is_sleeping = True
        self.freed_bytes = self.executor.free()
        logger.info("asleep: %s given back; the weights stay", size_text(self.freed_bytes))
        return True

    def _wake_up(self) -> bool:
        if not self.is_sleeping:
            return False
        self.executor.allocate(self.kv_cache.host_tier.num_blocks)
        self.is_sleeping = False
        return True

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        with self._wake:
            self._closing = True
            for request, _ in self._requests.values():
                self._inbox.append(partial(self._finish, request, reason, error))
        while self._inbox:
            try:
                self._drain_inbox()
            except Exception:  # blocks of a request cannot be freed on a failed device
                logger.exception("cannot end a request cleanly, going on with the others")
        self._outbox.send()
