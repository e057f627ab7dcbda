"""Parameters of llm-d's data producers and sources, translated into settings of this router.

Those without a counterpart, such as the maximum number of pods per block, have no effect, and the router says
so at start. Those of features that the router lacks are rejected with the alternative.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from msgspec import Meta, field

from indexer import ConfigError as IndexerConfigError
from indexer import IndexerConfig
from indexer.pod_entry import is_path
from router.config.fields import Duration, Settings, Share, Text
from router.config.kube import EVENT_PORT_MAX, KubeConfig
from router.config.picker_file import PickerConfig
from router.pods.pod_set import MetricsPage
from router.prompts.tokenizer_sources import model_directories

_PRECISE = ("precise-prefix-cache-producer", "precise-prefix-cache-scorer")
_TOKENS = ("token-producer", "tokenizer")
_MEMORY_UNITS = {"": 1} | {
    f"{letter}{infix}": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}
_MEMORY = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kmgt]?i?)b?", re.ASCII | re.IGNORECASE)

_OWN_KEYS = Meta(description="keys are kvroute's own; engines may use any")
_METRICS = Meta(description="metrics are always on")
_ENGINE = Meta(description="the label llm-d.ai/engine-type and the events tell a pod's engine")
_PLAINTEXT = Meta(description="pods are read without TLS")
_BY_NAMES = Meta(description="engines are known by the names of their metrics")
_DEADLINE = Meta(description="--tokenize-deadline-ms limits the wait")
_Port = Annotated[int, Meta(ge=0, le=EVENT_PORT_MAX)]
_BlockTokens = Annotated[int, Meta(ge=1, le=1 << 16)]


class _TokenProcessor(Settings):
    block_size_tokens: _BlockTokens | None = None
    block_size: _BlockTokens | None = None
    hash_seed: str = ""  # text whose hash is --hash-seed
    hash_algorithm: Annotated[Literal["cbor-fnv", "xxh64"], _OWN_KEYS] = "cbor-fnv"


class _Memory(Settings):
    size: Annotated[Any, Meta(description="--capacity-bytes limits the index")] = None
    pod_cache_size: Annotated[Any, Meta(description="all pods of a block are kept")] = None


class _CostAware(Settings):
    size: Text = "2GiB"

    def __post_init__(self) -> None:
        found = _MEMORY.fullmatch(self.size)
        # Memory limit of the index.
        self.size_bytes = int(float(found[1]) * _MEMORY_UNITS.get(found[2].lower(), 0)) if found else 0
        if not self.size_bytes:
            raise ValueError(f"size: expected a size such as 2GiB or 500MB, got {self.size[:100]!r}")


class _Redis(Settings):
    address: Text = "127.0.0.1:6379"
    backend_type: Literal["redis", "valkey"] | None = None
    enable_rdma: Annotated[Any, Meta(description="connections use TCP")] = field(
        default=None, name="enableRDMA"
    )


class _Blocks(Settings):
    in_memory_config: _Memory = field(default_factory=_Memory)
    cost_aware_memory_config: _CostAware | None = None
    redis_config: _Redis | None = None
    valkey_config: _Redis | None = None
    enable_metrics: Annotated[Any, _METRICS] = None
    metrics_logging_interval: Annotated[Any, _METRICS] = None

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


class _Uds(Settings):
    socket_file: Text = "/tmp/tokenizer/tokenizer-uds.socket"
    use_tcp: Literal[False] = field(default=False, name="useTCP")
    model_tokenizer_map: Annotated[Any, Meta(description="the process at the socket knows its models")] = None


class _Local(Settings):
    auto_discovery_dir: Text | None = None
    auto_discovery_tokenizer_file_name: Annotated[Any, Meta(description="it is tokenizer.json")] = None
    model_tokenizer_map: Mapping[str, Text] = {}


class _Hub(Settings):
    enabled: bool = True
    hugging_face_token: Annotated[Any, Meta(description="HF_TOKEN in the environment sets it")] = None
    tokenizers_cache_dir: Annotated[Any, Meta(description="HF_HOME in the environment sets it")] = None


class _TokenizersPool(Settings):
    """Tokenizers of older indexers of llm-d; of the sources for one model, local files take precedence."""

    model_name: Text | None = None
    workers_count: Annotated[Any, Meta(description="requests are tokenized on their own threads")] = None
    min_prefix_overlap_ratio: Annotated[Any, Meta(description="prompts are always tokenized whole")] = None
    local: _Local | None = None
    hf: _Hub | None = None
    uds: _Uds | None = None

    def __post_init__(self) -> None:
        if self.model_name is None and (self.uds or (self.hf and self.hf.enabled)):
            raise ValueError("modelName: required with hf and uds")

    def sources(self) -> dict[str, str]:
        """Return the tokenizer's source by model."""
        found: dict[str, str] = {}
        if self.model_name is not None:
            if self.uds is not None:
                found[self.model_name] = f"unix:{self.uds.socket_file}"
            elif self.hf is not None and self.hf.enabled:
                found[self.model_name] = f"hf:{self.model_name}@main"
        if self.local is not None:
            root = Path(self.local.auto_discovery_dir or "/mnt/models")
            if self.model_name is not None and (root / "tokenizer.json").is_file():
                found[self.model_name] = str(root)
            found |= model_directories(root)
            for model, path in self.local.model_tokenizer_map.items():
                found[model] = path.removesuffix("/tokenizer.json")
        return found


class _Index(Settings):
    kv_block_index_config: _Blocks = field(default_factory=_Blocks)
    kv_cache_backend_configs: tuple[_Tier, ...] = ()
    tokenizers_pool_config: _TokenizersPool | None = None
    prefix_store_config: Annotated[Any, Meta(description="tokens of prefixes are always kept")] = None
    # Where older configurations have these.
    token_processor_config: _TokenProcessor | None = None
    speculative_indexing: bool | None = None


class _Pods(Settings):
    pod_label_selector: Annotated[Any, Meta(description="the pods are those of the pool")] = None
    pod_namespace: Annotated[Any, Meta(description="the pods are those of the pool")] = None
    socket_port: _Port = 0
    replay_socket_port: _Port | None = None
    engine_type: Annotated[Any, _ENGINE] = None


class _Events(Settings):
    zmq_endpoint: Text | None = None
    topic_filter: Text | None = None
    concurrency: Annotated[Any, Meta(description="one thread reads all pods' events")] = None
    engine_type: Annotated[Any, _ENGINE] = None
    tracing: Annotated[Any, Meta(description="--tracing switches traces on")] = None
    discover_pods: bool = True
    pod_discovery_config: _Pods = field(default_factory=_Pods)


class PreciseSettings(Settings):
    """Prefix matches of the index, which follows the KV events; with parameters of the index."""

    token_processor_config: _TokenProcessor | None = None
    indexer_config: _Index = field(default_factory=_Index)
    kv_events_config: _Events = field(default_factory=_Events)
    speculative_indexing: bool | None = None  # None: on
    speculative_ttl: Duration | None = field(default=None, name="speculativeTTL")


class _Server(Settings):
    url: Text = "http://localhost:8000"
    timeout: Annotated[Any, _DEADLINE] = None
    mm_timeout: Annotated[Any, _DEADLINE] = None


class TokenSettings(Settings):
    """Source of prompts' token ids: a render endpoint, or a tokenizer in another process."""

    model_name: Text | None = None
    vllm: _Server | None = None
    uds_tokenizer_config: _Uds | None = None
    estimate: Annotated[Any, Meta(description="tokens are exact; unknown prompts are said to be so")] = None

    def __post_init__(self) -> None:
        if self.model_name is None and (self.vllm or self.uds_tokenizer_config):
            raise ValueError("modelName: required with vllm and udsTokenizerConfig")
        if self.vllm and self.uds_tokenizer_config:
            raise ValueError("vllm: excludes udsTokenizerConfig; give one of them")


class _PodPage(Settings):
    """Page of the pods, which is always read."""

    scheme: Literal["http"] = "http"
    insecure_skip_verify: Annotated[Any, _PLAINTEXT] = None
    ca_cert_path: Annotated[Any, _PLAINTEXT] = None
    client_cert_path: Annotated[Any, _PLAINTEXT] = None
    client_key_path: Annotated[Any, _PLAINTEXT] = None
    interval: Annotated[Any, Meta(description="--refresh-metrics-interval sets it")] = None


class ModelsSettings(_PodPage):
    """Parameters of models-data-source: the pods' /v1/models is always read, without TLS."""

    path: Annotated[Any, Meta(description="models are those of /v1/models")] = None


class _Engine(Settings, forbid_unknown_fields=False):
    name: Literal["vllm", "sglang", "trtllm-serve", "triton-tensorrt-llm", "triton"]


class MetricsExtractorSettings(Settings):
    """Parameters of core-metrics-extractor: engines are known by the names of their metrics."""

    engine_label_key: Annotated[Any, _BY_NAMES] = None
    default_engine: Annotated[Any, _BY_NAMES] = None
    engine_configs: Annotated[tuple[_Engine, ...], _BY_NAMES] = ()


class MetricsSettings(_PodPage):
    """Page and port of the pods' load metrics, which are always read."""

    path: Text | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None

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
            precise = entry.parameters_section.read(PreciseSettings)
            try:
                index = _index(precise, index)
            except IndexerConfigError as error:
                entry.parameters_section.fail("", str(error))
            if kube is not None:
                pods = precise.kv_events_config.pod_discovery_config
                port, replay_port = pods.socket_port or kube.events_port, pods.replay_socket_port
                replay_port = kube.replay_port if replay_port is None else replay_port
                kube = replace(kube, events_port=port, replay_port=replay_port)
    return index, kube


def tokenizer_sources(picker: PickerConfig) -> dict[str, str]:
    """Return the tokenizer's source by model; token producers take precedence over older parameters.

    Raises:
        ConfigError: A parameter is invalid; names its line.
    """
    found: dict[str, str] = {}
    for entry in sorted(picker.plugins.values(), key=lambda entry: entry.type in _TOKENS):
        if entry.type in _PRECISE:
            pool = entry.parameters_section.read(PreciseSettings).indexer_config.tokenizers_pool_config
            found |= pool.sources() if pool is not None else {}
        elif entry.type in _TOKENS:
            tokens = entry.parameters_section.read(TokenSettings)
            if tokens.model_name is not None and tokens.vllm is not None:
                found[tokens.model_name] = tokens.vllm.url
            elif tokens.model_name is not None and tokens.uds_tokenizer_config is not None:
                found[tokens.model_name] = f"unix:{tokens.uds_tokenizer_config.socket_file}"
    return found


def metrics_page_settings(picker: PickerConfig) -> MetricsPage:
    """Return the pods' metrics page; the last metrics source takes precedence.

    Raises:
        ConfigError: A parameter is invalid; names its line.
    """
    page = MetricsPage()
    for entry in picker.plugins.values():
        if entry.type == "metrics-data-source":
            source = entry.parameters_section.read(MetricsSettings)
            page = MetricsPage(source.path or page.path, source.port or page.port)
    return page


def _index(precise: PreciseSettings, index: IndexerConfig) -> IndexerConfig:
    events, older = precise.kv_events_config, precise.indexer_config
    tokens = precise.token_processor_config or older.token_processor_config or _TokenProcessor()
    speculates = precise.speculative_indexing
    speculates = older.speculative_indexing if speculates is None else speculates
    weights = {tier.name: tier.weight for tier in older.kv_cache_backend_configs}
    blocks, ttl_s = older.kv_block_index_config, precise.speculative_ttl
    ceiling, redis_url = blocks.cost_aware_memory_config, blocks.redis_url
    seed = index.hash_seed
    if seed is None and (tokens.hash_seed or redis_url is not None):
        seed = xxhash.xxh3_64_intdigest(tokens.hash_seed.encode())
    return replace(
        index,
        backend=index.backend if redis_url is None else "redis",
        redis_url=index.redis_url or redis_url,
        hash_seed=seed,
        block_tokens=tokens.block_size_tokens or tokens.block_size or index.block_tokens,
        speculative_ttl_s=index.speculative_ttl_s if ttl_s is None else ttl_s,
        speculative_entries=0 if speculates is False else index.speculative_entries,
        tier_weights={**index.tier_weights, **weights},
        capacity_bytes=index.capacity_bytes if ceiling is None else ceiling.size_bytes,
        topic_prefix=events.topic_filter or index.topic_prefix,
        events_bind=events.zmq_endpoint or index.events_bind,
    )
