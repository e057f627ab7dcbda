"""Migration of picker configurations: what it says of each part; the new file picks as the old one did."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from router.app.config import parse_flags
from router.config.picker_file import parse_config
from router.errors import ConfigError, RequestError
from router.picking.flow_queue import read_admitters, read_flow_settings
from router.plugins.build import PLUGIN_TYPES, REMOVED, REPLACEMENTS, build_pipeline
from router.plugins.migration import migrate
from router.pods.pod_set import ROLE_LABEL
from tests.support.paths import ROOT
from tests.support.router.bench import Bench, completion, long_text, ready_pod
from tests.support.router.hermetic import HERMETIC
from tests.support.router.picker_configs import HEAD, KNOWN, plugins, profile
from tests.support.router.pricing import load

SHARED = ROOT.parent / "shared" / "data" / "hermetic_cases.json"
OLD = """\
# Our picker, since v0.6
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
# sets the headers
- type: prefill-header-handler
- type: precise-prefix-cache-scorer   # the index
  parameters:
    kvEventsConfig: {topicFilter: kv@, concurrency: 4}
- type: by-label-selector
  name: prefill-filter
  parameters: {matchLabels: {llm-d.ai/role: prefill}}
- type: by-label
  name: decode-filter
  parameters:
    label: llm-d.ai/role
    validValues: [decode, both]
- {type: by-label, name: any, parameters: {label: gone, allowsNoLabel: true}}
- {type: by-label, name: either, parameters: {label: zone, validValues: [a], allowsNoLabel: true}}
- type: tokenizer
  parameters: {modelName: m, udsTokenizerConfig: {socketFile: /tmp/t.socket}}
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 16, prefixMatchInfoProducerName: precise-prefix-cache-scorer}
- type: pd-profile-handler
  parameters: {prefillProfile: first, decodeProfile: second}
# the picker
- type: max-score-picker
- type: endpoint-notification-source
dataLayer:
  sources:
  - pluginRef: endpoint-notification-source
    extractors: [{pluginRef: precise-prefix-cache-scorer}]
schedulingProfiles:
- name: first
  plugins:
  - pluginRef: prefill-header-handler
  - pluginRef: prefill-filter
  - pluginRef: precise-prefix-cache-scorer
    weight: 50
- name: second  # with a comment
  plugins:
  - pluginRef: decode-filter
  - pluginRef: any
  - pluginRef: either
  - pluginRef: max-score-picker
"""
MORE = {
    "every old word": yaml.safe_load(OLD),
    "flat parameters": HEAD
    | {
        "plugins": plugins(
            {
                "type": "disagg-profile-handler",
                "parameters": {"decodeProfile": "d", "deciderPluginName": "x"},
            },
            {"type": "always-disagg-pd-decider", "name": "x"},
            "queue-scorer",
        ),
        "schedulingProfiles": [profile("d", "queue-scorer"), profile("prefill", "queue-scorer")],
    },
    "a producer beside the old scorer": HEAD
    | {"plugins": plugins("precise-prefix-cache-producer", "precise-prefix-cache-scorer", "tokenizer")},
}
CONFIGS = (
    {name: HEAD | config for name, config in KNOWN.items()}
    | {f"hermetic {name}": config for name, config in HERMETIC["configs"].items()}
    | MORE
)


def started(text: str) -> str:
    """Return the loader's complaint about a configuration, without its place; "" if it has none."""
    try:
        build_pipeline(parse_config(text, "c"), block_tokens=16, random=np.random.default_rng())
    except ConfigError as error:
        return str(error).rpartition(": ")[2]
    return ""


def picks(text: str) -> list[tuple[str, ...] | int]:
    """Return pods and prefill pods that a router with this configuration picks for some requests."""
    config, _ = parse_flags(["--pods-file", "/pods.yaml", "--config-text", text])
    assert config.picker is not None
    read_flow_settings(config.picker, 1.0)
    read_admitters(config.picker)
    ranker = build_pipeline(config.picker, block_tokens=16, random=np.random.default_rng(5))
    bench = Bench(ranker=ranker)
    roles = ({}, {"zone": "a"}, {ROLE_LABEL: "decode"}, {ROLE_LABEL: "prefill"}, {ROLE_LABEL: "both"})
    pods = [ready_pod(f"10.0.0.{number}:8000", adapters=["l"]) for number in range(len(roles))]
    for number, (pod, labels) in enumerate(zip(pods, roles, strict=True)):
        entry = replace(pod.entry, labels=labels)
        pods[number] = replace(pod, entry=entry, load=load(waiting=number % 3, kv_usage=0.1 * number))
    bench.with_pods(*pods)
    for number, pod in enumerate(pods):
        bench.index.hold(pod.address, bench.keys(long_text(300, number))[: 5 + 3 * number])
    found: list[tuple[str, ...] | int] = []
    for number in range(12):
        request = completion(f"r{number}", long_text(300, number % 7))
        request = msgspec.structs.replace(request, headers={"x-session-id": str(number % 3)})
        try:
            decision = bench.router.route(request, 0.0)
        except RequestError as error:
            found.append(error.status)
        else:
            found.append((*decision.destination.split(","), decision.prefill_pod or ""))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_migrated_configuration_starts_and_picks_alike(name: str) -> None:
    """The new file is accepted, picks as the old one did, and has no words left that v0.11 removes."""
    text = yaml.safe_dump(CONFIGS[name], sort_keys=False)
    migration = migrate(text, "c.yaml")
    assert migration.problems == 0, migration.lines
    new = migration.text()
    assert picks(new) == picks(text)
    left = [entry.type for entry in parse_config(new, "n").entries if entry.type in REMOVED]
    assert left == (["by-label"] if name == "every old word" else [])
    assert migrate(new, "n").edits == []


@pytest.mark.skipif(not SHARED.is_file(), reason="the reference's cases (../shared/data) are not here")
def test_the_references_own_cases_are_migrated() -> None:
    """Each configuration of the reference's hermetic cases starts and picks alike in new words."""
    for config in json.loads(SHARED.read_text())["configs"].values():
        text = yaml.safe_dump(config)
        assert picks(migrate(text, "c").text()) == picks(text)


def test_comments_outside_of_changed_entries_are_kept() -> None:
    """Only changed entries lose their comments; a list in flow style is left as it is, and that is said."""
    text = migrate(OLD, "c.yaml").text()
    for comment in ("# Our picker", "# sets the headers", "# the picker", "# with a comment"):
        assert comment in text
    in_flow = migrate(json.dumps(MORE["a producer beside the old scorer"]), "c.json")
    assert in_flow.edits == []
    assert sum("not changed" in line for line in in_flow.lines) == 2


def test_each_part_is_explained_with_its_line() -> None:
    """The findings name line, meaning, ignored parameters and what v0.11 removes."""
    lines = migrate(OLD, "c.yaml").lines
    for expected in (
        "c.yaml:2: apiVersion: the old name of llm-d.ai/v1alpha1",
        "c.yaml:9: plugins[1].parameters.kvEventsConfig.concurrency: ignored: one thread reads",
        "c.yaml:10: plugins[2]: by-label-selector: Filter that keeps",
        "c.yaml:19: plugins[5]: by-label: llm-d v0.11 removes it; there: label-selector-filter with "
        "matchExpressions; no label selector says the same",
        "c.yaml:17: llm-d v0.11 removes the value `both`",
    ):
        assert any(line.startswith(expected) for line in lines), (expected, lines)


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_what_is_not_supported_is_a_problem_with_its_alternative(kind: str) -> None:
    """Each unsupported type is named with line and alternative, and the other parts are still explained."""
    text = yaml.safe_dump(
        HEAD | {"plugins": plugins(kind, "queue-scorer", "no-such-plugin")}, sort_keys=False
    )
    migration = migrate(text, "c.yaml")
    assert migration.problems == 2
    assert any("c.yaml:4" in line and REPLACEMENTS[kind] in line for line in migration.lines)
    assert any("queue-scorer: Scores by" in line for line in migration.lines)


def test_removed_types_are_types_of_the_loader() -> None:
    """Every type that v0.11 removes is one that the loader knows, so that old files keep working."""
    for kind in REMOVED:
        parameters = {"label": "l", "allowsNoLabel": True} if kind == "by-label" else {}
        config = HEAD | {"plugins": [{"type": kind, "parameters": parameters}]}
        assert migrate(yaml.safe_dump(config), "c").problems == 0
    assert REMOVED.keys() & PLUGIN_TYPES.keys() == {"by-label", "by-label-selector"}


ODD = st.none() | st.integers() | st.text(max_size=4) | st.lists(st.integers(), max_size=2) | st.booleans()


@settings(deadline=None)
@given(st.sampled_from(sorted(MORE)), st.sampled_from(["type", "name", "parameters", "pluginRef"]), ODD)
def test_an_altered_configuration_is_migrated_or_rejected(name: str, key: str, value: Any) -> None:
    """A configuration with an arbitrary value is explained and written, or rejected with its line."""
    config = copy.deepcopy(MORE[name])
    for entry in (*config["plugins"], *config.get("schedulingProfiles", [{}])[0].get("plugins", ())):
        if key in entry:
            entry[key] = value
            break
    with suppress(ConfigError):
        migration = migrate(yaml.safe_dump(config), "c.yaml")
        if not migration.problems:
            new = migration.text()
            assert started(new) == started(yaml.safe_dump(config))


def test_a_file_that_is_no_configuration_is_rejected(tmp_path: Path) -> None:
    """Other files are rejected as the loader rejects them."""
    for text in ("", "[]", "kind: Pod", "a: &a [*a]"):
        with pytest.raises(ConfigError, match=r"^c\.yaml:"):
            migrate(text, "c.yaml")
