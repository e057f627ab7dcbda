"""Plugin pipeline from a configuration: defaults, custom plugins, picks and errors."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from envoy.service.auth.v3.external_auth_pb2 import CheckResponse
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, generate_latest

from indexer import StreamState
from router.config.picker_file import parse_config
from router.doors.boundary import system_owned
from router.doors.ext_authz import ok_response
from router.errors import ConfigError, RequestError
from router.observe.metrics import MetricAliases
from router.picking.decision import PipelineResult
from router.picking.flow_queue import read_flow_settings
from router.picking.scheduler import Scheduler
from router.plugins.build import PLUGIN_TYPES, REPLACEMENTS, build_pipeline
from router.plugins.pipeline import Pipeline
from router.pods.engine_load import EngineLoad
from tests.support.paths import ROOT
from tests.support.router.bench import Bench, completion, entry, long_text, ready_pod
from tests.support.router.hermetic import HERMETIC

HEAD: dict[str, Any] = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
DOCS = (ROOT / "docs/plugins.md").read_text()
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def pipeline(config: dict[str, Any] | str, directory: Path = Path()) -> Pipeline:
    """Return the pipeline of a configuration."""
    text = config if isinstance(config, str) else yaml.safe_dump(HEAD | config, sort_keys=False)
    read = parse_config(text, str(directory / "c.yaml"))
    return build_pipeline(read, block_tokens=16, random=np.random.default_rng(3))


def bench(ranker: Pipeline, **loads: tuple[int, float]) -> Bench:
    """Return a router of two pods that picks with this pipeline; loads are (queue, KV usage) by pod."""
    made = Bench().with_pods(*(ready_pod(address) for address in (A, B)))
    for name, (waiting, usage) in loads.items():
        address = {"a": A, "b": B}[name]
        known = made.pods.current[address]
        load = EngineLoad(waiting, 0, usage, None, 0.0)
        made.pods.put(type(known)(**{f: getattr(known, f) for f in known.__slots__} | {"load": load}))
    made.core.scheduler = Scheduler(
        made.pods.load_table, made.ledger, np.random.default_rng(3), block_tokens=16, ranker=ranker
    )
    return made


@pytest.mark.parametrize("name", sorted(HERMETIC["configs"]))
def test_every_llm_d_case_configuration_is_accepted(name: str) -> None:
    """Plugins, profiles, parsers and flow control of all llm-d test cases are accepted."""
    config = parse_config(yaml.safe_dump(HERMETIC["configs"][name]), "c.yaml")
    assert config.picks
    build_pipeline(config, block_tokens=16, random=np.random.default_rng())
    flow = read_flow_settings(config, 1.0)
    assert (flow is not None) == ("flowControl" in HERMETIC["configs"][name].get("featureGates", ()))


def test_the_highest_score_is_picked_and_reported() -> None:
    """Without a profile all plugins form one; the decision reports the sums and the winner's scores."""
    made = bench(
        pipeline({"plugins": [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}]}),
        a=(3, 0.5),
        b=(0, 0.25),
    )
    decision = made.router.route(completion("r", "hello"), 0.0)
    assert decision.primary.pod == B
    assert decision.pipeline is not None
    assert decision.pipeline.scores == pytest.approx({A: 0.5, B: 1.75})
    assert decision.reason == "weighted score 1.75 (queue-scorer 1, kv-cache-utilization-scorer 0.75)"


def test_the_decision_log_shows_scores_and_filters() -> None:
    """The decision log shows each candidate's score and why every other pod was excluded."""
    selector = {"type": "label-selector-filter", "parameters": {"matchLabels": {"tier": "gold"}}}
    caps = {"conditions": [{"metric": "waiting-queue", "maxValue": 5}]}
    full = {"type": "utilization-filter", "parameters": caps}
    made = bench(pipeline({"plugins": [selector, full, {"type": "queue-scorer"}]}))
    queues = {A: 1, B: 3, "10.0.0.3:8000": 9, "10.0.0.4:8000": 0}
    pods = [
        dataclasses.replace(
            ready_pod(address),
            entry=entry(address, tier="tin" if address == "10.0.0.4:8000" else "gold"),
            load=EngineLoad(waiting, 0, 0.0, None, 0.0),
        )
        for address, waiting in queues.items()
    ]
    made.with_pods(*pods, ready_pod("10.0.0.5:8000", model="other"))
    made.router.route(completion("r", "hello"), 0.0)
    shown = made.decision_log.find("r")
    assert shown is not None
    assert [(one["pod"], one["score"]) for one in shown["candidates"]] == [(A, 1.0), (B, 0.0)]
    assert {one["pod"]: one["reason"] for one in shown["excluded"]} == {
        "10.0.0.3:8000": "removed by filter utilization-filter",
        "10.0.0.4:8000": "removed by filter label-selector-filter",
        "10.0.0.5:8000": "does not serve the model",
    }


def test_weights_multiply_scores() -> None:
    """Changing the weights of two scorers changes the pick."""
    plugins = [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}]

    def picked(queue: float, usage: float) -> str:
        profile = {
            "name": "default",
            "plugins": [
                {"pluginRef": "queue-scorer", "weight": queue},
                {"pluginRef": "kv-cache-utilization-scorer", "weight": usage},
            ],
        }
        made = bench(pipeline({"plugins": plugins, "schedulingProfiles": [profile]}), a=(3, 0.1), b=(0, 0.9))
        return made.router.route(completion("r", "hello"), 0.0).primary.pod

    assert (picked(1.0, 0.1), picked(0.1, 1.0)) == (B, A)


def test_ttft_cost_scorer_picks_as_the_default_policy() -> None:
    """With ttft-cost-scorer alone the pod with the cached prefix wins."""
    made = bench(pipeline({"plugins": [{"type": "ttft-cost-scorer"}]}))
    text = long_text(400)
    made.index.hold(B, made.keys(text))
    assert made.router.route(completion("r", text), 0.0).primary.pod == B


@pytest.mark.parametrize("kind", ["approx-prefix-cache-producer", "precise-prefix-cache-producer"])
def test_prefix_matches_come_from_the_configured_producer(kind: str) -> None:
    """The precise producer follows the index, the approximate one follows past picks."""
    scorer = {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": kind}}
    made = bench(pipeline({"plugins": [scorer]}))
    text = long_text(400)
    sent = made.router.route(completion("r1", text), 0.0)
    made.index.settle(sent.key, 0.0)
    first = sent.primary.pod
    other = A if first == B else B
    made.index.hold(other, made.keys(text))
    expected = first if kind.startswith("approx") else other
    again = {made.router.route(completion(f"r{n}", text), 0.0).primary.pod for n in range(2, 6)}
    assert again == {expected}


def test_without_a_producer_the_index_counts_and_past_picks_where_it_knows_nothing() -> None:
    """A plugin that names no producer follows the index for EXACT pods, and past picks for all others."""
    made, text = bench(pipeline({"plugins": [{"type": "prefix-cache-scorer"}]})), long_text(400)
    sent = made.router.route(completion("r1", text), 0.0)
    made.index.settle(sent.key, 0.0)
    first = sent.primary.pod
    other = A if first == B else B
    made.index.hold(other, made.keys(text))
    second = made.router.route(completion("r2", text), 0.0)
    assert second.primary.pod == other
    made.index.settle(second.key, 0.0)
    made.index.state = StreamState.STALE
    result = made.router.route(completion("r3", text), 0.0).pipeline
    assert result is not None
    assert result.scores[A] == result.scores[B] == 1.0


def test_a_host_tier_block_counts_by_its_weight() -> None:
    """One host block of weight 0.8 counts as 0.8 blocks (llm-d truncates the sum to an integer)."""
    made = bench(pipeline({"plugins": [{"type": "precise-prefix-cache-scorer"}]}))
    text = long_text(12)
    keys = made.keys(text)
    made.index.hold(A, keys[:1], host=True)
    result = made.router.route(completion("r", text), 0.0).pipeline
    assert result is not None
    assert result.scores[A] * len(keys) == pytest.approx(0.8)


def test_no_remaining_endpoint_is_429_and_an_invalid_result_500(tmp_path: Path) -> None:
    """Without remaining endpoints a request gets 429, with a failed plugin 500; neither enters the ledger."""
    drop = {"type": "label-selector-filter", "parameters": {"matchLabels": {"no": "pod"}}}
    made = bench(pipeline({"plugins": [drop]}))
    with pytest.raises(RequestError) as caught:
        made.router.route(completion("r", "hello"), 0.0)
    assert (caught.value.status, caught.value.dropped_reason) == (429, "rejected-saturated")
    (tmp_path / "bad.py").write_text(
        "class Bad:\n    def score(self, request, endpoints):\n        return []\n"
    )
    made = bench(pipeline({"plugins": [{"type": "bad.py:Bad", "name": "bad"}]}, tmp_path))
    with pytest.raises(RequestError, match="plugin bad: score"):
        made.router.route(completion("r", "hello"), 0.0)
    assert len(made.ledger) == 0


def test_the_documented_plugin_runs(tmp_path: Path) -> None:
    """The example of docs/plugins.md loads, takes part in a pick, and passes its documented test."""
    blocks = dict(re.findall(r"```(python|yaml)\n(.*?)```", DOCS, re.S)[::-1])
    examples = re.findall(r"```python\n(.*?)```", DOCS, re.S)
    (tmp_path / "zone.py").write_text(examples[0])
    made = bench(pipeline(blocks["yaml"], tmp_path))
    decision = made.router.route(completion("r", "hello"), 0.0)
    assert decision.pipeline is not None
    assert decision.pipeline.response_headers == {"x-served-zone": ""}
    namespace: dict[str, Any] = {}
    exec(examples[0] + examples[1], namespace)


@pytest.mark.parametrize(
    ("plugins", "profiles", "complaint"),
    [
        (
            [{"type": "magic-scorer"}],
            [],
            r"plugins\[0\].type: unknown plugin type 'magic-scorer'; known: .*queue",
        ),
        ([{"type": "latency-scorer"}], [], r"unknown plugin type 'latency-scorer'; use ttft-cost-scorer"),
        ([{"type": "queue-scorer", "parameters": {"x": 1}}], [], r"parameters.x: unknown field; .*\(none\)"),
        ([{"type": "no.py:Class"}], [], r"type: file not found"),
        (
            [{"type": "load-aware-scorer", "parameters": {"threshold": 0}}],
            [],
            r"threshold: must be an integer",
        ),
        (
            [{"type": "load-aware-scorer", "parameters": {"threshold": "nan"}}],
            [],
            r"threshold: must be an integer",
        ),
        (
            [{"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "mine"}}],
            [],
            r"unknown producer 'mine'; known: approx",
        ),
        (
            [{"type": "queue-scorer"}],
            [{"name": "a", "plugins": [{"pluginRef": "que"}]}],
            r"schedulingProfiles\[0\].plugins\[0\].pluginRef: no plugin named 'que'",
        ),
        ([{"type": "queue-scorer"}], [{"name": "a"}, {"name": "b"}], r"expects one profile, got 2"),
        (
            [{"type": "random-picker"}, {"type": "max-score-picker"}],
            [],
            r"expected at most one picker",
        ),
        (
            [{"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "queue-scorer"}}}],
            [{"name": "decode"}],
            r"deciders.prefill: expected a decider .*, got 'queue-scorer'",
        ),
        (
            [
                {"type": "always-disagg-pd-decider"},
                {
                    "type": "disagg-profile-handler",
                    "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}},
                },
            ],
            [{"name": "decode"}],
            r"a decider but no profile for prefill",
        ),
        (
            [{"type": "always-disagg-pd-decider"}],
            [{"name": "d", "plugins": [{"pluginRef": "always-disagg-pd-decider"}]}],
            r"always-disagg-pd-decider is not a filter, scorer or picker",
        ),
    ],
)
def test_an_invalid_configuration_is_rejected_with_its_line(
    plugins: list[Any], profiles: list[Any], complaint: str
) -> None:
    """The error names file, line and field, and the alternatives."""
    config = {"plugins": plugins} | ({"schedulingProfiles": profiles} if profiles else {})
    with pytest.raises(ConfigError, match=rf"c\.yaml:\d+: .*{complaint}"):
        pipeline(config)


def test_all_observers_are_notified_even_if_some_fail(tmp_path: Path) -> None:
    """Every observer is notified; one RequestError keeps its status, other or several errors become 500."""
    (tmp_path / "p.py").write_text(
        "from router.errors import RequestError\n"
        "class Typed:\n"
        "    def picked(self, request, targets): raise RequestError(412, 'not this one')\n"
        "class Untyped:\n"
        "    def picked(self, request, targets): raise ValueError('oops')\n"
        "class Notified:\n"
        "    def picked(self, request, targets): request.headers['notified'] = 'yes'; return {}\n"
    )

    def status(*names: str) -> tuple[int, dict[str, str]]:
        plugins = [{"type": f"p.py:{name}", "name": name} for name in names]
        made = bench(pipeline({"plugins": [{"type": "queue-scorer"}, *plugins]}, tmp_path))
        headers: dict[str, str] = {}
        with pytest.raises(RequestError) as caught:
            made.router.route(replace(completion("r", "x"), headers=headers), 0.0)
        return caught.value.status, headers

    assert status("Typed", "Notified") == (412, {"notified": "yes"})
    assert status("Untyped", "Notified") == (500, {"notified": "yes"})
    assert status("Typed", "Untyped", "Notified") == (500, {"notified": "yes"})


def test_a_failed_scorer_is_500_not_429(tmp_path: Path) -> None:
    """A plugin that raises leads to 500, not to the 429 of saturated pods."""
    (tmp_path / "p.py").write_text("class Bad:\n    def score(self, request, endpoints): raise ValueError\n")
    config = {"plugins": [{"type": "p.py:Bad", "name": "bad"}]}
    with pytest.raises(RequestError) as caught:
        bench(pipeline(config, tmp_path)).router.route(completion("r", "x"), 0.0)
    assert caught.value.status == 500


def test_plugin_states_are_shown_by_name(tmp_path: Path) -> None:
    """State and type are shown by plugin name; a plugin whose state fails does not affect the others."""
    (tmp_path / "p.py").write_text(
        "class Bad:\n"
        "    def score(self, request, endpoints): return [0.5] * len(endpoints)\n"
        "    def state(self): raise KeyError('gone')\n"
    )
    config = {
        "plugins": [
            {"type": "p.py:Bad", "name": "bad"},
            {"type": "prefix-cache-scorer"},
            {"type": "no-hit-lru-scorer", "name": "lru"},
            {
                "type": "session-affinity-scorer",
                "parameters": {"strategy": "session_id"},
            },
        ]
    }
    made = pipeline(config, tmp_path)
    bench(made).router.route(replace(completion("r", "x"), headers={"x-session-id": "s"}), 0.0)
    assert made.state() == {
        "bad": {"type": "p.py:Bad", "state": "unavailable: KeyError('gone')"},
        "prefix-cache-scorer": {"type": "prefix-cache-scorer", "state": None},
        "lru": {"type": "no-hit-lru-scorer", "state": {"endpoints": 1}},
        "session-affinity-scorer": {"type": "session-affinity-scorer", "state": {"sessions": 1}},
    }


def test_pipeline_headers_are_set_by_ext_authz() -> None:
    """Headers that plugins set on request and response are part of the ext_authz answer."""
    result = PipelineResult((A,), {}, {}, {"x-prefiller-host-port": B}, {"x-session-token": "t"}, None, "")
    answer = CheckResponse.FromString(
        ok_response(A, (), tuple(result.request_headers.items()), tuple(result.response_headers.items()))
    ).ok_response
    request_headers = {option.header.key: option.header.value for option in answer.headers}
    response_headers = {option.header.key: option.header.value for option in answer.response_headers_to_add}
    assert request_headers == {"x-gateway-destination-endpoint": A, "x-prefiller-host-port": B}
    assert response_headers == {"x-session-token": "t"}
    client = {"x-prefiller-host-port": "6.6.6.6:6", "x-encoder-hosts-ports": "6.6.6.6:6", "hi": "mom"}
    assert system_owned(client, result.request_headers) == ("x-encoder-hosts-ports",)


def test_old_metric_names_are_exported_once() -> None:
    """Each known metric family is exported under both names with the same samples, all others once."""
    registry = CollectorRegistry()
    counter = Counter("llm_d_epp_request_total", "Requests.", ["model_name"], registry=registry)
    other = Counter("llm_d_epp_other_total", "Others.", registry=registry)
    registry.register(MetricAliases((counter, other)))
    counter.labels("m").inc(3)
    page = generate_latest(registry).decode()
    assert 'inference_objective_request_total{model_name="m"} 3.0' in page
    assert page.count("\nllm_d_epp_other_total ") == page.count("\nllm_d_epp_request_total{") == 1


def test_supported_types_have_no_replacement() -> None:
    """A plugin type is either supported or has a documented replacement."""
    assert not PLUGIN_TYPES.keys() & REPLACEMENTS.keys()
