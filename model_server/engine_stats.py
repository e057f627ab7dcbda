"""The engine's counters and gauges, as it shows them to whoever asks.

Read from any thread; each number is right for itself, together they may be a step apart.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters are totals since its start.

    Attributes:
        running: Requests that hold KV blocks now.
        waiting: Requests that wait to run now.
        kv_usage: Share of the pool's blocks that requests hold now, 0 to 1.
        total_blocks: Blocks in the pool.
        prefix_queries_tokens: Prompt tokens looked up in the cache.
        prefix_hits_tokens: Those found there.
        preemptions: Times that a running request was pushed back to waiting.
        prompt_tokens: Prompt tokens of the requests that began to run.
        generated_tokens: Tokens sampled.
        steps: Steps that ran the model.
        last_step_monotonic_s: `time.monotonic()` when the loop last turned; an idle loop turns too.
        healthy: False once the loop has died.
        host_hits_tokens: Those of `prefix_hits_tokens` that had to be restored from the host tier.
        host_blocks: Blocks in the host tier.
        host_usage: Share of them that hold something, 0 to 1.
        swapped_in_blocks: Blocks restored from the host tier.
        swapped_out_blocks: Blocks stored in the host tier.
        block_bytes: Bytes of one block, for bytes moved and held.
        restores: Times that a request waited for a restore.
        prefill_tokens_per_s: Measured speed of prefills; 0 before the first.
        asleep: Whether the engine sleeps.
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
    host_hits_tokens: int = 0
    host_blocks: int = 0
    host_usage: float = 0.0
    swapped_in_blocks: int = 0
    swapped_out_blocks: int = 0
    block_bytes: int = 0
    restores: int = 0
    prefill_tokens_per_s: float = 0.0
    asleep: bool = False
