"""Picker configurations of the reference's guides and tests: understood, or rejected with an alternative."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from router.app.config import parse_flags
from router.config.picker_file import parse_config
from router.errors import ConfigError
from router.picking.flow_queue import read_admitters, read_flow_settings
from router.plugins.build import build_pipeline, ignored_parameters
from router.plugins.labels import HeaderLabelScorer
from router.plugins.testkit import endpoint, request, scores

HEAD: dict[str, Any] = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
PODS = ["--pods-file", "/pods.yaml"]


def plugins(*types: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Return plugin entries, given by type or as they are."""
    return [{"type": one} if isinstance(one, str) else one for one in types]


def profile(name: str, *references: str | tuple[str, float]) -> dict[str, Any]:
    """Return a scheduling profile."""
    return {
        "name": name,
        "plugins": [
            {"pluginRef": one} if isinstance(one, str) else {"pluginRef": one[0], "weight": one[1]}
            for one in references
        ],
    }


def disagg(**parameters: Any) -> dict[str, Any]:
    """Return the handler of disaggregated serving."""
    return {"type": "disagg-profile-handler", "parameters": parameters}


KNOWN: dict[str, dict[str, Any]] = {
    "optimized baseline": {
        "plugins": plugins(
            "queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "no-hit-lru-scorer"
        ),
        "schedulingProfiles": [
            profile(
                "default",
                ("queue-scorer", 2),
                ("kv-cache-utilization-scorer", 2),
                ("prefix-cache-scorer", 3),
                ("no-hit-lru-scorer", 2),
            )
        ],
    },
    "tiers, one producer for each": {
        "plugins": plugins(
            "token-producer",
            {
                "type": "approx-prefix-cache-producer",
                "name": "cpu-prefix-cache-producer",
                "parameters": {"autoTune": False, "lruCapacityPerServer": 1000},
            },
            "queue-scorer",
            {"type": "prefix-cache-scorer", "name": "gpu"},
            {
                "type": "prefix-cache-scorer",
                "name": "cpu",
                "parameters": {"prefixMatchInfoProducerName": "cpu-prefix-cache-producer"},
            },
        ),
        "schedulingProfiles": [profile("default", ("queue-scorer", 2), ("gpu", 1.0), ("cpu", 1.0))],
    },
    "prefill and decode apart": {
        "plugins": plugins(
            "disagg-headers-handler",
            disagg(deciders={"prefill": "always-disagg-pd-decider"}),
            "always-disagg-pd-decider",
            "prefill-filter",
            "decode-filter",
            "prefix-cache-scorer",
            "queue-scorer",
            "active-request-scorer",
            "max-score-picker",
        ),
        "schedulingProfiles": [
            profile(
                "prefill",
                "prefill-filter",
                ("prefix-cache-scorer", 3),
                ("queue-scorer", 2),
                "max-score-picker",
            ),
            profile("decode", "decode-filter", ("active-request-scorer", 2), "max-score-picker"),
        ],
    },
    "the older form of the same": {
        "plugins": plugins(
            "prefill-header-handler",
            "prefill-filter",
            "decode-filter",
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16}},
            {
                "type": "pd-profile-handler",
                "parameters": {"deciderPluginName": "prefix-based-pd-decider"},
            },
        ),
        "schedulingProfiles": [profile("prefill", "prefill-filter"), profile("decode", "decode-filter")],
    },
    "encode apart, too": {
        "plugins": plugins(
            "encode-filter",
            "prefill-filter",
            "decode-filter",
            "always-disagg-multimodal-decider",
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16}},
            disagg(
                deciders={
                    "encode": "always-disagg-multimodal-decider",
                    "prefill": "prefix-based-pd-decider",
                }
            ),
        ),
        "schedulingProfiles": [
            profile("encode", "encode-filter"),
            profile("prefill", "prefill-filter"),
            profile("decode", "decode-filter"),
        ],
    },
    "decode only": {
        "plugins": plugins("decode-filter", "max-score-picker", "disagg-profile-handler"),
        "schedulingProfiles": [profile("decode", "decode-filter", "max-score-picker")],
    },
    "flow control": {
        "featureGates": ["flowControl"],
        "plugins": plugins(
            "queue-scorer",
            "round-robin-fairness-policy",
            "fcfs-ordering-policy",
            {
                "type": "concurrency-detector",
                "parameters": {"maxConcurrency": 132, "concurrencyMode": "requests", "headroom": 0.0},
            },
        ),
        "flowControl": {
            "saturationDetector": {"pluginRef": "concurrency-detector"},
            "maxBytes": "10Gi",
            "maxRequests": "1k",
            "defaultRequestTTL": "60s",
            "enableEviction": True,
            "priorityBands": [
                {
                    "priority": priority,
                    "maxRequests": most,
                    "fairnessPolicyRef": "round-robin-fairness-policy",
                    "orderingPolicyRef": "fcfs-ordering-policy",
                }
                for priority, most in ((100, "500"), (0, "200"), (-10, "50"))
            ],
        },
    },
    "payload unseen": {
        "plugins": plugins("passthrough-parser", "active-request-scorer", "session-affinity-scorer"),
        "requestHandler": {"parsers": [{"pluginRef": "passthrough-parser"}]},
        "schedulingProfiles": [profile("default", "active-request-scorer", "session-affinity-scorer")],
    },
    "precise, with a tokenizer": {
        "plugins": plugins(
            {
                "type": "token-producer",
                "parameters": {"modelName": "m", "vllm": {"url": "http://localhost:9999", "timeout": "3s"}},
            },
            {
                "type": "precise-prefix-cache-producer",
                "parameters": {
                    "tokenProcessorConfig": {
                        "blockSizeTokens": 64,
                        "hashSeed": "42",
                        "hashAlgorithm": "xxh64",
                    },
                    "indexerConfig": {
                        "kvBlockIndexConfig": {
                            "inMemoryConfig": {"size": 100000000, "podCacheSize": 10},
                            "enableMetrics": True,
                        },
                        "kvCacheBackendConfigs": [{"name": "cpu", "weight": 0.5}],
                    },
                    "kvEventsConfig": {
                        "topicFilter": "kv@",
                        "concurrency": 8,
                        "engineType": "vllm",
                        "discoverPods": True,
                        "podDiscoveryConfig": {
                            "podLabelSelector": "llm-d.ai/inference-serving=true",
                            "socketPort": 5600,
                            "replaySocketPort": 5700,
                        },
                    },
                    "speculativeIndexing": True,
                    "speculativeTTL": "3s",
                },
            },
            {
                "type": "prefix-cache-scorer",
                "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
            },
            "endpoint-notification-source",
        ),
        "schedulingProfiles": [profile("default", ("prefix-cache-scorer", 2))],
        "dataLayer": {
            "sources": [
                {
                    "pluginRef": "endpoint-notification-source",
                    "extractors": [{"pluginRef": "precise-prefix-cache-producer"}],
                }
            ]
        },
    },
}


def started(text: str) -> None:
    """Set up a router as far as it goes without opening a port."""
    config, _ = parse_flags([*PODS, "--config-text", text])
    assert config.picker is not None
    build_pipeline(config.picker, block_tokens=16, random=np.random.default_rng())
    read_flow_settings(config.picker, 1.0)
    read_admitters(config.picker)
    tuple(ignored_parameters(config.picker))


def complaint(text: str) -> str:
    """Return the error of a configuration, "" if there is none."""
    try:
        started(text)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_configuration_is_understood(name: str) -> None:
    """Every plugin is created, every profile wired, every section read."""
    config = parse_config(yaml.safe_dump(HEAD | KNOWN[name]), "c.yaml")
    made = build_pipeline(config, block_tokens=16, random=np.random.default_rng())
    assert list(made.state()) == [one.get("name", one["type"]) for one in KNOWN[name]["plugins"]]
    flow = read_flow_settings(config, 1.0)
    assert (flow is not None and flow[0].evicts) == (name == "flow control")
    assert parse_flags([*PODS, "--config-text", yaml.safe_dump(HEAD | KNOWN[name])])[0].picker is not None


def test_the_precise_producers_parameters_are_settings_of_the_index() -> None:
    """Block size, weights, topics, lifetimes and ports are applied; a tokenizer flag takes precedence."""
    text = yaml.safe_dump(HEAD | KNOWN["precise, with a tokenizer"])
    selector = ["--endpoint-selector", "app=m", "--endpoint-target-ports", "8000"]
    config, _ = parse_flags([*selector, "--config-text", text])
    index = config.index
    assert (index.block_tokens, index.topic_prefix, index.speculative_ttl_s) == (64, "kv@", 3.0)
    assert index.tier_weights["cpu"] == 0.5
    assert config.kube is not None
    assert (config.kube.events_port, config.kube.replay_port) == (5600, 5700)
    assert dict(config.tokenizers)["m"] == "http://localhost:9999"
    config, _ = parse_flags([*PODS, "--config-text", text, "--tokenizer", "m=pods"])
    assert dict(config.tokenizers)["m"] == "pods"


def test_speculative_indexing_can_be_switched_off() -> None:
    """speculativeIndexing: false disables speculative entries; without the field they are enabled."""
    for parameters, expected in (({"speculativeIndexing": False}, 0), ({}, 1_000_000)):
        producer = {"type": "precise-prefix-cache-producer", "parameters": parameters}
        text = yaml.safe_dump(HEAD | {"plugins": plugins("prefix-cache-scorer", producer)})
        assert parse_flags([*PODS, "--config-text", text])[0].index.speculative_entries == expected


def test_the_metrics_sources_page_is_a_setting() -> None:
    """Path and port of the metrics apply to all pods without labels for them."""
    parameters = {"scheme": "http", "path": "/prometheus/metrics", "port": 8002}
    source = {"type": "metrics-data-source", "parameters": parameters}
    pages = []
    for plugin in (source, {"type": "metrics-data-source"}):
        text = yaml.safe_dump(HEAD | {"plugins": [plugin, {"type": "queue-scorer"}]})
        pages.append(parse_flags([*PODS, "--config-text", text])[0].metrics_page)
    assert pages == [("/prometheus/metrics", 8002), ("/metrics", None)]


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ({"redisConfig": {}}, "redis://127.0.0.1:6379"),
        ({"redisConfig": {"address": "redis://r:1/2"}}, "redis://r:1/2"),
        ({"redisConfig": {"address": "r:1", "backendType": "valkey"}}, "valkey://r:1"),
        ({"redisConfig": {}, "valkeyConfig": {"address": "v:1", "enableRDMA": True}}, "valkey://v:1"),
        ({"redisConfig": {}, "costAwareMemoryConfig": {}}, None),
    ],
)
def test_a_configured_server_is_the_redis_backend(backends: dict[str, Any], expected: str | None) -> None:
    """`redisConfig` and `valkeyConfig` select the redis backend; --redis-url takes precedence."""
    parameters = {"indexerConfig": {"kvBlockIndexConfig": backends}}
    producer = {"type": "precise-prefix-cache-producer", "parameters": parameters}
    text = yaml.safe_dump(HEAD | {"plugins": plugins("prefix-cache-scorer", producer)})
    index = parse_flags([*PODS, "--hash-seed=1", "--config-text", text])[0].index
    assert (index.backend, index.redis_url) == ("redis" if expected else "flat", expected)
    index = parse_flags([*PODS, "--hash-seed=1", "--redis-url=redis://x", "--config-text", text])[0].index
    assert index.redis_url == "redis://x"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({}, 2 << 30),
        ({"size": "2GiB"}, 2 << 30),
        ({"size": "500MB"}, 500_000_000),
        ({"size": "1.5 gib"}, 3 << 29),
        ({"size": 1_000_000}, 1_000_000),
    ],
)
def test_a_cost_aware_memory_size_is_the_indexs_ceiling(size: dict[str, Any], expected: int) -> None:
    """The reference's cost-aware backend maps to the flat index with the same memory limit."""
    parameters = {"indexerConfig": {"kvBlockIndexConfig": {"costAwareMemoryConfig": size}}}
    producer = {"type": "precise-prefix-cache-producer", "parameters": parameters}
    text = yaml.safe_dump(HEAD | {"plugins": plugins("prefix-cache-scorer", producer)})
    index = parse_flags([*PODS, "--config-text", text])[0].index
    assert (index.backend, index.capacity_bytes) == ("flat", expected)


@pytest.mark.parametrize(
    ("kind", "parameters", "complaint"),
    [
        (
            "precise-prefix-cache-producer",
            {"indexerConfig": {"kvBlockIndexConfig": {"costAwareMemoryConfig": {"size": "2 gallons"}}}},
            "size: expected a size such as 2GiB",
        ),
        ("precise-prefix-cache-producer", {"tokenizersPoolConfig": {}}, "tokenizersPoolConfig"),
        (
            "precise-prefix-cache-producer",
            {"indexerConfig": {"tokenizersPoolConfig": {"hf": {}}}},
            "tokenizersPoolConfig.modelName: required with hf and uds",
        ),
        (
            "precise-prefix-cache-producer",
            {"tokenProcessorConfig": {"hashAlgorithm": "xxhash"}},
            "hashAlgorithm: unknown value 'xxhash'",
        ),
        (
            "precise-prefix-cache-producer",
            {"kvEventsConfig": {"zmqEndpoint": "ipc://x"}},
            "events_bind: must begin with tcp://",
        ),
        ("token-producer", {"vllm": {"url": "http://x"}}, "modelName: required with vllm"),
        (
            "token-producer",
            {"modelName": "m", "udsTokenizerConfig": {"socket": "x"}},
            "socket: unknown field",
        ),
        ("token-producer", {"modelName": "m", "vllm": {}, "udsTokenizerConfig": {}}, "excludes"),
        ("token-producer", {"vllm": {"port": 1}}, "port"),
        ("metrics-data-source", {"path": "metrics"}, "path: expected a path such as /metrics, got 'metrics'"),
        ("metrics-data-source", {"path": "/a b"}, "path: expected a path"),
        ("metrics-data-source", {"scheme": "https"}, "scheme: unknown value 'https'"),
        ("metrics-data-source", {"port": 0}, "port"),
        ("core-metrics-extractor", {"engineConfigs": [{"name": "mine"}]}, "unknown value 'mine'"),
        ("probabilistic-admitter", {"k": 0}, "k: must be"),
        ("latency-scorer", {}, "use ttft-cost-scorer"),
        ("topology-affinity-scorer", {}, "use label-selector-filter"),
        ("burst-prefix-cache-producer", {}, "use precise-prefix-cache-producer"),
        ("pd-profile-handler", {}, "profiles: decode profile is missing"),
        ("header-label-affinity-scorer", {"headerName": "x"}, "labelKey: is missing"),
    ],
)
def test_unsupported_settings_are_rejected_with_their_line(
    kind: str, parameters: dict[str, Any], complaint: str
) -> None:
    """The error names file, line and field, and the alternative."""
    text = yaml.safe_dump(HEAD | {"plugins": [{"type": kind, "parameters": parameters}]})
    with pytest.raises(ConfigError, match=rf"--config-text:\d+: .*{complaint}"):
        started(text)


def test_a_header_and_a_label_that_say_the_same_belong_together() -> None:
    """A pair scores 1 for equal values, 0 for others, for none, and for all pods without the header."""
    plugin = HeaderLabelScorer("x-tenant", "tenant")
    pods = [endpoint("a", labels={"tenant": "one"}), endpoint("b", labels={"tenant": "two"}), endpoint("c")]
    assert scores(plugin, request(headers={"x-tenant": "one"}), pods) == {"a": 1.0, "b": 0.0, "c": 0.0}
    assert scores(plugin, request(), pods) == {"a": 0.0, "b": 0.0, "c": 0.0}


ODD = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["1e400", "-1", "0", "10Gi", "5s", "default", "queue-scorer", ".nan"])
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text(max_size=5), st.integers(), max_size=2)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values within a value."""
    inner: list[tuple[Any, ...]] = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        inner += places(item, (*path, key))
    return inner


@settings(deadline=None)
@given(st.sampled_from(sorted(KNOWN)), st.data())
def test_an_altered_configuration_is_read_or_rejected(name: str, data: st.DataObject) -> None:
    """A configuration with an arbitrary value at any place is read, or rejected with file and line."""
    config = copy.deepcopy(HEAD | KNOWN[name])
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(places(config)))
        parent: Any = config
        for key in path:
            parent = parent[key]
        parent[last] = data.draw(ODD)
    told = complaint(yaml.safe_dump(config))
    assert not told or re.match(r"--config-text:\d+: |IndexerConfig", told)
