"""The settings of a model server, each declared once: its default, its flag, its meaning; checked when made.

The names and defaults follow vLLM's flags where it has the same thing. Nothing here loads a model.
"""

from dataclasses import asdict, dataclass, field
from typing import Literal

from model_server.errors import ConfigError
from model_server.flags import check, flag, positive, tcp_port

DType = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDType = Literal["auto", "fp8"]
SchedulingPolicy = Literal["fcfs", "priority", "aged"]
PreemptionMode = Literal["recompute", "swap"]
TINY_MODEL = "kvroute-tiny"

_MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine."""

    model: str = flag(TINY_MODEL, "a Hugging Face checkpoint directory, or the built-in tiny model")
    dtype: DType = flag("auto", "type of weights and KV cache; auto: the checkpoint's own")
    kv_cache_dtype: KvCacheDType = flag(
        "auto", "type of the KV cache, if not --dtype: fp8 takes half the bytes of a 16-bit type"
    )
    device: str = flag("cpu", "torch device")
    tensor_parallel_size: int = flag(
        1,
        "processes that compute the model together, on CUDA each on a GPU of its own, from --device on",
        "--tensor-parallel-size -tp",
        least=1,
    )
    max_loras: int = flag(4, "most LoRA adapters loaded at once; 0 for none", least=0)
    block_tokens: int = flag(16, "tokens per KV block", "--block-size", least=1)
    gpu_blocks: int = flag(
        1024,
        "KV blocks in the pool, on the device, also where that is a CPU",
        "--num-gpu-blocks --gpu-blocks --num-gpu-blocks-override",
        least=1,
    )
    cpu_blocks: int = flag(0, "KV blocks in the host tier; 0 for none", least=0)
    cpu_gib: float | None = flag(None, "the same as GiB of host memory")
    max_model_len: int | None = flag(
        None, "most tokens of prompt and answer together", default_text="the model's own", least=1
    )
    enable_prefix_caching: bool = flag(
        True, "reuse blocks between requests, and announce them", default_text="they are"
    )
    max_num_seqs: int = flag(64, "most requests running at once", least=1)
    max_num_batched_tokens: int = flag(2048, "token budget of one step", least=1)
    max_waiting: int = flag(
        1024, "most requests waiting; one more is refused", "--max-num-queued-reqs", least=1
    )
    scheduling_policy: SchedulingPolicy = flag(
        "aged",
        "order of prefills: by arrival, by the request's priority, or by arrival plus ten times the "
        "prefill's own seconds",
    )
    preemption_mode: PreemptionMode = flag(
        "recompute",
        "what a preempted request does to go on: compute again what is cached no more, or fetch its full "
        "blocks from the host tier, which holds them for it",
    )
    torch_threads: int | None = flag(
        None, "threads of one CPU operation", default_text="torch's choice", least=1
    )
    seed: int = flag(0, "seeds requests that bring no seed")

    def __post_init__(self) -> None:
        """Refuse what cannot work by a ConfigError."""
        check(self)
        self._check_tiers()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): not every running request could decode in one step; raise the first"
            )

    def _check_tiers(self) -> None:
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


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where and how events are published; names and defaults are those of vLLM's KVEventsConfig."""

    endpoint: str = flag(
        "tcp://*:5557",
        "PUB socket: bound if it holds * or ::, or is ipc or inproc; otherwise connected",
        "--kv-events-endpoint",
        metavar="ENDPOINT",
    )
    replay_endpoint: str | None = flag(
        None,
        "ROUTER socket for replays, always bound; empty turns replay off",
        "--kv-replay-endpoint",
        metavar="ENDPOINT",
    )
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that wait for one slow subscriber before its newest are dropped
    max_queue_size: int = 100_000  # batches that wait for the thread that sends before the oldest are dropped
    topic: str = flag(
        "", "first frame", "--kv-events-topic", default_text="kv@HOST:PORT@MODEL", metavar="TOPIC"
    )
    # Not vLLM's, but without it nothing can be published on a loopback address alone.
    always_bind: bool = flag(
        False, "bind --kv-events-endpoint whatever it is, a loopback address too", "--kv-events-bind"
    )

    def __post_init__(self) -> None:
        """Refuse what cannot work by a ConfigError."""
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"KV events: {name} is {getattr(self, name)}; it must be at least 1")

    def announced(self) -> dict[str, object]:
        """Return the settings as vLLM's /kv_event_sources shows them."""
        settings = asdict(self)
        del settings["always_bind"]
        return {"enable_kv_cache_events": True, "publisher": "zmq", **settings}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to run one model server."""

    engine: EngineConfig  # the engine's settings
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 lets the system choose", read=tcp_port)
    served_names: tuple[str, ...] = flag(
        (),
        "names the API knows the model by, the main one first",
        "--served-model-name",
        default_text="the tiny model's name, or the directory's",
        metavar="NAME",
    )
    # Where KV events go; None for no events. An empty topic becomes ``kv@host:port@model``.
    events: KVEventsConfig | None = None
    max_body_bytes: int = flag(_MAX_BODY_BYTES, "refuse larger HTTP bodies", read=positive)
    api_key: str | None = flag(None, "refuse API requests without it", metavar="KEY", repr=False)
    admin_port: int | None = flag(
        None,
        "port of administration (sleep, cache reset, adapters) and snapshots, none of which the serving "
        "port answers; 0 lets the system choose",
        default_text="they are not served",
        read=tcp_port,
        metavar="PORT",
    )
    # What must be sent to the administration port; None lets everybody in who reaches it.
    admin_token: str | None = field(default=None, repr=False)
    runtime_loras: bool = flag(
        False,
        "let operators load adapters from this machine's directories at --admin-port",
        "--allow-runtime-lora-updating",
        default_text="they may not",
    )
