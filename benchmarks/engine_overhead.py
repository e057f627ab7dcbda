"""Step overhead without the model's arithmetic, and the cost of publishing events.

The engine is that of `against_transformers`, at batch 32. For the overhead the forward pass is replaced by
prepared logits, which leaves scheduling, block hashing, batch layout, sampling, events and delivery. Events
are published over ZMQ to a subscriber. Their cost is the CPU time of all threads, including the publisher's,
relative to the time of the same work with the arithmetic.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import zmq
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.report import SHAPE, Figure
from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.engine.core import EngineCore
from model_server.kv_events.events import KVEvent, PublishEvents
from model_server.kv_events.publisher import KVEventsConfig, ZmqEventPublisher
from model_server.requests import EngineCoreOutput, EngineCoreRequest, SamplingParams

_BATCH = 32
_PROMPT_TOKENS = 256
_DECODE_STEPS = 64
# Sampling parameters by the figure's name.
_SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=_DECODE_STEPS, temperature=0.0, ignore_eos=True),
    "top_p": SamplingParams(max_tokens=_DECODE_STEPS, temperature=0.8, top_p=0.95, ignore_eos=True),
}


def measure(rounds: int, clock: Callable[[], float]) -> Iterator[Figure]:
    """Yield `step_overhead_greedy_b32_ms` and `step_overhead_top_p_b32_ms`, then `publish_cost_percent`."""
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as directory:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(directory)
        with _publishing() as sink:
            engine = _engine(Path(directory), sink.publish)
            whole_s = _whole_s(engine)
            _take_arithmetic_out(engine)
            for name, sampling in _SAMPLINGS.items():
                times = [_step_s(engine, sink, sampling, clock) for _ in range(rounds + 1)][1:]
                setting = {"batch": _BATCH, "vocabulary": SHAPE["vocab_size"]}
                milliseconds = round(1000 * statistics.median(times), 4)
                yield Figure(f"step_overhead_{name}_b32_ms", "ms", milliseconds, setting)
            quiet = _engine(Path(directory))
            _take_arithmetic_out(quiet)
            yield _publish_cost(engine, quiet, sink, whole_s, rounds)


class _CountingPublisher:
    """Publisher, and the number of batches handed to it."""

    def __init__(self, publisher: ZmqEventPublisher) -> None:
        self._publisher = publisher
        self._given = 0

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Hand one step's events to the publisher."""
        self._given += 1
        self._publisher.publish(events)

    def wait(self) -> None:
        """Wait until all batches are sent."""
        while self._publisher.stats.published < self._given:
            time.sleep(0.001)


@contextmanager
def _publishing() -> Iterator[_CountingPublisher]:
    publisher = ZmqEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*", topic="kv@bench"))
    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(publisher.config.endpoint)
        publisher.start()
        yield _CountingPublisher(publisher)
    finally:
        publisher.close()
        context.destroy(linger=0)


def _engine(directory: Path, publish: PublishEvents | None = None) -> EngineCore:
    config = EngineConfig(
        model=str(directory),
        gpu_blocks=2 * _BATCH * (_PROMPT_TOKENS + _DECODE_STEPS) // 16,
        max_model_len=_PROMPT_TOKENS + _DECODE_STEPS,
        max_num_seqs=_BATCH,
        max_num_batched_tokens=2048,
    )
    return build_engine(config, publish)


def _take_arithmetic_out(engine: EngineCore) -> None:
    # Logits have a model's spread: with flat logits top-p would keep thousands of tokens.
    logits = 4 * torch.randn((_BATCH, SHAPE["vocab_size"]))

    made = torch.empty_like(logits)

    def ready_made(_: Tensor, rows: Tensor, *__: object) -> Tensor:
        # Sampling modifies its logits in place.
        return made.copy_(logits)[: len(rows)]

    engine.executor.runner.model.forward = ready_made  # type: ignore[attr-defined]


def _submit(engine: EngineCore, sampling: SamplingParams) -> None:
    prompts = torch.randint(3, SHAPE["vocab_size"], (_BATCH, _PROMPT_TOKENS)).tolist()
    for number, prompt in enumerate(prompts):
        engine.add_request(EngineCoreRequest(f"{number}", tuple(prompt), sampling), _drop)


def _step_s(
    engine: EngineCore, sink: _CountingPublisher, sampling: SamplingParams, clock: Callable[[], float]
) -> float:
    """Return the seconds of one decode step of all requests, including its events."""
    _submit(engine, sampling)
    while len(engine.scheduler.running) < _BATCH or any(
        request.num_pending_tokens > 1 for request in engine.scheduler.running
    ):
        engine.step()
    sink.wait()  # excludes the prefill's events
    steps, started_s = engine.stats().steps, clock()
    while engine.step():
        pass
    sink.wait()
    return (clock() - started_s) / (engine.stats().steps - steps)


def _whole_s(engine: EngineCore) -> float:
    """Return the seconds of prefill and decode of all requests: CPU time divided by torch's threads."""
    _submit(engine, _SAMPLINGS["greedy"])
    started_s = time.process_time()
    while engine.step():
        pass
    return (time.process_time() - started_s) / torch.get_num_threads()


def _publish_cost(
    engine: EngineCore, quiet: EngineCore, sink: _CountingPublisher, whole_s: float, rounds: int
) -> Figure:
    costs_s = []
    for _ in range(rounds + 1):
        taken_s = {}
        for side, waits in ((engine, sink.wait), (quiet, _nothing)):
            _submit(side, _SAMPLINGS["greedy"])
            started_s = time.process_time()
            while side.step():
                pass
            waits()
            taken_s[side] = time.process_time() - started_s
        costs_s.append(taken_s[engine] - taken_s[quiet])
    setting = {"batch": _BATCH, "prompt_tokens": _PROMPT_TOKENS, "decode_steps": _DECODE_STEPS}
    percent = 100 * statistics.median(costs_s[1:]) / whole_s
    return Figure("publish_cost_percent", "%", round(percent, 3), setting)


def _nothing() -> None:
    pass


def _drop(_: EngineCoreOutput) -> None:
    pass
