"""What the reference's producers are told, as settings of ours: a PickerConfig and settings in, settings out.

Parameters that have no counterpart because the matter does not arise here (a cap on pods of a block, the
form of block keys) are checked and change nothing; those that ask for something else are refused with what
there is. The same of its metrics source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from indexer import ConfigError as IndexerConfigError
from indexer import IndexerConfig
from indexer.config import RANKS_MAX
from indexer.pod_entry import is_path
from router.config_fields import Fields
from router.config_file import PickerConfig, PluginEntry
from router.kube.config import KubeConfig
from router.metrics_page import DEFAULT_PATH

_PRECISE = ("precise-prefix-cache-producer", "precise-prefix-cache-scorer")
_TOKENS = ("token-producer", "tokenizer")
_PRECISE_FIELDS = (
    "tokenProcessorConfig",
    "indexerConfig",
    "kvEventsConfig",
    "speculativeIndexing",
    "speculativeTTL",
)
_EVENT_FIELDS = (
    "zmqEndpoint",
    "topicFilter",
    "concurrency",
    "engineType",
    "tracing",
    "discoverPods",
    "podDiscoveryConfig",
)
_POD_FIELDS = ("podLabelSelector", "podNamespace", "socketPort", "replaySocketPort", "engineType")
_INDEX_FIELDS = ("kvBlockIndexConfig", "kvCacheBackendConfigs", "tokenizersPoolConfig")
_BLOCK_INDEX_FIELDS = (
    *("inMemoryConfig", "costAwareMemoryConfig", "redisConfig", "valkeyConfig"),
    *("enableMetrics", "metricsLoggingInterval"),
)
_BACKENDS: Mapping[str, str] = {
    "redisConfig": "--backend redis and --redis-url",
    "valkeyConfig": "--backend redis and --redis-url",
}
_ENGINES = ("vllm", "sglang")
_MEMORY_BYTES = 2 << 30
_MEMORY_UNITS = {"": 1} | {
    f"{letter}{infix}": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kmgt", 1)
}
_MEMORY = re.compile(r"(\d{1,12}(?:\.\d{1,6})?) ?([kmgt]?i?)b?", re.ASCII | re.IGNORECASE)
_PORT_MAX = 65_535 - RANKS_MAX


def with_producers(
    picker: PickerConfig, index: IndexerConfig, kube: KubeConfig | None
) -> tuple[IndexerConfig, KubeConfig | None]:
    """The settings of index and discovery, with what precise producers say.

    Raises:
        ConfigError: Something is not understood, or has no counterpart; names the place.
    """
    for entry in picker.plugins.values():
        if entry.type in _PRECISE:
            index, kube = _precise(entry.parameters.only(*_PRECISE_FIELDS), index, kube)
    return index, kube


def tokenizers_of(picker: PickerConfig) -> dict[str, str]:
    """By model, where token producers say that its tokens come from.

    Raises:
        ConfigError: Something is not understood; names the place.
    """
    sources: dict[str, str] = {}
    for entry in picker.plugins.values():
        if entry.type in _TOKENS and (source := _source(entry)) is not None:
            sources[entry.parameters.text("modelName")] = source
    return sources


def metrics_path_of(picker: PickerConfig) -> str:
    """Where the metrics source says that pods tell their load; of several the last counts.

    Raises:
        ConfigError: Something is not understood; names the place.
    """
    path = DEFAULT_PATH
    for entry in picker.plugins.values():
        if entry.type == "metrics-data-source":
            known = entry.parameters.only("scheme", "path", "insecureSkipVerify", "interval")
            known.choice("scheme", ("http",), "http")
            path = known.text("path", path)
            if not is_path(path):
                known.fail("path", f"must be a path as /metrics, is {path[:100]!r}")
    return path


def _source(entry: PluginEntry) -> str | None:
    known = entry.parameters.only("modelName", "vllm", "estimate", "udsTokenizerConfig")
    if "udsTokenizerConfig" in known:
        known.fail("udsTokenizerConfig", "is not understood; give --tokenizer MODEL=unix:PATH")
    if "vllm" not in known:
        return None
    server = known.fields("vllm", ("url", "timeout", "mmTimeout"))
    # How long a pick waits is --tokenize-deadline-ms, for all of them.
    server.duration_s("timeout", 5.0)
    server.duration_s("mmTimeout", 30.0)
    return server.text("url", "http://localhost:8000")


def _precise(
    known: Fields, index: IndexerConfig, kube: KubeConfig | None
) -> tuple[IndexerConfig, KubeConfig | None]:
    speculates = known.flag("speculativeIndexing", True)
    tokens = known.fields(
        "tokenProcessorConfig", ("blockSizeTokens", "blockSize", "hashSeed", "hashAlgorithm")
    )
    tokens.text("hashSeed", "-")
    tokens.choice("hashAlgorithm", ("cbor-fnv", "xxh64"), "cbor-fnv")
    size = "blockSizeTokens" if "blockSizeTokens" in tokens else "blockSize"
    events = known.fields("kvEventsConfig", _EVENT_FIELDS)
    events.whole("concurrency", 4, least=1)
    events.choice("engineType", _ENGINES, "vllm")
    events.flag("discoverPods", True)
    events.flag("tracing", False)
    try:
        index = replace(
            index,
            block_tokens=tokens.whole(size, index.block_tokens, least=1, most=1 << 16),
            speculative_ttl_s=known.duration_s("speculativeTTL", index.speculative_ttl_s),
            speculative_entries=index.speculative_entries if speculates else 0,
            tier_weights=_weights(known, index),
            capacity_bytes=_memory_bytes(known, index.capacity_bytes),
            topic_prefix=events.text("topicFilter") if "topicFilter" in events else index.topic_prefix,
            events_bind=events.text("zmqEndpoint") if "zmqEndpoint" in events else index.events_bind,
        )
    except IndexerConfigError as error:
        known.fail("", str(error))
    return index, _ports(events.fields("podDiscoveryConfig", _POD_FIELDS), kube)


def _memory_bytes(known: Fields, default: int) -> int:
    """Return the index's memory ceiling: that of `costAwareMemoryConfig`, or the default without one."""
    blocks = known.fields("indexerConfig", _INDEX_FIELDS).fields("kvBlockIndexConfig", _BLOCK_INDEX_FIELDS)
    for name, instead in _BACKENDS.items():
        if name in blocks:
            blocks.fail(name, f"is not understood; give {instead}")
    memory = blocks.fields("inMemoryConfig", ("size", "podCacheSize"))
    memory.whole("size", 1, least=1)
    memory.whole("podCacheSize", 10, least=1)
    if "costAwareMemoryConfig" not in blocks:
        return default
    ceiling = blocks.fields("costAwareMemoryConfig", ("size",))
    if "size" not in ceiling:
        return _MEMORY_BYTES
    found = _MEMORY.fullmatch(ceiling.text("size"))
    unit = found and _MEMORY_UNITS.get(found[2].lower())
    if not found or not unit:
        ceiling.fail("size", f"must be a size such as 2GiB or 500MB, is {ceiling.text('size')[:100]!r}")
    return int(float(found[1]) * unit)


def _weights(known: Fields, index: IndexerConfig) -> Mapping[str, float]:
    config = known.fields("indexerConfig", _INDEX_FIELDS)
    if "tokenizersPoolConfig" in config:
        config.fail("tokenizersPoolConfig", "is not understood; give --tokenizer MODEL=SOURCE")
    weights = {
        item.text("name"): item.number("weight", 1.0, most=1.0)
        for item in config.each("kvCacheBackendConfigs", ("name", "weight"))
    }
    return {**index.tier_weights, **weights}


def _ports(pods: Fields, kube: KubeConfig | None) -> KubeConfig | None:
    """Which pods there are is said by discovery; where they publish may be said here, too."""
    pods.text("podLabelSelector", "-")
    pods.text("podNamespace", "-")
    pods.choice("engineType", _ENGINES, "vllm")
    events_port = pods.whole("socketPort", 0, most=_PORT_MAX)
    replay_port = pods.whole("replaySocketPort", 0, most=_PORT_MAX)
    if kube is None:
        return None
    return replace(
        kube,
        events_port=events_port or kube.events_port,
        replay_port=replay_port if "replaySocketPort" in pods else kube.replay_port,
    )
