"""Parameters of llm-d's data producers and metrics source, translated into settings of this router.

Parameters without a counterpart, such as the maximum number of pods per block, are validated without effect.
Parameters of features that the router lacks are rejected with the alternative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field

from indexer import ConfigError as IndexerConfigError
from indexer import IndexerConfig
from indexer.config import RANKS_MAX
from indexer.pod_entry import is_path
from router.config.fields import Count, Duration, Settings, Share, Text
from router.config.kube import KubeConfig
from router.config.picker_file import PickerConfig
from router.pods.pod_set import DEFAULT_METRICS_PATH

_PRECISE = ("precise-prefix-cache-producer", "precise-prefix-cache-scorer")
_TOKENS = ("token-producer", "tokenizer")
_PORT_MAX = 65_535 - RANKS_MAX
_MEMORY_UNITS = {"": 1} | {
    f"{letter}{infix}": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}
_MEMORY = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kmgt]?i?)b?", re.ASCII | re.IGNORECASE)

_Engine = Literal["vllm", "sglang"]
_Port = Annotated[int, Meta(ge=0, le=_PORT_MAX)]
_BlockTokens = Annotated[int, Meta(ge=1, le=1 << 16)]


class _TokenProcessor(Settings):
    block_size_tokens: _BlockTokens | None = None
    block_size: _BlockTokens | None = None
    hash_seed: Text = "-"
    hash_algorithm: Literal["cbor-fnv", "xxh64"] = "cbor-fnv"


class _Memory(Settings):
    size: Count = 1
    pod_cache_size: Count = 10


class _CostAware(Settings):
    size: Text = "2GiB"

    def __post_init__(self) -> None:
        if not self.size_bytes:
            raise ValueError(f"size: expected a size such as 2GiB or 500MB, got {self.size[:100]!r}")

    @property
    def size_bytes(self) -> int:
        """Return the memory limit of the index in bytes; 0 if `size` is invalid."""
        found = _MEMORY.fullmatch(self.size)
        return int(float(found[1]) * _MEMORY_UNITS.get(found[2].lower(), 0)) if found else 0


class _Redis(Settings):
    address: Text = "127.0.0.1:6379"
    backend_type: Literal["redis", "valkey"] | None = None
    enable_rdma: bool = field(default=False, name="enableRDMA")


class _Blocks(Settings):
    in_memory_config: _Memory = field(default_factory=_Memory)
    cost_aware_memory_config: _CostAware | None = None
    redis_config: _Redis | None = None
    valkey_config: _Redis | None = None
    enable_metrics: Any = None
    metrics_logging_interval: Any = None

    @property
    def redis_url(self) -> str | None:
        """Return the server's URL; None without one, or if llm-d would prefer another backend."""
        if self.cost_aware_memory_config is not None:
            return None
        for scheme, server in (("valkey", self.valkey_config), ("redis", self.redis_config)):
            if server is not None:
                address = server.address
                return address if "://" in address else f"{server.backend_type or scheme}://{address}"
        return None


class _Tier(Settings):
    name: Text
    weight: Share = 1.0


class _Index(Settings):
    instead: ClassVar[Mapping[str, str]] = {"tokenizersPoolConfig": "give --tokenizer MODEL=SOURCE"}

    kv_block_index_config: _Blocks = field(default_factory=_Blocks)
    kv_cache_backend_configs: tuple[_Tier, ...] = ()


class _Pods(Settings):
    pod_label_selector: Text = "-"
    pod_namespace: Text = "-"
    socket_port: _Port = 0
    replay_socket_port: _Port | None = None
    engine_type: _Engine = "vllm"


class _Events(Settings):
    zmq_endpoint: Text | None = None
    topic_filter: Text | None = None
    concurrency: Count = 4
    engine_type: _Engine = "vllm"
    tracing: bool = False
    discover_pods: bool = True
    pod_discovery_config: _Pods = field(default_factory=_Pods)


class _Precise(Settings):
    token_processor_config: _TokenProcessor = field(default_factory=_TokenProcessor)
    indexer_config: _Index = field(default_factory=_Index)
    kv_events_config: _Events = field(default_factory=_Events)
    speculative_indexing: bool = True
    speculative_ttl: Duration | None = field(default=None, name="speculativeTTL")


class _Server(Settings):
    url: Text = "http://localhost:8000"
    timeout: Duration = Duration(5.0)  # without effect: --tokenize-deadline-ms limits the wait
    mm_timeout: Duration = Duration(30.0)


class TokenSettings(Settings):
    """Parameters of token producers."""

    instead: ClassVar[Mapping[str, str]] = {"udsTokenizerConfig": "give --tokenizer MODEL=unix:PATH"}

    model_name: Text | None = None
    vllm: _Server | None = None
    estimate: Any = None

    def __post_init__(self) -> None:
        if self.vllm is not None and self.model_name is None:
            raise ValueError("modelName: required with vllm")


class MetricsSettings(Settings):
    """Parameters of metrics-data-source."""

    scheme: Literal["http"] = "http"
    path: Text | None = None
    insecure_skip_verify: Any = None
    interval: Any = None

    def __post_init__(self) -> None:
        if self.path is not None and not is_path(self.path):
            raise ValueError(f"path: expected a path such as /metrics, got {self.path[:100]!r}")


def apply_producer_settings(
    picker: PickerConfig, index: IndexerConfig, kube: KubeConfig | None
) -> tuple[IndexerConfig, KubeConfig | None]:
    """Return the settings of index and discovery, overridden by the parameters of precise prefix producers.

    Raises:
        ConfigError: A parameter is invalid or not supported; names its line.
    """
    for entry in picker.plugins.values():
        if entry.type in _PRECISE:
            precise = entry.parameters_section.read(_Precise)
            try:
                index = _index(precise, index)
            except IndexerConfigError as error:
                entry.parameters_section.fail("", str(error))
            kube = _ports(precise.kv_events_config.pod_discovery_config, kube)
    return index, kube


def tokenizer_sources(picker: PickerConfig) -> dict[str, str]:
    """Return the tokenizer URL by model, from the parameters of token producers.

    Raises:
        ConfigError: A parameter is invalid; names its line.
    """
    settings = [
        entry.parameters_section.read(TokenSettings)
        for entry in picker.plugins.values()
        if entry.type in _TOKENS
    ]
    return {one.model_name: one.vllm.url for one in settings if one.model_name and one.vllm}


def metrics_path(picker: PickerConfig) -> str:
    """Return the path of the pods' metrics page; the last metrics source takes precedence.

    Raises:
        ConfigError: A parameter is invalid; names its line.
    """
    path = DEFAULT_METRICS_PATH
    for entry in picker.plugins.values():
        if entry.type == "metrics-data-source":
            path = entry.parameters_section.read(MetricsSettings).path or path
    return path


def _index(precise: _Precise, index: IndexerConfig) -> IndexerConfig:
    tokens, events = precise.token_processor_config, precise.kv_events_config
    weights = {tier.name: tier.weight for tier in precise.indexer_config.kv_cache_backend_configs}
    blocks = precise.indexer_config.kv_block_index_config
    ceiling, redis_url = blocks.cost_aware_memory_config, blocks.redis_url
    return replace(
        index,
        backend=index.backend if redis_url is None else "redis",
        redis_url=index.redis_url or redis_url,
        block_tokens=tokens.block_size_tokens or tokens.block_size or index.block_tokens,
        speculative_ttl_s=index.speculative_ttl_s
        if precise.speculative_ttl is None
        else precise.speculative_ttl,
        speculative_entries=index.speculative_entries if precise.speculative_indexing else 0,
        tier_weights={**index.tier_weights, **weights},
        capacity_bytes=index.capacity_bytes if ceiling is None else ceiling.size_bytes,
        topic_prefix=events.topic_filter or index.topic_prefix,
        events_bind=events.zmq_endpoint or index.events_bind,
    )


def _ports(pods: _Pods, kube: KubeConfig | None) -> KubeConfig | None:
    """Return the discovery settings with the event and replay ports of a producer."""
    if kube is None:
        return None
    replay_port = pods.replay_socket_port
    return replace(
        kube,
        events_port=pods.socket_port or kube.events_port,
        replay_port=kube.replay_port if replay_port is None else replay_port,
    )
