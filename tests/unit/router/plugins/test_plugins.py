"""Each filter, scorer, picker and decider on its own: formulas and edge cases."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from router.config.picker_file import parse_config
from router.errors import ConfigError
from router.plugins.api import PrefixMatch
from router.plugins.build import make_plugin
from router.plugins.labels import HeaderTestingFilter, SessionAffinity
from router.plugins.profiles import (
    MaxScorePicker,
    PluginError,
    PrefixBasedPdDecider,
    Profile,
    RandomPicker,
    WeightedRandomPicker,
    WeightedScorer,
)
from router.plugins.scorers import (
    ActiveRequestScorer,
    ContextLengthAware,
    KvUsageScorer,
    LoadAwareScorer,
    LoraAffinityScorer,
    MetricLimit,
    NoHitLruScorer,
    PrefixAffinityFilter,
    PrefixScorer,
    QueueScorer,
    RunningRequestsScorer,
    TokenLoadScorer,
    TtftCostScorer,
    UtilizationFilter,
)
from router.plugins.testkit import endpoint, kept, picks, request, scores
from router.pods.engine_load import LoraLoad

HALF = PrefixMatch(5.0, 10, 5, 64)


def made(kind: str, **parameters: Any) -> Any:
    """Return a plugin built from a configuration."""
    entry = {"type": kind, "parameters": parameters}
    text = yaml.safe_dump(
        {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": [entry]}
    )
    return make_plugin(parse_config(text, "c.yaml").plugins[kind], Path())


@pytest.mark.parametrize(
    ("scorer", "field", "values", "expected"),
    [
        (QueueScorer(), "waiting_requests", [3, 0, 10], [0.7, 1.0, 0.0]),
        (QueueScorer(), "waiting_requests", [4, 4], [1.0, 1.0]),
        (RunningRequestsScorer(), "running_requests", [2, 0, 4], [0.5, 1.0, 0.0]),
        (KvUsageScorer(), "kv_usage", [0.2, 1.0], [0.8, 0.0]),
        (LoadAwareScorer(), "waiting_requests", [0, 64, 500], [0.5, 0.25, 0.0]),
        (ActiveRequestScorer(), "inflight_requests", [0, 1, 4], [1.0, 0.75, 0.0]),
        (ActiveRequestScorer(1, 0.5), "inflight_requests", [1, 2, 4], [1.0, 0.25, 0.0]),
        (ActiveRequestScorer(), "inflight_requests", [0, 0], [1.0, 1.0]),
        (TokenLoadScorer(1000), "inflight_tokens", [0, 250, 5000], [1.0, 0.75, 0.0]),
        (TtftCostScorer(), "cost_s", [0.1, 0.201], [1.0, 0.5]),
    ],
)
def test_load_scorers_follow_their_formulas(
    scorer: Any, field: str, values: list[float], expected: list[float]
) -> None:
    """Each load scorer follows its formula, and equal loads score equally."""
    endpoints = [endpoint(f"p{index}", **{field: value}) for index, value in enumerate(values)]
    assert list(scores(scorer, request(), endpoints).values()) == pytest.approx(expected)


def test_token_load_includes_the_requests_uncached_tokens() -> None:
    """Token load is the sum of tokens in flight and the request's uncached tokens."""
    endpoints = [endpoint("a", inflight_tokens=200, uncached_tokens=300), endpoint("b", uncached_tokens=1000)]
    assert scores(TokenLoadScorer(1000), request(), endpoints) == pytest.approx({"a": 0.5, "b": 0.0})


def test_negative_costs_keep_their_order() -> None:
    """Scores stay in the order of the costs if costs are negative."""
    endpoints = [endpoint("a", cost_s=-0.5), endpoint("b", cost_s=-0.2), endpoint("c", cost_s=0.3)]
    result = scores(TtftCostScorer(), request(), endpoints)
    assert 1.0 == result["a"] > result["b"] > result["c"] > 0.0


def test_prefix_score_is_the_share_optionally_mixed_with_length() -> None:
    """The score is the matched share; with a weight, the squared match length is mixed in."""
    endpoints = [endpoint("a"), endpoint("b")]
    asked = request(prefixes={"a:8000": HALF})
    assert scores(PrefixScorer(), asked, endpoints) == {"a": 0.5, "b": 0.0}
    mixed = PrefixScorer(match_length_weight=0.4, match_length_scale_tokens=640)
    assert scores(mixed, asked, endpoints)["a"] == pytest.approx(0.4 * 0.25 + 0.6 * 0.5)


def test_lora_score_depends_on_the_adapters_state() -> None:
    """Running, free slot, waiting and no slot score 1, 0.8, 0.6 and 0; no adapter metrics score 0."""
    full = {"x", "y"}
    loads = {
        "active": LoraLoad(frozenset({"m", "x"}), frozenset(), 2),
        "room": LoraLoad(frozenset({"x"}), frozenset(), 2),
        "waiting": LoraLoad(frozenset(full), frozenset({"m"}), 2),
        "full": LoraLoad(frozenset(full), frozenset(), 2),
        "silent": None,
    }
    endpoints = [endpoint(name, lora=load) for name, load in loads.items()]
    result = scores(LoraAffinityScorer(), request(model="m"), endpoints)
    assert result == {"active": 1.0, "room": 0.8, "waiting": 0.6, "full": 0.0, "silent": 0.0}


def test_cold_requests_go_to_the_least_recently_used_endpoint() -> None:
    """Unused endpoints score highest, then by age; a request with a cache hit scores 0.5 for all."""
    scorer, endpoints = NoHitLruScorer(), [endpoint(name) for name in "abc"]
    asked = request()
    scorer.picked(asked, {"": endpoints[0]})
    assert scores(scorer, asked, endpoints) == {"a": 0.0, "b": 1.0, "c": 0.5}
    scorer.picked(asked, {"": endpoints[1], "prefill": endpoints[2]})
    scorer.picked(request(prefixes={"b:8000": HALF}), {"": endpoints[0]})
    assert scores(scorer, asked, endpoints) == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert set(scores(scorer, request(prefixes={"b:8000": HALF}), endpoints).values()) == {0.5}
    assert scores(scorer, asked, endpoints[:1]) == {"a": 1.0}


def test_a_matching_context_range_is_preferred() -> None:
    """In range beats out of range, narrow beats wide, no label is neutral, an invalid range scores 0."""
    label = "llm-d.ai/context-length-range"
    ranges = {"narrow": "0-2000", "wide": "0-100000", "far": "50000-60000", "odd": "many"}
    endpoints = [endpoint(name, labels={label: text}) for name, text in ranges.items()] + [endpoint("none")]
    result = scores(ContextLengthAware(), request(prompt_tokens=1000), endpoints)
    assert result["narrow"] == pytest.approx(0.3 + 0.7 * (0.7 / 1.2 + 0.3 * 0.5))
    assert result["narrow"] > result["wide"] > 0.3 > result["far"] == pytest.approx(0.3 / 50)
    assert (result["none"], result["odd"]) == (0.5, 0.0)
    strict = ContextLengthAware(enable_filtering=True)
    assert kept(strict, request(prompt_tokens=1000), endpoints) == ["narrow", "wide", "none"]


def test_role_filters_keep_matching_roles() -> None:
    """Each role filter keeps every combination with its role; only decode keeps pods without a role."""
    roles = [
        "decode",
        "prefill",
        "encode",
        "encode-prefill",
        "prefill-decode",
        "encode-prefill-decode",
        "both",
    ]
    endpoints = [endpoint(role, labels={"llm-d.ai/role": role}) for role in roles] + [endpoint("none")]
    passed = {
        role: set(kept(made(f"{role}-filter"), request(), endpoints))
        for role in ("decode", "prefill", "encode")
    }
    assert passed["decode"] == {"decode", "prefill-decode", "encode-prefill-decode", "both", "none"}
    assert passed["prefill"] == {
        "prefill",
        "encode-prefill",
        "prefill-decode",
        "encode-prefill-decode",
        "both",
    }
    assert passed["encode"] == {"encode", "encode-prefill", "encode-prefill-decode"}


def test_label_selectors_follow_kubernetes() -> None:
    """matchLabels and all four operators work as in Kubernetes; a missing label matches NotIn but not In."""
    endpoints = [endpoint("a", labels={"tier": "gold", "zone": "x"}), endpoint("b", labels={"tier": "base"})]

    def selected(**parameters: Any) -> list[str]:
        return kept(made("label-selector-filter", **parameters), request(), endpoints)

    def expression(operator: str, *values: str, key: str = "zone") -> list[str]:
        return selected(matchExpressions=[{"key": key, "operator": operator, "values": list(values)}])

    assert selected(matchLabels={"tier": "gold"}) == ["a"]
    assert expression("In", "x", "y") == ["a"]
    assert expression("NotIn", "x") == ["b"]
    assert (expression("Exists"), expression("DoesNotExist")) == (["a"], ["b"])
    with pytest.raises(ConfigError, match="In needs values"):
        expression("In")


def test_endpoints_with_the_prefix_are_kept_within_the_ttft_penalty() -> None:
    """Endpoints with the prefix are kept alone, unless even the least loaded one exceeds the TTFT penalty."""
    holder, other = endpoint("holder", inflight_tokens=20_000), endpoint("other")
    asked = request(prefixes={"holder:8000": PrefixMatch(9.0, 10, 9, 64)})
    assert kept(PrefixAffinityFilter(peak_prefill_throughput=2000), asked, [holder, other]) == ["holder"]
    slow = PrefixAffinityFilter(peak_prefill_throughput=1000)
    assert kept(slow, asked, [holder, other]) == ["holder", "other"]
    endless = PrefixAffinityFilter(peak_prefill_throughput=1000, penalty_max_ms=0.0)
    assert kept(endless, asked, [holder, other]) == ["holder"]
    assert kept(PrefixAffinityFilter(exploration_probability=1.0), asked, [holder, other]) == [
        "holder",
        "other",
    ]
    assert kept(PrefixAffinityFilter(), request(), [holder, other]) == ["holder", "other"]


def test_endpoints_above_a_limit_are_removed() -> None:
    """An endpoint above any limit is removed; with fallback all endpoints stay if none would."""
    endpoints = [endpoint("a", waiting_requests=3), endpoint("b", kv_usage=0.95), endpoint("c")]
    limits = (MetricLimit("waiting-queue", 2.0), MetricLimit("kv-cache-utilization", 0.9))
    assert kept(UtilizationFilter(limits), request(), endpoints) == ["c"]
    assert kept(UtilizationFilter(limits), request(), endpoints[:2]) == []
    assert kept(UtilizationFilter(limits, fallback_on_empty=True), request(), endpoints[:2]) == ["a", "b"]


def test_the_conformance_header_selects_endpoints_in_order() -> None:
    """Endpoints are selected by IP or address, in the header's order, each once; none without the header."""
    endpoints = [endpoint("a"), endpoint("b")]
    header = {"test-epp-endpoint-selection": "b, a:8000,a, c"}
    assert kept(HeaderTestingFilter(), request(headers=header), endpoints) == ["b", "a"]
    assert (
        kept(HeaderTestingFilter(), request(headers={"test-epp-endpoint-selection": "a:9"}), endpoints) == []
    )
    assert kept(HeaderTestingFilter(), request(), endpoints) == []


@pytest.mark.parametrize("token", ["", "no base64!", "/////w==", "eA==", "x" * 5000])
def test_an_invalid_session_token_is_ignored(token: str) -> None:
    """A malformed, unknown or oversized client token keeps all endpoints and scores 0."""
    plugin = SessionAffinity()
    asked = request(headers={"x-session-token": token})
    assert kept(plugin, asked, [endpoint("a"), endpoint("b")]) == ["a", "b"]
    assert scores(plugin, asked, [endpoint("a")]) == {"a": 0.0}


def test_a_session_expires_and_a_missing_endpoint_is_ignored() -> None:
    """A session id keeps its endpoint until it expires, while the endpoint is a candidate."""
    config = {"sources": [{"header": "X-Session-Id"}], "evictionTtlSeconds": 60}
    plugin: Any = made("session-affinity-filter", strategy="session_id", sessionIdConfig=config)
    a, b = endpoint("a"), endpoint("b")

    def at(now_s: float) -> Any:
        return request(headers={"x-session-id": "s"}, now_s=now_s)

    assert plugin.picked(at(0.0), {"": b}) == {}
    assert kept(plugin, at(59.0), [a, b]) == ["b"]
    assert kept(plugin, at(59.0), [a]) == ["a"]
    assert kept(plugin, at(61.0), [a, b]) == ["a", "b"]


def test_pickers_draw_by_their_rule() -> None:
    """Pickers draw the highest score, at random, or in proportion to the scores (uniformly if all are 0)."""
    asked = request(random=np.random.default_rng(1))
    scored = {"a": 0.1, "b": 0.9, "c": 0.9}

    def shares(picker: Any, values: dict[str, float]) -> dict[str, float]:
        drawn = Counter(picks(picker, asked, values)[0] for _ in range(3000))
        return {name: drawn[name] / 3000 for name in values}

    assert shares(MaxScorePicker(), scored) == pytest.approx({"a": 0.0, "b": 0.5, "c": 0.5}, abs=0.05)
    assert shares(RandomPicker(), scored) == pytest.approx(dict.fromkeys(scored, 1 / 3), abs=0.05)
    weights = {"a": 0.2, "b": 0.8, "c": 0.0}
    assert shares(WeightedRandomPicker(), weights) == pytest.approx(weights, abs=0.05)
    nothing = dict.fromkeys(scored, 0.0)
    assert shares(WeightedRandomPicker(), nothing) == pytest.approx(dict.fromkeys(scored, 1 / 3), abs=0.05)
    tiny = {"a": 1e-300, "b": 2e-300}
    assert shares(WeightedRandomPicker(), tiny) == pytest.approx({"a": 1 / 3, "b": 2 / 3}, abs=0.05)
    assert len(picks(MaxScorePicker(2), asked, scored)) == 2


def test_prefill_is_disaggregated_above_the_uncached_threshold() -> None:
    """Only tokens that the decoding pod has not cached count; 0 and short prompts never disaggregate."""
    decoder = endpoint("d")
    asked = request(prompt_tokens=1000, prefixes={"d:8000": HALF})
    assert [
        PrefixBasedPdDecider(non_cached_tokens=n).decide(asked, decoder) for n in (0, 680, 681, 1001)
    ] == [
        False,
        True,
        False,
        False,
    ]
    assert not PrefixBasedPdDecider(non_cached_tokens=10, prompt_tokens=1001).decide(asked, decoder)


def test_scores_are_clamped_weighted_and_summed() -> None:
    """Scores are clamped to 0..1, NaN counts as 0, and the winner's scores are reported by scorer."""

    class Wild:
        def score(self, _request: Any, _endpoints: Any) -> list[float]:
            return [7.0, -1.0, math.nan]

    scorers = [WeightedScorer("wild", Wild(), 2.0), WeightedScorer("kv", KvUsageScorer(), 0.5)]
    profile = Profile("p", (), scorers, MaxScorePicker())
    picked = profile.run(request(), [endpoint(name) for name in "abc"])
    assert picked is not None
    assert picked.scores == {"a:8000": 2.5, "b:8000": 0.5, "c:8000": 0.5}
    assert list(picked.score_parts) == [("wild", 2.0), ("kv", 0.5)]


def test_an_invalid_plugin_result_names_the_plugin() -> None:
    """A wrong number of scores or an unknown endpoint raises an error that names the plugin."""

    class Short:
        def score(self, _request: Any, _endpoints: Any) -> list[float]:
            return []

    class Stranger:
        def filter(self, _request: Any, _endpoints: Any) -> list[Any]:
            return [endpoint("stranger")]

    with pytest.raises(PluginError, match="plugin: score must return one score"):
        scores(Short(), request(), [endpoint("a")])
    with pytest.raises(PluginError, match="plugin: filter must return a subset of the given endpoints"):
        kept(Stranger(), request(), [endpoint("a")])
