"""Dashboard, alerts and recording rules: every metric that they query is exported, every runbook exists."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from indexer.streams.redis_link import RedisMetrics
from kvroute.envoy_config import EnvoySettings, bootstrap
from kvroute.stack import envoy_command
from model_server.openai.metrics import EngineCollector, RequestMetrics
from model_server.requests import EngineStats
from router.pods.kube.problems import Problems
from tests.support.chart.helm import CHART, EVERYTHING, FULLNAME, manifests, one
from tests.support.loopback import HERE, free_ports, listens
from tests.support.paths import ROOT
from tests.support.router.doors import wait_until
from tests.support.router.server import fake_pods, running_router, write_pods

_NAME = re.compile(r"\b(?:(?:llm_d_epp|kvroute|envoy)_\w+(?=\{)|vllm:\w+)")
_RECORDED = re.compile(r"\bkvroute:\w[\w:]*")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_RUNBOOKS = "https://docs.example"
# Questions that the dashboard answers, in this order.
_QUESTIONS = (
    "Is it exact?",
    "Why not?",
    "How much of each prompt was cached?",
    "Where are tokens lost?",
    "What is it worth?",
    "Is it saturated?",
    "What fails?",
    "What do engines and Envoy say?",
)
_IDLE = EngineStats(0, 0, 0.0, 1, 0, 0, 0, 0, 0, 0, 0.0, True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the names of all metrics of a router in all settings, an engine and an Envoy."""
    directory = tmp_path_factory.mktemp("metrics")
    others = CollectorRegistry()
    RedisMetrics(others)
    Problems(others, lambda _reason, _detail: None)
    RequestMetrics("m", others)
    others.register(EngineCollector("m", lambda: _IDLE, None, {}))
    pages = [generate_latest(others).decode()]
    with fake_pods(1) as pods:
        with running_router(write_pods(directory / "pods.yaml", [pods[0].address])) as router:
            pages.append(_page(f"http://{HERE}:{router.ports['metrics']}/metrics"))
        pages.append(_envoys_page(directory, pods[0].port))
    return {name for page in pages for name in _names(page)}


def test_every_queried_metric_is_exported(exported: set[str]) -> None:
    """Every metric in a panel, an alert or a recording rule is exported."""
    asked = list(_asked_for())
    assert len(asked) > 50
    assert {where: missing for where, names in asked if (missing := names - exported)} == {}


def rendered_rules() -> list[dict[str, Any]]:
    """Return the rules of the rendered chart."""
    values = {**EVERYTHING, "monitoring": {**EVERYTHING["monitoring"], "runbooks": _RUNBOOKS}}
    groups = one(manifests(values), "PrometheusRule", "-epp")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_rule_selects_the_release() -> None:
    """Rendered rules select only the release's routers or engines, alerts wait, and recorded names exist."""
    rules = rendered_rules()
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        selectors = re.findall(r"\{([^}]*)\}", rule["expr"])
        assert selectors
        ours = f'namespace="llm",service="{FULLNAME}-epp"', f'namespace="llm",pod=~"{FULLNAME}-models-.*"'
        assert all(selector.startswith(ours) for selector in selectors)
        assert set(_RECORDED.findall(rule["expr"])) <= recorded
        if "record" in rule:
            # Without these labels a rule that reads the series could not select the release.
            assert "by (namespace, service" in rule["expr"]
            continue
        assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["for"]


def test_every_alert_leads_to_a_section_of_the_documentation() -> None:
    """The runbook of each alert is a heading of a page of docs/, below the address that the values name."""
    for rule in rendered_rules():
        if "alert" in rule:
            address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            page = ROOT / "docs" / address.removeprefix(f"{_RUNBOOKS}/")
            headings = _HEADING.findall(page.read_text())
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, rule["alert"]


def test_the_dashboard_is_well_formed() -> None:
    """Rows are the questions; panels have unique ids, no common place, a description and the data source."""
    panels = json.loads(one(manifests(EVERYTHING), "ConfigMap", "-dashboard")["data"]["kvroute.json"])[
        "panels"
    ]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert tuple(panel["title"] for panel in panels if panel["type"] == "row") == _QUESTIONS
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    sources = {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"}
    assert sources == {"${datasource}"}


def _asked_for() -> Iterator[tuple[str, set[str]]]:
    dashboard: dict[str, Any] = json.loads((CHART / "files" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            names = {name for target in panel["targets"] for name in _NAME.findall(target["expr"])}
            assert names, panel["title"]
            yield panel["title"], names
    for group in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            names, where = set(_NAME.findall(rule["expr"])), rule.get("alert") or rule["record"]
            assert names or _RECORDED.findall(rule["expr"]), where
            yield where, names


def _names(page: str) -> Iterator[str]:
    """Return the sample names of a registry, including metrics without samples."""
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE):
        yield name
        if kind == "histogram":
            yield from (f"{name}_bucket", f"{name}_sum", f"{name}_count")


def _page(url: str) -> str:
    return urllib3.request("GET", url, timeout=300).data.decode()


def _envoys_page(directory: Path, pod_port: int) -> str:
    """Return the metrics page of an Envoy that has served a request."""
    gateway, admin, closed = free_ports(3)
    nowhere = (HERE, closed)
    settings = EnvoySettings(gateway=(HERE, gateway), routers=[nowhere], pods=[(HERE, pod_port)])
    config = bootstrap(settings)
    config["admin"] = {"address": {"socket_address": {"address": HERE, "port_value": admin}}}
    path = directory / "envoy.json"
    path.write_text(json.dumps(config))
    command = [envoy_command(), "-c", str(path), "--disable-hot-restart", "--log-level", "error"]
    with subprocess.Popen([*command, "--concurrency", "1"]) as process:
        try:
            wait_until(lambda: listens(gateway), "Envoy")
            _page(f"http://{HERE}:{gateway}/v1/models")
            return _page(f"http://{HERE}:{admin}/stats/prometheus")
        finally:
            process.kill()
