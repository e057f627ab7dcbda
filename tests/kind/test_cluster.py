"""What the chart will stand on: a real cluster comes up and takes workloads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600)]


def test_the_cluster_is_ready_for_workloads(kubeconfig: Path) -> None:
    """Every node is Ready, and Services and CoreDNS are there for the pods to find each other."""
    listed = subprocess.run(
        ["kubectl", "--kubeconfig", str(kubeconfig), "get", "nodes,deployments", "-A", "-o", "json"],
        check=True,
        capture_output=True,
    )
    items = json.loads(listed.stdout)["items"]
    nodes = [item for item in items if item["kind"] == "Node"]
    conditions = [{c["type"]: c["status"] for c in node["status"]["conditions"]} for node in nodes]
    assert nodes
    assert all(condition["Ready"] == "True" for condition in conditions)
    assert "coredns" in [item["metadata"]["name"] for item in items if item["kind"] == "Deployment"]
