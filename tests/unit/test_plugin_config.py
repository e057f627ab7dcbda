"""From a configuration to a pipeline: defaults, plugins from files, and their pick."""

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

from router.config.picker_file import parse_config
from router.doors.ext_authz import ok_response
from router.doors.headers import system_owned
from router.errors import ConfigError, RequestError
from router.observe.metrics import MetricTwins
from router.picking.decision import Routing
from router.picking.flow_config import flow_of
from router.picking.scheduler import Scheduler
from router.plugins.build import INSTEAD, MAKERS, build_pipeline
from router.plugins.pipeline import Pipeline
from router.pods.engine_load import EngineLoad
from tests.integration.hermetic_support import DATA
from tests.unit.router_support import Bench, completion, entry, long_text, ready_pod

HEAD: dict[str, Any] = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
DOCS = (Path(__file__).parents[2] / "docs/plugins.md").read_text()
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def pipeline(config: dict[str, Any] | str, directory: Path = Path()) -> Pipeline:
    """The pipeline of a configuration."""
    text = config if isinstance(config, str) else yaml.safe_dump(HEAD | config, sort_keys=False)
    read = parse_config(text, str(directory / "c.yaml"))
    return build_pipeline(read, block_tokens=16, random=np.random.default_rng(3))


def bench(ranker: Pipeline, **loads: tuple[int, float]) -> Bench:
    """A router of two pods that picks with this pipeline; loads are (queue, KV usage) by pod."""
    made = Bench().with_pods(*(ready_pod(address) for address in (A, B)))
    for name, (waiting, usage) in loads.items():
        address = {"a": A, "b": B}[name]
        known = made.pods.snapshot()[address]
        load = EngineLoad(waiting, 0, usage, None, 0.0)
        made.pods.put(type(known)(**{f: getattr(known, f) for f in known.__slots__} | {"load": load}))
    made.core.scheduler = Scheduler(
        made.pods.board, made.ledger, np.random.default_rng(3), block_tokens=16, ranker=ranker
    )
    return made


@pytest.mark.parametrize("name", sorted(DATA["configs"]))
def test_every_configuration_of_the_cases_is_understood(name: str) -> None:
    """All of it: plugins, profiles, parsers and flow control."""
    config = parse_config(yaml.safe_dump(DATA["configs"][name]), "c.yaml")
    assert config.picks
    build_pipeline(config, block_tokens=16, random=np.random.default_rng())
    flow = flow_of(config, 1.0)
    assert (flow is not None) == ("flowControl" in DATA["configs"][name].get("featureGates", ()))


def test_scores_decide_and_are_told() -> None:
    """Without a profile all plugins make one; the decision tells sums and the parts of the best."""
    made = bench(
        pipeline({"plugins": [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}]}),
        a=(3, 0.5),
        b=(0, 0.25),
    )
    decision = made.router.route(completion("r", "hello"), 0.0)
    assert decision.primary.pod == B
    assert decision.routing is not None
    assert decision.routing.scores == pytest.approx({A: 0.5, B: 1.75})
    assert decision.reason == "weighted score 1.75 (queue-scorer 1, kv-cache-utilization-scorer 0.75)"


def test_explain_tells_what_a_pipeline_decided() -> None:
    """Each candidate's score, and the filter that removed a pod beside why others never were candidates."""
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
    shown = made.explain.one("r")
    assert shown is not None
    assert [(one["pod"], one["score"]) for one in shown["candidates"]] == [(A, 1.0), (B, 0.0)]
    assert {one["pod"]: one["reason"] for one in shown["excluded"]} == {
        "10.0.0.3:8000": "removed by filter utilization-filter",
        "10.0.0.4:8000": "removed by filter label-selector-filter",
        "10.0.0.5:8000": "does not serve the model",
    }


def test_weights_decide() -> None:
    """A profile's weights multiply its scores."""
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


def test_our_policy_is_a_scorer() -> None:
    """With ttft-cost-scorer alone the pick is the cost policy's: the cached prefix wins."""
    made = bench(pipeline({"plugins": [{"type": "ttft-cost-scorer"}]}))
    text = long_text(400)
    made.index.hold(B, made.keys(text))
    assert made.router.route(completion("r", text), 0.0).primary.pod == B


@pytest.mark.parametrize("kind", ["approx-prefix-cache-producer", "precise-prefix-cache-producer"])
def test_prefixes_come_from_the_producer_that_is_named(kind: str) -> None:
    """The precise one knows what pods told, the approximate one what was sent where."""
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


def test_a_block_of_a_slower_tier_counts_by_its_weight() -> None:
    """One host block of weight 0.8 counts as 0.8 blocks; the reference cuts the sum to a whole number."""
    made = bench(pipeline({"plugins": [{"type": "precise-prefix-cache-scorer"}]}))
    text = long_text(12)
    keys = made.keys(text)
    made.index.hold(A, keys[:1], host=True)
    routing = made.router.route(completion("r", text), 0.0).routing
    assert routing is not None
    assert routing.scores[A] * len(keys) == pytest.approx(0.8)


def test_nobody_left_is_429_and_a_broken_plugin_500(tmp_path: Path) -> None:
    """Both are counted and leave nothing in the ledger."""
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


def test_the_documented_plugin_works(tmp_path: Path) -> None:
    """The example of docs/plugins.md is loaded by its configuration, picks, and passes its own test."""
    blocks = dict(re.findall(r"```(python|yaml)\n(.*?)```", DOCS, re.S)[::-1])
    examples = re.findall(r"```python\n(.*?)```", DOCS, re.S)
    (tmp_path / "zone.py").write_text(examples[0])
    made = bench(pipeline(blocks["yaml"], tmp_path))
    decision = made.router.route(completion("r", "hello"), 0.0)
    assert decision.routing is not None
    assert decision.routing.response_headers == {"x-served-zone": ""}
    namespace: dict[str, Any] = {}
    exec(examples[0] + examples[1], namespace)


@pytest.mark.parametrize(
    ("plugins", "profiles", "complaint"),
    [
        (
            [{"type": "magic-scorer"}],
            [],
            r"plugins\[0\].type: 'magic-scorer' is not understood; there are .*queue",
        ),
        ([{"type": "latency-scorer"}], [], r"'latency-scorer' is not understood; there is ttft-cost-scorer"),
        ([{"type": "queue-scorer", "parameters": {"x": 1}}], [], r"parameters.x: unknown field; .*\(none\)"),
        ([{"type": "no.py:Class"}], [], r"type: there is no file"),
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
            r"there is no producer 'mine'; there are approx",
        ),
        (
            [{"type": "queue-scorer"}],
            [{"name": "a", "plugins": [{"pluginRef": "que"}]}],
            r"schedulingProfiles\[0\].plugins\[0\].pluginRef: no plugin named 'que'",
        ),
        ([{"type": "queue-scorer"}], [{"name": "a"}, {"name": "b"}], r"takes one profile, here are 2"),
        (
            [{"type": "random-picker"}, {"type": "max-score-picker"}],
            [],
            r"has two pickers",
        ),
        (
            [{"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "queue-scorer"}}}],
            [{"name": "decode"}],
            r"deciders.prefill: 'queue-scorer' is no decider",
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
            r"always-disagg-pd-decider has no filter, score or pick",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_at_its_place(
    plugins: list[Any], profiles: list[Any], complaint: str
) -> None:
    """File, line and field are named, and what there is instead."""
    config = {"plugins": plugins} | ({"schedulingProfiles": profiles} if profiles else {})
    with pytest.raises(ConfigError, match=rf"c\.yaml:\d+: .*{complaint}"):
        pipeline(config)


def test_several_failures_after_the_pick_are_an_internal_error(tmp_path: Path) -> None:
    """All plugins are told; one typed error keeps its status, any other and any two are a 500."""
    (tmp_path / "p.py").write_text(
        "from router.errors import RequestError\n"
        "class Typed:\n"
        "    def picked(self, request, targets): raise RequestError(412, 'not this one')\n"
        "class Untyped:\n"
        "    def picked(self, request, targets): raise ValueError('oops')\n"
        "class Told:\n"
        "    def picked(self, request, targets): request.headers['told'] = 'yes'; return {}\n"
    )

    def status(*names: str) -> tuple[int, dict[str, str]]:
        plugins = [{"type": f"p.py:{name}", "name": name} for name in names]
        made = bench(pipeline({"plugins": [{"type": "queue-scorer"}, *plugins]}, tmp_path))
        headers: dict[str, str] = {}
        with pytest.raises(RequestError) as caught:
            made.router.route(replace(completion("r", "x"), headers=headers), 0.0)
        return caught.value.status, headers

    assert status("Typed", "Told") == (412, {"told": "yes"})
    assert status("Untyped", "Told") == (500, {"told": "yes"})
    assert status("Typed", "Untyped", "Told") == (500, {"told": "yes"})


def test_a_scorer_that_fails_is_told_apart_from_full_pods(tmp_path: Path) -> None:
    """A plugin that raises is answered with 500, not with the 429 of pods that are full."""
    (tmp_path / "p.py").write_text("class Bad:\n    def score(self, request, endpoints): raise ValueError\n")
    config = {"plugins": [{"type": "p.py:Bad", "name": "bad"}]}
    with pytest.raises(RequestError) as caught:
        bench(pipeline(config, tmp_path)).router.route(completion("r", "x"), 0.0)
    assert caught.value.status == 500


def test_plugins_show_what_they_remember(tmp_path: Path) -> None:
    """By name, with their types; one that fails while it tells costs nobody else."""
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
        "bad": {"type": "p.py:Bad", "state": "not told: KeyError('gone')"},
        "prefix-cache-scorer": {"type": "prefix-cache-scorer", "state": None},
        "lru": {"type": "no-hit-lru-scorer", "state": {"endpoints": 1}},
        "session-affinity-scorer": {"type": "session-affinity-scorer", "state": {"sessions": 1}},
    }


def test_a_pipelines_headers_pass_the_check_door() -> None:
    """What plugins set on request and response is set by Envoy's other door, too."""
    routing = Routing((A,), {}, {}, {"x-prefiller-host-port": B}, {"x-session-token": "t"}, None, "")
    answer = CheckResponse.FromString(ok_response.__wrapped__(A, None, (), routing)).ok_response
    asked = {option.header.key: option.header.value for option in answer.headers}
    told = {option.header.key: option.header.value for option in answer.response_headers_to_add}
    assert asked == {"x-gateway-destination-endpoint": A, "x-prefiller-host-port": B}
    assert told == {"x-session-token": "t"}
    client = {"x-prefiller-host-port": "6.6.6.6:6", "x-encoder-hosts-ports": "6.6.6.6:6", "hi": "mom"}
    assert system_owned(client, routing.request_headers) == ("x-encoder-hosts-ports",)


def test_older_metric_names_show_the_same_once() -> None:
    """Each known family is there under both names, with the same samples, and no other twice."""
    registry = CollectorRegistry()
    registry.register(MetricTwins(registry))
    counter = Counter("llm_d_epp_request_total", "Requests.", ["model_name"], registry=registry)
    Counter("llm_d_epp_other_total", "Others.", registry=registry)
    counter.labels("m").inc(3)
    page = generate_latest(registry).decode()
    assert 'inference_objective_request_total{model_name="m"} 3.0' in page
    assert page.count("\nllm_d_epp_other_total ") == page.count("\nllm_d_epp_request_total{") == 1


def test_what_there_is_instead_is_never_what_we_have() -> None:
    """A type is either made or has a substitute."""
    assert not MAKERS.keys() & INSTEAD.keys()
