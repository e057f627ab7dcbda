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
from tests.support.router.picker_configs import HEAD, KNOWN, plugins

PODS = ["--pods-file", "/pods.yaml"]


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
