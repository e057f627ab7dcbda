"""The settings of a model server, each declared once: its default, its flag, its meaning; checked when made.

The names and defaults follow vLLM's flags where it has the same thing. Nothing here loads a model.
"""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from model_server.errors import ConfigError
from model_server.flags import Flag, check, positive, tcp_port

DType = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDType = Literal["auto", "fp8"]
SchedulingPolicy = Literal["fcfs", "priority", "aged"]
PreemptionMode = Literal["recompute", "swap"]
TINY_MODEL = "kvroute-tiny"

_MAX_BODY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine."""

    model: Annotated[str, Flag("a Hugging Face checkpoint directory, or the built-in tiny model")] = (
        TINY_MODEL
    )
    dtype: Annotated[DType, Flag("type of weights and KV cache; auto: the checkpoint's own")] = "auto"
    kv_cache_dtype: Annotated[
        KvCacheDType, Flag("type of the KV cache, if not --dtype: fp8 takes half the bytes of a 16-bit type")
    ] = "auto"
    device: Annotated[str, Flag("torch device")] = "cpu"
    tensor_parallel_size: Annotated[
        int,
        Flag(
            "processes that compute the model together, on CUDA each on a GPU of its own, from --device on",
            ("--tensor-parallel-size", "-tp"),
            least=1,
        ),
    ] = 1
    max_loras: Annotated[int, Flag("most LoRA adapters loaded at once; 0 for none", least=0)] = 4
    block_tokens: Annotated[int, Flag("tokens per KV block", ("--block-size",), least=1)] = 16
    gpu_blocks: Annotated[
        int,
        Flag(
            "KV blocks in the pool, on the device, also where that is a CPU",
            ("--num-gpu-blocks", "--gpu-blocks", "--num-gpu-blocks-override"),
            least=1,
        ),
    ] = 1024
    cpu_blocks: Annotated[int, Flag("KV blocks in the host tier; 0 for none", least=0)] = 0
    cpu_gib: Annotated[float | None, Flag("the same as GiB of host memory")] = None
    max_model_len: Annotated[
        int | None, Flag("most tokens of prompt and answer together", default_text="the model's own", least=1)
    ] = None
    enable_prefix_caching: Annotated[
        bool, Flag("reuse blocks between requests, and announce them", default_text="they are")
    ] = True
    max_num_seqs: Annotated[int, Flag("most requests running at once", least=1)] = 64
    max_num_batched_tokens: Annotated[int, Flag("token budget of one step", least=1)] = 2048
    max_waiting: Annotated[
        int, Flag("most requests waiting; one more is refused", ("--max-num-queued-reqs",), least=1)
    ] = 1024
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Flag(
            "order of prefills: by arrival, by the request's priority, or by arrival plus ten times the "
            "prefill's own seconds"
        ),
    ] = "aged"
    preemption_mode: Annotated[
        PreemptionMode,
        Flag(
            "what a preempted request does to go on: compute again what is cached no more, or fetch its full "
            "blocks from the host tier, which holds them for it"
        ),
    ] = "recompute"
    torch_threads: Annotated[
        int | None, Flag("threads of one CPU operation", default_text="torch's choice", least=1)
    ] = None
    seed: Annotated[int, Flag("seeds requests that bring no seed")] = 0

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

    endpoint: Annotated[
        str,
        Flag(
            "PUB socket: bound if it holds * or ::, or is ipc or inproc; otherwise connected",
            ("--kv-events-endpoint",),
            metavar="ENDPOINT",
        ),
    ] = "tcp://*:5557"
    replay_endpoint: Annotated[
        str | None,
        Flag(
            "ROUTER socket for replays, always bound; empty turns replay off",
            ("--kv-replay-endpoint",),
            metavar="ENDPOINT",
        ),
    ] = None
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that wait for one slow subscriber before its newest are dropped
    max_queue_size: int = 100_000  # batches that wait for the thread that sends before the oldest are dropped
    topic: Annotated[
        str, Flag("first frame", ("--kv-events-topic",), default_text="kv@HOST:PORT@MODEL", metavar="TOPIC")
    ] = ""
    # Not vLLM's, but without it nothing can be published on a loopback address alone.
    always_bind: Annotated[
        bool, Flag("bind --kv-events-endpoint whatever it is, a loopback address too", ("--kv-events-bind",))
    ] = False

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
    host: Annotated[str, Flag("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on; 0 lets the system choose", read=tcp_port)] = 8000
    served_names: Annotated[
        tuple[str, ...],
        Flag(
            "names the API knows the model by, the main one first",
            ("--served-model-name",),
            default_text="the tiny model's name, or the directory's",
            metavar="NAME",
        ),
    ] = ()
    # Where KV events go; None for no events. An empty topic becomes ``kv@host:port@model``.
    events: KVEventsConfig | None = None
    max_body_bytes: Annotated[int, Flag("refuse larger HTTP bodies", read=positive)] = _MAX_BODY_BYTES
    api_key: Annotated[str | None, Flag("refuse API requests without it", metavar="KEY")] = field(
        default=None, repr=False
    )
    admin_port: Annotated[
        int | None,
        Flag(
            "port of administration (sleep, cache reset, adapters) and snapshots, none of which the serving "
            "port answers; 0 lets the system choose",
            default_text="they are not served",
            read=tcp_port,
            metavar="PORT",
        ),
    ] = None
    # What must be sent to the administration port; None lets everybody in who reaches it.
    admin_token: str | None = field(default=None, repr=False)
    runtime_loras: Annotated[
        bool,
        Flag(
            "let operators load adapters from this machine's directories at --admin-port",
            ("--allow-runtime-lora-updating",),
            default_text="they may not",
        ),
    ] = False
