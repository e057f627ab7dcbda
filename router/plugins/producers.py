"""Data producers: the prefix matches and attributes that plugins read, and llm-d's parameters for them.

Parameters of the index, the tokenizers and the metrics source are translated into settings of this router.
Those without a counterpart, such as the maximum number of pods per block, are validated without effect. Those
of features that the router lacks are rejected with the alternative.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import xxhash
from msgspec import Meta, field

from indexer import ConfigError as IndexerConfigError
from indexer import IndexerConfig, StreamState
from indexer.pod_entry import is_path
from router.config.fields import Count, Duration, Settings, Share, Text, Whole
from router.config.kube import EVENT_PORT_MAX, KubeConfig
from router.config.picker_file import PickerConfig
from router.plugins.api import PrefixMatch
from router.pods.pod_set import DEFAULT_METRICS_PATH
from router.prompts.request import RouteRequest, agent_session_id

if TYPE_CHECKING:
    from indexer import PodMatches
    from router.picking.scheduler import TokenizedRequest

# Average size of a token, as llm-d assumes without a tokenizer.
_TOKEN_BYTES = 4
_BLOCK_TOKENS_MIN = 64

_PRECISE = ("precise-prefix-cache-producer", "precise-prefix-cache-scorer")
_TOKENS = ("token-producer", "tokenizer")
_MEMORY_UNITS = {"": 1} | {
    f"{letter}{infix}": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}
_MEMORY = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kmgt]?i?)b?", re.ASCII | re.IGNORECASE)

_Engine = Literal["vllm", "sglang"]
_Port = Annotated[int, Meta(ge=0, le=EVENT_PORT_MAX)]
_BlockTokens = Annotated[int, Meta(ge=1, le=1 << 16)]


class PrecisePrefix:
    """Prefix matches from the index, which follows the engines' KV events."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def matches(
        self, tokenized: TokenizedRequest, matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        """Return the match of each pod, summed over the prompts of a request."""
        found, blocks = {}, sum(map(len, tokenized.keys)) if matches else 0
        for pod in pods:
            pod_matches = [match[pod] for match in matches]
            weighted_blocks = sum(match.weighted_blocks for match in pod_matches)
            cached_blocks = sum(match.cached_blocks for match in pod_matches)
            found[pod] = PrefixMatch(weighted_blocks, blocks, cached_blocks, self._block_tokens)
        return found

    def dispatched(self, pods: Sequence[str], known: Collection[str]) -> None:
        """Do nothing: KV events report the stored blocks."""


class ApproximatePrefix(Settings):
    """Prefix matches from past picks: an LRU list of prompt block hashes per pod."""

    auto_tune: bool = True  # accepted without effect
    block_size_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 16  # of 4 bytes each; at least 64 are used
    max_prefix_blocks_to_match: Annotated[int, Meta(ge=1, le=1 << 20)] = 2048  # longest prefix matched
    max_prefix_tokens_to_match: Whole = 131_072
    lru_capacity_per_server: Annotated[int, Meta(ge=1, le=10_000_000)] = 31_250  # blocks per pod

    def __post_init__(self) -> None:
        self._block_tokens = max(self.block_size_tokens, _BLOCK_TOKENS_MIN)
        by_tokens = self.max_prefix_tokens_to_match // self._block_tokens
        self._blocks_max = min(self.max_prefix_blocks_to_match, by_tokens or self.max_prefix_blocks_to_match)
        self._sent_keys: dict[str, OrderedDict[int, None]] = {}
        self._request_keys: Sequence[int] = ()

    def matches(
        self, tokenized: TokenizedRequest, _matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        # Kept until `dispatched`, as one request is scheduled at a time.
        self._request_keys = self._keys(tokenized.request)
        return {pod: self._match(self._request_keys, self._sent_keys.get(pod, {})) for pod in pods}

    def dispatched(self, pods: Sequence[str], known: Collection[str]) -> None:
        """Record that the last matched request was sent to `pods`; drop pods that are not in `known`."""
        for gone in self._sent_keys.keys() - set(known):
            del self._sent_keys[gone]
        for pod in pods:
            sent = self._sent_keys.setdefault(pod, OrderedDict())
            for key in self._request_keys:
                sent[key] = None
                sent.move_to_end(key)
            while len(sent) > self.lru_capacity_per_server:
                sent.popitem(last=False)

    def state(self) -> dict[str, int]:
        return {pod: len(sent) for pod, sent in self._sent_keys.copy().items()}

    def _keys(self, request: RouteRequest) -> Sequence[int]:
        """Return the chained hashes of the full blocks of the request's text."""
        content = request.body.get("messages", request.body.get("prompt", request.body.get("input")))
        if content is None:
            return ()
        is_text = isinstance(content, str)
        data = content.encode("utf-8", "replace") if is_text else msgspec.json.encode(content)
        size, found = self._block_tokens * _TOKEN_BYTES, []
        key = xxhash.xxh3_64_intdigest((request.model or "").encode("utf-8", "replace"))
        for start in range(0, min(len(data), self._blocks_max * size) - size + 1, size):
            key = xxhash.xxh3_64_intdigest(data[start : start + size], key)
            found.append(key)
        return found

    def _match(self, keys: Sequence[int], sent: Mapping[int, None]) -> PrefixMatch:
        blocks = len(list(takewhile(sent.__contains__, keys)))
        return PrefixMatch(float(blocks), len(keys), blocks, self._block_tokens)


class ImpliedPrefix:
    """Prefix matches where no producer is configured: of the index for EXACT views, else of past picks.

    llm-d uses past picks alone, which are unknown after a restart and do not show evictions.
    """

    def __init__(self, block_tokens: int) -> None:
        self._precise, self._past = PrecisePrefix(block_tokens), ApproximatePrefix()
        self.dispatched, self.state = self._past.dispatched, self._past.state

    def matches(
        self, tokenized: TokenizedRequest, matches: Sequence[PodMatches], pods: Sequence[str]
    ) -> Mapping[str, PrefixMatch]:
        known = [pod for pod in pods if matches and matches[0].state(pod) is StreamState.EXACT]
        past = self._past.matches(tokenized, matches, pods)
        return {**past, **self._precise.matches(tokenized, matches, known)}


class AgentIdentity(Settings):
    """Attribute from an agent's session header, also used as the fairness id."""

    def attribute(self, headers: Mapping[str, str]) -> str | None:
        return agent_session_id(headers)


class SessionIdProducer(Settings):
    """Attribute with the session id from a header or a cookie."""

    header_name: Text | None = None
    cookie_name: Text | None = None

    def __post_init__(self) -> None:
        if (self.header_name is None) == (self.cookie_name is None):
            raise ValueError("headerName: give either headerName or cookieName")

    def attribute(self, headers: Mapping[str, str]) -> str | None:
        if self.header_name is not None:
            return headers.get(self.header_name.lower())
        return _cookie_value(headers.get("cookie", ""), self.cookie_name or "") or None


# Computes the cached prefix of a prompt per pod.
PrefixProducer = PrecisePrefix | ApproximatePrefix | ImpliedPrefix
AttributeProducer = AgentIdentity | SessionIdProducer  # computes an attribute from the headers


def _cookie_value(header: str, name: str) -> str:
    """Return the value of a cookie in a request's cookie header; "" if it is missing."""
    for pair in header.split(";"):
        key, equals, value = pair.strip().partition("=")
        if equals and key == name:
            return value.strip('"')
    return ""


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
        found = _MEMORY.fullmatch(self.size)
        # Memory limit of the index.
        self.size_bytes = int(float(found[1]) * _MEMORY_UNITS.get(found[2].lower(), 0)) if found else 0
        if not self.size_bytes:
            raise ValueError(f"size: expected a size such as 2GiB or 500MB, got {self.size[:100]!r}")


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
