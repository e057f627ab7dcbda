"""Settings of a model server with their flags, named as in vLLM where vLLM has the same setting."""

from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.flags import ADMIN_TOKEN_VARIABLE, file_flag, flag, pair, positive
from common.flags import port as tcp_port
from model_server.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
KvCacheDType = Literal["auto", "fp8"]
AttentionBackend = Literal["auto", "triton", "torch"]
SchedulingPolicy = Literal["fcfs", "priority", "aged"]
PreemptionMode = Literal["recompute", "swap"]
TINY_MODEL = "kvroute-tiny"
API_KEY_VARIABLE = "KVROUTE_API_KEY"
REPLAY_ENDPOINT = "tcp://*:5558"

EVENTS_GROUP = "KV cache events (ZMQ, as vLLM's)"  # heading in `--help`
_server_flag = partial(flag, "server")
_engine_flag = partial(flag, "engine")
_events_flag = partial(flag, EVENTS_GROUP)
# Defaults by device. As many blocks as fit are found when the model is loaded.
_DEVICE_DEFAULTS: dict[str, dict[str, float]] = {
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9},
}
_CPU_BLOCKS = 1024
_ZERO_OR_MORE = frozenset({"max_loras", "cpu_blocks"})
_SETTINGS = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine."""

    model: str = _engine_flag(
        "--model", str, TINY_MODEL, "Hugging Face checkpoint directory, or the built-in tiny model"
    )
    dtype: DType = _engine_flag(
        "--dtype", DType, "auto", "type of weights and KV cache; auto: that of the checkpoint"
    )
    kv_cache_dtype: KvCacheDType = _engine_flag(
        "--kv-cache-dtype",
        KvCacheDType,
        "auto",
        "type of the KV cache; auto: that of --dtype; fp8: half the bytes of a 16-bit type",
    )
    device: str = _engine_flag("--device", str, "cpu", "torch device")
    attention_backend: AttentionBackend = _engine_flag(
        "--attention-backend",
        AttentionBackend,
        "auto",
        "implementation of attention; auto: Triton kernels on CUDA, a compiled kernel on a CPU; torch: "
        "operators of torch, slow",
    )
    enforce_eager: bool = _engine_flag(
        "--enforce-eager", bool, False, "capture no CUDA graphs: slower decodes, less memory, faster start"
    )
    tensor_parallel_size: int = _engine_flag(
        "--tensor-parallel-size -tp",
        int,
        1,
        "processes that compute the model together; on CUDA each uses one GPU, counted from --device",
    )
    max_loras: int = _engine_flag("--max-loras", int, 4, "maximum of loaded LoRA adapters; 0: none")
    block_tokens: int = _engine_flag("--block-size", int, 16, "tokens per KV block")
    gpu_blocks: int | None = _engine_flag(
        "--num-gpu-blocks --gpu-blocks --num-gpu-blocks-override",
        int,
        None,
        "KV blocks of the device pool (default: as many as fit; on a CPU 1024, without the next flag)",
    )
    gpu_memory_utilization: float | None = _engine_flag(
        "--gpu-memory-utilization",
        float,
        None,
        "share of the GPU's memory for weights, steps and KV blocks (default: 0.9); on a CPU, the share of "
        "the free memory for KV blocks",
        metavar="SHARE",
    )
    cpu_blocks: int = _engine_flag("--cpu-blocks", int, 0, "KV blocks of the host tier; 0: no host tier")
    cpu_gib: float | None = _engine_flag(
        "--cpu-gib", float, None, "size of the host tier in GiB, instead of --cpu-blocks", metavar="GIB"
    )
    max_model_len: int | None = _engine_flag(
        "--max-model-len", int, None, "maximum of prompt and output tokens (default: that of the model)"
    )
    enable_prefix_caching: bool = _engine_flag(
        "--enable-prefix-caching",
        bool,
        True,
        "reuse blocks across requests, and publish events about them (default: on)",
    )
    max_num_seqs: int = _engine_flag(
        "--max-num-seqs", int, None, "maximum of running requests (default: 256 on CUDA, 64 on a CPU)"
    )
    max_num_batched_tokens: int = _engine_flag(
        "--max-num-batched-tokens",
        int,
        None,
        "token budget of one step (default: 8192 on CUDA, 2048 on a CPU)",
    )
    max_waiting: int = _engine_flag(
        "--max-num-queued-reqs", int, 1024, "maximum of waiting requests; further requests are rejected"
    )
    scheduling_policy: SchedulingPolicy = _engine_flag(
        "--scheduling-policy",
        SchedulingPolicy,
        "aged",
        "order of prefills: by arrival, by the priority of the request, or by arrival plus ten times the "
        "estimated prefill time",
    )
    preemption_mode: PreemptionMode = _engine_flag(
        "--preemption-mode",
        PreemptionMode,
        "recompute",
        "how a preempted request resumes: recompute tokens that are no longer cached, or swap its full "
        "blocks to the host tier and back",
    )
    torch_threads: int | None = _engine_flag(
        "--torch-threads", int, None, "threads of one CPU operation (default: chosen by torch)"
    )
    seed: int = _engine_flag("--seed", int, 0, "seed of requests without a seed of their own")

    def __post_init__(self) -> None:
        """Set what depends on the device, and check the settings; raises a ConfigError."""
        for name, value in _DEVICE_DEFAULTS["cuda" if self.on_cuda else "cpu"].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.gpu_blocks is None and self.gpu_memory_utilization is None:
            object.__setattr__(self, "gpu_blocks", _CPU_BLOCKS)
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0, at most 1"
            )
        for setting in fields(self):
            name, value, options = setting.name, getattr(self, setting.name), setting.metadata["options"]
            choices, least = options.get("choices"), int(name not in _ZERO_OR_MORE)
            if choices and value not in choices:
                raise ConfigError(f"{name} is {value!r}; use one of {', '.join(choices)}")
            if options.get("type") is int and name != "seed" and value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
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
                "preemption_mode is 'swap', but enable_prefix_caching is off, which finds swapped blocks "
                "again; turn it on, or use 'recompute'"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is less than max_num_seqs "
                f"({self.max_num_seqs}): one step could not decode every running request; raise the former"
            )

    @property
    def on_cuda(self) -> bool:
        """Whether the model runs on a GPU."""
        return self.device.partition(":")[0] == "cuda"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Settings of the KV event publisher; names and defaults follow vLLM's KVEventsConfig."""

    endpoint: str = _events_flag(
        "--kv-events-endpoint",
        str,
        "tcp://*:5557",
        "PUB socket: bound if the address contains * or ::, or is ipc or inproc; otherwise connected",
        metavar="ENDPOINT",
    )
    replay_endpoint: str | None = _events_flag(
        "--kv-replay-endpoint",
        str,
        None,
        f"ROUTER socket for replays, always bound; empty: no replays (default: {REPLAY_ENDPOINT})",
        metavar="ENDPOINT",
    )
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches queued for a slow subscriber; further batches to it are dropped
    max_queue_size: int = 100_000  # batches queued for the publisher thread; the oldest are dropped
    topic: str = _events_flag(
        "--kv-events-topic",
        str,
        "",
        "first frame of a message (default: kv@HOST:PORT@MODEL)",
        metavar="TOPIC",
    )
    # Not a setting of vLLM. Without it, a publisher cannot bind to a loopback address alone.
    always_bind: bool = _events_flag(
        "--kv-events-bind", bool, False, "always bind --kv-events-endpoint, also to a loopback address"
    )

    @classmethod
    def of_vllm(cls, text: str) -> "KVEventsConfig | None":
        """Parse vLLM's `--kv-events-config`: a JSON object; None where it publishes no events.

        Raises:
            ConfigError: The text is no such object, or names an unknown setting.
        """
        try:
            settings = _SETTINGS.decode(text)
            enabled = msgspec.convert(settings.pop("enable_kv_cache_events", False), bool)
            publisher = msgspec.convert(settings.pop("publisher", None), Literal["zmq", "null"] | None)
            if unknown := settings.keys() - {field.name for field in fields(cls)}:
                raise ConfigError(f"--kv-events-config: unknown setting {min(unknown)}")
            config = msgspec.convert(settings, cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--kv-events-config: {error}") from error
        return config if enabled and publisher != "null" else None

    def as_vllm(self) -> dict[str, object]:
        """Return the settings in the form of vLLM's /kv_event_sources."""
        settings = asdict(self)
        del settings["always_bind"]
        return {"enable_kv_cache_events": True, "publisher": "zmq", **settings}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Settings of one model server."""

    engine: EngineConfig
    host: str = _server_flag("--host", str, "127.0.0.1", "address to listen on")
    port: int = _server_flag("--port", tcp_port, 8000, "port to listen on; 0: any free port")
    served_names: tuple[str, ...] = _server_flag(
        "--served-model-name",
        str,
        (),
        "model names of the API, the main one first (default: the tiny model's name, or the directory's)",
        nargs="+",
        metavar="NAME",
    )
    # None publishes no events. An empty topic becomes ``kv@host:port@model``.
    events: KVEventsConfig | None = None
    max_body_bytes: int = _server_flag(
        "--max-body-bytes",
        positive,
        16 << 20,
        "maximum size of HTTP request bodies; larger ones are rejected",
    )
    api_key: str | None = _server_flag(
        "--api-key",
        str,
        None,
        f"bearer token that API requests must carry (default: ${API_KEY_VARIABLE}, which other users of "
        "the machine cannot read)",
        metavar="KEY",
        repr=False,
    )
    admin_port: int | None = _server_flag(
        "--admin-port",
        tcp_port,
        None,
        "port for administration (sleep, cache reset, adapters) and snapshots, which the serving port never "
        "answers; 0: any free port (default: not served)",
        metavar="PORT",
    )
    # The command reads the file. None accepts every client that reaches the port.
    admin_token: str | None = file_flag(
        "server",
        "--admin-token-file",
        "file with the secret that requests to --admin-port must carry as Authorization: Bearer SECRET "
        f"(default: ${ADMIN_TOKEN_VARIABLE}; without either, every client that reaches the port is accepted)",
        repr=False,
    )
    lora_modules: tuple[tuple[str, Path], ...] = _server_flag(
        "--lora-modules",
        pair(Path),
        (),
        "LoRA adapters to load at start, with their directories",
        nargs="+",
        metavar="NAME=DIRECTORY",
    )
    runtime_loras: bool = _server_flag(
        "--allow-runtime-lora-updating",
        bool,
        False,
        "let --admin-port load adapters from directories of this machine (default: off)",
    )
