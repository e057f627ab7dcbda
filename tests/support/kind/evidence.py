"""Evidence of a failed test: logs, events, objects and decisions of a cluster, as files."""

from __future__ import annotations

from pathlib import Path

from tests.support.kind.cluster import Cluster
from tests.support.kind.release import METRICS_PORT
from tests.support.kind.tools import Kubectl, ToolError

_OURS = "app.kubernetes.io/name=kvroute"
_PAGES = {"decisions": "/debug/decisions?n=1000", "pods": "/debug/pods", "discovery": "/debug/discovery"}


def collect(cluster: Cluster, folder: Path) -> None:
    """Write what is available; for the rest, write the error."""
    for pod in cluster.kubectl().items("pods", "--all-namespaces", "--selector", _OURS):
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        kubectl, below = cluster.kubectl(namespace), folder / namespace
        _write(below / f"{name}.log", kubectl, "logs", name, "--all-containers", "--prefix", "--timestamps")
        if any(each["restartCount"] for each in pod["status"].get("containerStatuses", ())):
            _write(below / f"{name}.before.log", kubectl, "logs", name, "--previous", "--timestamps")
        if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "router":
            for page, path in {**_PAGES, "metrics": "/metrics"}.items():
                at = f"/api/v1/namespaces/{namespace}/pods/{name}:{METRICS_PORT}/proxy{path}"
                _write(below / f"{name}.{page}", kubectl, "get", "--raw", at)
    everywhere = cluster.kubectl()
    _write(folder / "events", everywhere, "get", "events", "-A", "--sort-by", ".lastTimestamp")
    _write(folder / "pods.yaml", everywhere, "get", "pods", "-A", "--output", "yaml")


def _write(path: Path, kubectl: Kubectl, *arguments: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(kubectl(*arguments))
    except ToolError as error:
        path.write_text(str(error))
