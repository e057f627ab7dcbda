"""Stub of the signature while the body is being written; see Engine in a few minutes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_server.config import EngineConfig
from model_server.requests import GenerationRequest, TokenOutput

if TYPE_CHECKING:
    from model_server.events import EventSink

OutputSink = Callable[[TokenOutput], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's counters at one moment (totals since start unless said otherwise).

    Attributes:
        running: Requests that hold KV blocks now.
        waiting: Requests that wait for blocks or a place now.
        kv_usage: Share of the pool's blocks held by running requests now, 0 to 1.
        total_blocks: KV blocks in the pool.
        prefix_queries_tokens: Prompt tokens looked up in the prefix cache.
        prefix_hits_tokens: Those found.
        preemptions: Running requests pushed back to the waiting queue.
        prompt_tokens: Prompt tokens of admitted requests.
        generated_tokens: Tokens sampled.
        steps: Steps that ran the model.
        last_step_monotonic_s: `time.monotonic()` when the loop last turned (also when idle).
        healthy: False once the step loop has died.
    """

    running: int
    waiting: int
    kv_usage: float
    total_blocks: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    last_step_monotonic_s: float
    healthy: bool


class Engine:
    """Runs requests on one model."""

    max_model_len: int
    block_tokens: int

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def start(self) -> None: ...
    def close(self) -> None: ...


def build_engine(config: EngineConfig, sink: "EventSink") -> Engine: ...
