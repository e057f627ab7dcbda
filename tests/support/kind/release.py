"""A Helm release of the chart in a namespace of its own: its pods, pages and gateway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.kind.cluster import PACKAGES, Cluster, mounts_torch
from tests.support.kind.images import ENVOY, MODEL_SERVER, ROOT, ROUTER
from tests.support.kind.tools import Kubectl, eventually, run

CHART = ROOT / "charts" / "kvroute"
NAME = "kvroute"
MODEL_SERVERS = f"{NAME}-models"
ROUTERS = f"{NAME}-epp"
METRICS_PORT = 9090
_TIMEOUT = "8m"


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the chart.

    Attributes:
        kubectl: kubectl for the release's namespace.
        node_port: Node port on which `expose` opens the gateway.
    """

    cluster: Cluster
    kubectl: Kubectl
    node_port: int

    @property
    def url(self) -> str:
        """URL of the gateway on this machine."""
        return self.cluster.urls[self.node_port]

    def install(self, values: Mapping[str, Any] | None = None, *, wait: bool = True) -> None:
        """Install the release or upgrade it to these values and the tests' own; wait until it is ready."""
        chosen = json.dumps(merged(image_values(), values or {}))
        chart = ("--install", NAME, str(CHART), "--values", "-")
        patience = ("--wait", "--timeout", _TIMEOUT) if wait else ()
        self.helm("upgrade", *chart, "--create-namespace", *patience, stdin=chosen)

    def helm(self, command: str, *arguments: str, stdin: str | None = None) -> str:
        """Run helm in this cluster and namespace."""
        where = ("--kubeconfig", str(self.kubectl.kubeconfig), "--namespace", self.kubectl.namespace)
        return run("helm", command, *where, *arguments, stdin=stdin)

    def expose(self) -> None:
        """Open the gateway to this machine by a second Service."""
        labels = {"app.kubernetes.io/instance": NAME, "app.kubernetes.io/component": "envoy"}
        port = {"port": 80, "targetPort": "http", "nodePort": self.node_port}
        self.kubectl.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "gateway-of-tests"},
                "spec": {"type": "NodePort", "selector": labels, "ports": [port]},
            }
        )

    def discard(self) -> None:
        """Free the node port and delete the namespace."""
        self.kubectl("delete", "services", "--all")
        self.kubectl("delete", "namespace", self.kubectl.namespace, "--ignore-not-found", "--wait=false")

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Return the pods of a component that are not being deleted."""
        selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"
        found = self.kubectl.items("pods", "--selector", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def names(self, component: str) -> list[str]:
        """Return the names of a component's pods."""
        return [pod["metadata"]["name"] for pod in self.pods(component)]

    def model_servers(self) -> dict[str, dict[str, Any]]:
        """Return the model servers' pods by "ip:port"."""
        pods = self.pods("model-server")
        return {f"{pod['status']['podIP']}:8000": pod for pod in pods if "podIP" in pod["status"]}

    def page(self, router: str, path: str) -> dict[str, Any]:
        """Return a debug page of one router."""
        found: dict[str, Any] = json.loads(self.kubectl.page(router, METRICS_PORT, path))
        return found

    def decision(self, request_id: str) -> dict[str, Any]:
        """Return the decision for a request, from whichever router made it."""
        for router in self.names("router"):
            found = self.page(router, f"/debug/decisions?request_id={request_id}")["decisions"]
            if found:
                decision: dict[str, Any] = found[0]
                return decision
        raise AssertionError(f"no router has a record of request {request_id}")

    def scale(self, component: str, replicas: int) -> None:
        """Scale a component without waiting."""
        name = {"model-server": MODEL_SERVERS, "router": ROUTERS}[component]
        self.kubectl("scale", f"deployment/{name}", "--replicas", str(replicas))

    def await_settled(self, *, routers: int, model_servers: int) -> None:
        """Wait for this number of pods, and until every router follows each model server EXACT."""

        def settled() -> bool:
            addresses = self.model_servers()
            names = self.names("router")
            pods = [*addresses.values(), *self.pods("router"), *self.pods("envoy")]
            if (len(names), len(addresses)) != (routers, model_servers) or not all(map(is_ready, pods)):
                return False
            return all(self.followed(name) == set(addresses) for name in names)

        what = f"{routers} routers and {model_servers} model servers, each followed and exact"
        eventually(what, settled, deadline_s=300)

    def followed(self, router: str) -> set[str]:
        """Return the addresses of the pods that are ready and EXACT at a router."""
        pods = self.page(router, "/debug/pods")["pods"]
        return {pod["address"] for pod in pods if pod["ready"] and pod["view"] == "EXACT"}


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is Ready."""
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def image_values() -> dict[str, Any]:
    """Return values for the images under test, sized for a machine with two cores."""
    servers: dict[str, Any] = {"image": _image(MODEL_SERVER), "extraArgs": ["--torch-threads", "1"]}
    if mounts_torch():
        torch = {"name": "torch", "hostPath": {"path": PACKAGES, "type": "Directory"}}
        servers["extraVolumes"] = [torch]
        servers["extraVolumeMounts"] = [{"name": "torch", "mountPath": "/opt/torch", "readOnly": True}]
    small = {"requests": {"cpu": "20m", "memory": "64Mi"}}
    return {
        "router": {"image": _image(ROUTER), "resources": small},
        "envoy": {"image": _image(ENVOY), "resources": small},
        "modelServers": {**servers, "resources": small},
    }


def base_values(namespace: str) -> dict[str, Any]:
    """Return the base values of most tests: two routers, peers, and one more namespace for metrics."""
    label = {"kubernetes.io/metadata.name": f"{namespace}-monitoring"}
    monitoring = {"namespaceSelector": {"matchLabels": label}}
    return {
        "router": {"replicas": 2},
        "peers": {"enabled": True},
        "indexer": {"hashSeed": 8124},
        "networkPolicy": {"monitoring": [monitoring]},
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of values; the second one wins."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[name] = merged(below, value) if both else value
    return result


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.partition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}
