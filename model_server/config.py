"""The engine's settings, checked once when they are made.

The names and defaults follow vLLM's flags where it has the same thing. Nothing here loads a model.
"""

from dataclasses import dataclass
from typing import Literal

from model_server.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDType = Literal["auto", "fp8"]
DTYPES: tuple[DType, ...] = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES: tuple[KvCacheDType, ...] = ("auto", "fp8")
SchedulingPolicy = Literal["fcfs", "priority", "aged"]
PreemptionMode = Literal["recompute", "swap"]
SCHEDULING_POLICIES: tuple[SchedulingPolicy, ...] = ("fcfs", "priority", "aged")
PREEMPTION_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")
TINY_MODEL = "kvroute-tiny"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: "kvroute-tiny", or a Hugging Face checkpoint directory.
        dtype: "auto" takes the checkpoint's own.
        kv_cache_dtype: "auto" keeps keys and values in the model's dtype, "fp8" in scaled 8-bit floats.
        device: A torch device such as "cpu" or "cuda:0".
        tensor_parallel_size: Processes that compute one model together, on CUDA each on a GPU of its own,
            from `device` on.
        block_tokens: Tokens in one KV block.
        gpu_blocks: KV blocks in the pool (on the device, also when that is a CPU).
        cpu_blocks: KV blocks in the host tier; 0 for none.
        cpu_gib: The same in GiB of host memory; None leaves it to `cpu_blocks`.
        max_model_len: Most tokens of prompt and answer together; None takes the model's own.
        max_num_seqs: Most requests that run at once.
        max_num_batched_tokens: Token budget of one step.
        max_waiting: Most requests that wait to run; one more is refused.
        scheduling_policy: Order of prefills, see `prefill_order.order_key`.
        preemption_mode: Whether a preempted request computes its KV again or finds it in the host tier.
        enable_prefix_caching: Reuse blocks between requests (and announce them).
        max_loras: Most LoRA adapters loaded at once; 0 for none.
        torch_threads: Threads of one CPU operation; None leaves torch's choice.
        seed: Seeds requests that bring none.
    """

    model: str = TINY_MODEL
    dtype: DType = "auto"
    kv_cache_dtype: KvCacheDType = "auto"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    block_tokens: int = 16
    gpu_blocks: int = 1024
    cpu_blocks: int = 0
    cpu_gib: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    scheduling_policy: SchedulingPolicy = "aged"
    preemption_mode: PreemptionMode = "recompute"
    enable_prefix_caching: bool = True
    max_loras: int = 4
    torch_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; use one of {', '.join(KV_CACHE_DTYPES)}"
            )
        self._check_tiers_and_order()
        if self.max_loras < 0:
            raise ConfigError(f"max_loras is {self.max_loras}; it must be at least 0")
        for name in (
            "tensor_parallel_size",
            "block_tokens",
            "gpu_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_waiting",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_model_len", "torch_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1, or leave it out")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): not every running request could decode in one step; raise the first"
            )

    def _check_tiers_and_order(self) -> None:
        for name, value, known in (
            ("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES),
            ("preemption_mode", self.preemption_mode, PREEMPTION_MODES),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; use one of {', '.join(known)}")
        if self.cpu_blocks < 0:
            raise ConfigError(f"cpu_blocks is {self.cpu_blocks}; it must be at least 0")
        if self.cpu_gib is not None and not 0 <= self.cpu_gib < float("inf"):
            raise ConfigError(f"cpu_gib is {self.cpu_gib}; it must be at least 0")
        if self.cpu_blocks and self.cpu_gib is not None:
            raise ConfigError("cpu_blocks and cpu_gib both give the size of the host tier; leave one out")
        if self.preemption_mode == "swap" and not (self.cpu_blocks or self.cpu_gib):
            raise ConfigError(
                "preemption_mode is 'swap', but there is no host tier; give cpu_blocks or cpu_gib"
            )
        if self.preemption_mode == "swap" and not self.enable_prefix_caching:
            raise ConfigError(
                "preemption_mode is 'swap', but enable_prefix_caching is off, by which swapped blocks are "
                "found again; leave one out"
            )
