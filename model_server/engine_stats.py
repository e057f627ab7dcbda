"""The engine's counters and gauges, as it shows them to whoever asks.

Read from any thread; each number is right for itself, together they may be a step apart.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment; counters are totals since its start."""

    running: int  # requests that hold KV blocks now
    waiting: int  # requests that wait to run now
    kv_usage: float  # share of the pool's blocks that requests hold now, 0 to 1
    total_blocks: int  # in the pool
    prefix_queries_tokens: int  # prompt tokens looked up in the cache
    prefix_hits_tokens: int  # those found there
    preemptions: int  # times that a running request was pushed back to waiting
    prompt_tokens: int  # of the requests that began to run
    generated_tokens: int
    steps: int  # that ran the model
    last_step_monotonic_s: float  # `time.monotonic()` when the loop last turned; an idle loop turns too
    healthy: bool  # False once the loop has died
    host_hits_tokens: int = 0  # those of `prefix_hits_tokens` that had to be restored from the host tier
    host_blocks: int = 0  # in the host tier
    host_usage: float = 0.0  # share of them that hold something, 0 to 1
    swapped_in_blocks: int = 0  # restored from the host tier
    swapped_out_blocks: int = 0  # stored in the host tier
    block_bytes: int = 0  # of one block, for bytes moved and held
    restores: int = 0  # times that a request waited for a restore
    prefill_tokens_per_s: float = 0.0  # measured speed of prefills; 0 before the first
    asleep: bool = False

    @property
    def device_hits_tokens(self) -> int:
        """Prompt tokens found on the device."""
        return self.prefix_hits_tokens - self.host_hits_tokens

    @property
    def host_queries_tokens(self) -> int:
        """Prompt tokens looked up in the host tier: what the device does not have."""
        return self.prefix_queries_tokens - self.device_hits_tokens if self.host_blocks else 0

    @property
    def swapped_in_bytes(self) -> int:
        """Bytes restored from the host tier."""
        return self.swapped_in_blocks * self.block_bytes

    @property
    def swapped_out_bytes(self) -> int:
        """Bytes stored in the host tier."""
        return self.swapped_out_blocks * self.block_bytes
