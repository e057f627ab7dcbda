"""Mistakes of operators: each is reported by one log line, a Kubernetes Event and a metric."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.kind.bystander import start_bystander
from tests.support.kind.cluster import NODE_PORTS, Cluster
from tests.support.kind.release import METRICS_PORT, Release
from tests.support.kind.tools import eventually

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

_OTHER_GROUP = "inference.networking.x-k8s.io"
_BYSTANDERS = {"app": "bystander"}
_NO_SERVERS = {"enabled": False, "matchLabels": _BYSTANDERS}


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake as values of the chart.

    Attributes:
        reason: Reason of the Event and the metric.
        words: Pattern of the log line's text.
        loses_rights: Whether the router's service account may not read pods.
    """

    reason: str
    words: str
    values: dict[str, Any]
    loses_rights: bool = False


_MISTAKES = {
    "wrong label": Mistake(
        "NoPodsMatch",
        "app=mispelt",
        {"modelServers": {"enabled": False, "matchLabels": {"app": "mispelt"}}},
    ),
    "wrong port": Mistake("WrongTargetPort", "bystander.*:8000", {"modelServers": _NO_SERVERS}),
    "missing CRD": Mistake(
        "CrdMissing",
        _OTHER_GROUP,
        {
            "mode": "gateway",
            "gateway": {"inferencePool": {"create": False, "name": "pool"}, "httpRoute": {"create": False}},
            "modelServers": _NO_SERVERS,
            "networkPolicy": {"enabled": False},
            "router": {"extraArgs": [f"--pool-group={_OTHER_GROUP}"]},
        },
    ),
    "engine without events": Mistake(
        "EngineWithoutEvents",
        "kvroute-models",
        {"modelServers": {"replicas": 1, "extraArgs": ["--torch-threads", "1", "--no-kv-events"]}},
    ),
    "no RBAC": Mistake("Forbidden", "pods", {"modelServers": _NO_SERVERS}, loses_rights=True),
}


@pytest.fixture(scope="module")
def mistaken(cluster: Cluster) -> Iterator[Release]:
    """Create a namespace with a Ready pod that serves nothing, for releases that will not work."""
    kubectl = cluster.kubectl(f"kvroute-{os.getpid()}-mistakes")
    kubectl("create", "namespace", kubectl.namespace)
    release = Release(cluster, kubectl, NODE_PORTS[1])
    try:
        start_bystander(kubectl, _BYSTANDERS)
        _allow_other_pools(release)
        yield release
    finally:
        release.discard()


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_mistake_is_reported_once_in_three_ways(mistaken: Release, name: str) -> None:
    """A mistake is reported once, by a log line, an Event that kubectl shows, and a metric."""
    mistake = _MISTAKES[name]
    mistaken.helm("uninstall", "kvroute", "--ignore-not-found", "--wait")
    mistaken.install(mistake.values, wait=False)
    if mistake.loses_rights:
        _take_rights(mistaken)
    gauge = f'kvroute_discovery_problem{{reason="{mistake.reason}"}} 1.0'
    router = eventually("the metric says so", lambda: _router_that_says(mistaken, gauge), deadline_s=300)
    log = mistaken.kubectl("logs", router)
    lines = [line for line in log.splitlines() if f"reason={mistake.reason} " in line]
    assert len(lines) == 1, log
    assert re.search(mistake.words, lines[0])
    assert eventually("an Event", lambda: _events(mistaken, router, mistake.reason))


def _router_that_says(release: Release, text: str) -> str | None:
    for name in release.names("router"):
        if text in release.kubectl.page(name, METRICS_PORT, "/metrics"):
            return name
    return None


def _events(release: Release, router: str, reason: str) -> list[str]:
    """Return the messages of this reason's Events about the router's pod or the pool."""
    found = release.kubectl.items("events", "--field-selector", f"reason={reason}")
    return [event["message"] for event in found if event["involvedObject"]["name"] in (router, "pool")]


def _allow_other_pools(release: Release) -> None:
    """Allow the router's account to read pools of a group that the cluster lacks."""
    name = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "other-pools"}}
    rule = {"apiGroups": [_OTHER_GROUP], "resources": ["inferencepools"], "verbs": ["get", "list", "watch"]}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "other-pools"}
    account = {"kind": "ServiceAccount", "name": "kvroute-epp", "namespace": release.kubectl.namespace}
    release.kubectl.apply(
        {**name, "kind": "Role", "rules": [rule]},
        {**name, "kind": "RoleBinding", "roleRef": role, "subjects": [account]},
    )


def _take_rights(release: Release) -> None:
    """Before the router starts, deny its account everything except writing Events."""
    patch = '[{"op": "replace", "path": "/rules/0/verbs", "value": ["get"]}]'
    release.kubectl("patch", "role", "kvroute-epp-pods", "--type", "json", "--patch", patch)
    release.kubectl("delete", "pod", *release.names("router"), "--now")
