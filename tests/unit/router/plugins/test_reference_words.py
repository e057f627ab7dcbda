"""Words of llm-d's configurations, old and new: their effect, or the line that says they have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml

from router.app.config import RouterConfig, parse_flags
from router.config.picker_file import PickerConfig, parse_config
from router.errors import ConfigError, SaturatedError
from router.picking.flow_queue import fairness_id_reader, read_admitters, read_flow_settings
from router.picking.route import Admission
from router.picking.scheduler import Scheduler
from router.plugins.build import build_pipeline, ignored_parameters
from router.plugins.pipeline import Pipeline
from router.pods.load_table import PodLoadTable
from tests.support.router.bench import Bench, completion, ready_pod
from tests.support.router.pricing import load

HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
PRECISE = "precise-prefix-cache-producer"
RANKS = ("10.0.0.1:8000", "10.0.0.1:8001")


def plugin(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return a plugin's entry."""
    return {"type": kind, "parameters": parameters}


def text(*plugins: dict[str, Any], **sections: Any) -> str:
    """Return a configuration file with these plugins and sections."""
    return yaml.safe_dump(HEAD | {"plugins": list(plugins)} | sections)


def parsed(*plugins: dict[str, Any], **sections: Any) -> PickerConfig:
    """Return a parsed configuration file."""
    return parse_config(text(*plugins, **sections), "c.yaml")


def pipeline(*plugins: dict[str, Any], **sections: Any) -> Pipeline:
    """Return the pipeline of a configuration file."""
    config = parsed(*plugins, **sections)
    return build_pipeline(config, block_tokens=16, random=np.random.default_rng(3))


def router(*plugins: dict[str, Any], flags: tuple[str, ...] = ()) -> RouterConfig:
    """Return a router's settings from a configuration file and flags."""
    return parse_flags(["--pods-file", "/p.yaml", "--config-text", text(*plugins), *flags])[0]


def test_parameters_without_effect_are_named_with_line_and_reason() -> None:
    """Each given parameter that has no effect is named once, with its line; those with effect are not."""
    config = parse_config(
        """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: 64, hashAlgorithm: xxh64}
    indexerConfig:
      kvBlockIndexConfig:
        inMemoryConfig:
          podCacheSize: 10
- type: prefix-cache-scorer
- type: active-request-scorer
  parameters:
    requestTimeout: 2m
    idleThreshold: 2
""",
        "c.yaml",
    )
    at = "plugins[0].parameters."
    assert [line.partition(": ignored: ")[0] for line in ignored_parameters(config)] == [
        f"c.yaml:6: {at}tokenProcessorConfig.hashAlgorithm",
        f"c.yaml:10: {at}indexerConfig.kvBlockIndexConfig.inMemoryConfig.podCacheSize",
        "c.yaml:14: plugins[2].parameters.requestTimeout",
    ]


def test_parsers_and_the_default_detector_need_no_entry() -> None:
    """They may be named by their types, as llm-d adds them; another unlisted detector is an error."""
    sections: dict[str, Any] = {
        "featureGates": ["flowControl"],
        "requestHandler": {"parsers": [{"pluginRef": "openai-parser"}]},
        "flowControl": {"saturationDetector": {"pluginRef": "utilization-detector"}},
    }
    config = parsed(plugin("queue-scorer"), **sections)
    assert [config.type_of(one.plugin_ref) for one in config.parsers] == ["openai-parser"]
    assert read_flow_settings(config, 1.0) is not None
    other = {"flowControl": {"saturationDetector": {"pluginRef": "concurrency-detector"}}}
    with pytest.raises(ConfigError, match="expected a detector"):
        read_flow_settings(parsed(plugin("queue-scorer"), **sections | other), 1.0)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"modelName": "o/m", "hf": {"enabled": True}}, {"o/m": "hf:o/m@main"}),
        ({"modelName": "o/m", "uds": {"socketFile": "/run/t.sock"}}, {"o/m": "unix:/run/t.sock"}),
        ({"modelName": "o/m", "hf": {"enabled": False}, "workersCount": 5}, {}),
        (
            {"modelName": "o/m", "local": {"modelTokenizerMap": {"o/m": "/d/m/tokenizer.json", "n": "/d/n"}}},
            {"o/m": "/d/m", "n": "/d/n"},
        ),
    ],
)
def test_the_indexers_older_tokenizers_are_sources(sources: dict[str, Any], expected: dict[str, str]) -> None:
    """`tokenizersPoolConfig` names sources of tokenizers; token producers and flags take precedence."""
    older = plugin("precise-prefix-cache-scorer", indexerConfig={"tokenizersPoolConfig": sources})
    found = dict(router(older).tokenizers)
    assert {model: source for model, source in found.items() if model != "kvroute-tiny"} == expected
    newer = plugin("token-producer", modelName="o/m", udsTokenizerConfig={"socketFile": "/new.sock"})
    assert dict(router(newer, older).tokenizers)["o/m"] == "unix:/new.sock"
    assert dict(router(newer, older, flags=("--tokenizer", "o/m=none")).tokenizers)["o/m"] == "none"


def test_a_directory_has_a_tokenizer_per_model(tmp_path: Path) -> None:
    """Models are found as NAME, as OWNER/NAME and in a cache of the Hub, by flag and configuration."""
    names = ("mine/tokenizer.json", "org/a/tokenizer.json", "models--org--b/snapshots/f0/tokenizer.json")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    expected = {"mine": names[0], "org/a": names[1], "org/b": names[2]}
    pool = {"local": {"autoDiscoveryDir": str(tmp_path)}}
    by_file = router(plugin("precise-prefix-cache-scorer", indexerConfig={"tokenizersPoolConfig": pool}))
    by_flag, _ = parse_flags(["--pods-file", "/p.yaml", "--tokenizers-dir", str(tmp_path)])
    for found in (by_file, by_flag):
        sources = {model: source for model, source in found.tokenizers if model != "kvroute-tiny"}
        assert sources == {model: str((tmp_path / name).parent) for model, name in expected.items()}
    with pytest.raises(ConfigError, match="--tokenizers-dir"):
        parse_flags(["--pods-file", "/p.yaml", "--tokenizers-dir", str(tmp_path / "none")])


def test_a_hash_seed_is_a_text() -> None:
    """Routers with the same `hashSeed` have the same keys, as Redis requires; --hash-seed wins."""
    redis = {"kvBlockIndexConfig": {"redisConfig": {"address": "r:1"}}}
    for given, seed in (({}, b""), ({"tokenProcessorConfig": {"hashSeed": "42"}}, b"42")):
        producer = plugin(PRECISE, indexerConfig=redis, **given)
        assert router(producer).index.hash_seed == xxhash.xxh3_64_intdigest(seed)
        assert router(producer, flags=("--hash-seed", "7")).index.hash_seed == 7
    assert router(plugin(PRECISE)).index.hash_seed is None


def test_older_places_of_index_parameters_are_read() -> None:
    """Block size and speculation may stand within `indexerConfig`; the newer places take precedence."""
    older = {"tokenProcessorConfig": {"blockSize": 32}, "speculativeIndexing": False}
    index = router(plugin(PRECISE, indexerConfig=older)).index
    assert (index.block_tokens, index.speculative_entries) == (32, 0)
    newer = {"tokenProcessorConfig": {"blockSizeTokens": 64}, "speculativeIndexing": True}
    index = router(plugin(PRECISE, indexerConfig=older, **newer)).index
    assert (index.block_tokens, index.speculative_entries > 0) == (64, True)


def test_a_sidecar_gets_the_rank_in_a_header() -> None:
    """With data-parallel-profile-handler all requests go to the primary port, and a header names the rank."""
    made = Bench().with_pods(*map(ready_pod, RANKS))
    handler = plugin("data-parallel-profile-handler", primaryPort=9000)
    made.core.scheduler = Scheduler(
        made.pods.load_table,
        made.ledger,
        np.random.default_rng(3),
        block_tokens=16,
        ranker=pipeline(handler, plugin("queue-scorer")),
    )
    ranks = set()
    for name in "abcdefgh":
        decision = made.router.route(completion(name, "x"), 0.0)
        assert decision.destination == "10.0.0.1:9000"
        assert decision.request_headers == {"x-data-parallel-host-port": decision.primary.pod}
        ranks.add(decision.primary.pod)
    assert ranks == set(RANKS)


def test_flat_parameters_of_disaggregation_are_read() -> None:
    """The older flat names of profiles and deciders mean the same as the nested ones."""
    flat = {"decodeProfile": "d", "prefillProfile": "p", "deciderPluginName": "always-disagg-pd-decider"}
    nested = {
        "profiles": {"decode": "d", "prefill": "p"},
        "deciders": {"prefill": "always-disagg-pd-decider"},
    }
    profiles = [
        {"name": name, "plugins": [{"pluginRef": f"{role}-filter"}]}
        for name, role in (("p", "prefill"), ("d", "decode"))
    ]
    made = [
        pipeline(
            plugin("always-disagg-pd-decider"),
            plugin("prefill-filter"),
            plugin("decode-filter"),
            plugin(handler, **parameters),
            schedulingProfiles=profiles,
        ).handler
        for handler, parameters in (
            ("disagg-profile-handler", flat),
            ("disagg-profile-handler", nested),
            ("pd-profile-handler", flat),
        )
    ]
    for handler in made:
        assert handler.prefill is not None
        assert (handler.decode.name, handler.prefill.profile.name) == ("d", "p")


def test_additional_session_headers_take_precedence() -> None:
    """agent-identity asks the configured headers first, then those that it knows, for the fairness id."""
    read = fairness_id_reader(parsed(plugin("agent-identity", additionalSessionHeaders=["X-Mine"])))
    assert read({"x-mine": "a", "x-claude-code-session-id": "b"}) == "a"
    assert read({"x-claude-code-session-id": "b"}) == "b"


def test_a_probabilistic_admitter_rejects_before_saturation() -> None:
    """With a power of 1 and k of 0.5, half of the requests below priority 0 are rejected at saturation 1."""
    admitter = plugin("probabilistic-admitter", queueDepthThreshold=10, power=1, k=0.5)
    load_table = PodLoadTable()
    load_table.scraped("a:1", load(waiting=10))
    rows = load_table.rows(["a:1"])
    admission = Admission({"batch": -1}, None, load_table, read_admitters(parsed(admitter)))
    rejected = 0
    for _ in range(1000):
        assert admission.admit({}, rows, 0.0) == 0
        try:
            admission.admit({"x-llm-d-inference-objective": "batch"}, rows, 0.0)
        except SaturatedError:
            rejected += 1
    assert 400 < rejected < 600
