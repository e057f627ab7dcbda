"""The chart as a Helm release in a namespace of its own: values in; its pods, pages and gateway out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.kind.cluster import PACKAGES, Cluster, mounts_torch
from tests.kind.images import ENVOY, MODEL_SERVER, ROOT, ROUTER
from tests.kind.tools import Kubectl, eventually, run

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
        kubectl: In its namespace.
        node_port: Where `expose` opens its gateway.
    """

    cluster: Cluster
    kubectl: Kubectl
    node_port: int

    @property
    def url(self) -> str:
        """Of its gateway, on this machine."""
        return self.cluster.urls[self.node_port]

    def install(self, values: Mapping[str, Any] | None = None, *, wait: bool = True) -> None:
        """Installs the release, or upgrades it to these values and the tests' own; waits until it is up."""
        chosen = json.dumps(merged(image_values(), values or {}))
        chart = ("--install", NAME, str(CHART), "--values", "-")
        patience = ("--wait", "--timeout", _TIMEOUT) if wait else ()
        self.helm("upgrade", *chart, "--create-namespace", *patience, stdin=chosen)

    def helm(self, command: str, *arguments: str, stdin: str | None = None) -> str:
        """Runs helm in this cluster and namespace."""
        where = ("--kubeconfig", str(self.kubectl.kubeconfig), "--namespace", self.kubectl.namespace)
        return run("helm", command, *where, *arguments, stdin=stdin)

    def expose(self) -> None:
        """Opens the gateway to this machine, beside the chart's own Service."""
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
        """Gives the node's port back, and has the namespace deleted with all that is in it."""
        self.kubectl("delete", "services", "--all")
        self.kubectl("delete", "namespace", self.kubectl.namespace, "--ignore-not-found", "--wait=false")

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of a component that are not being deleted."""
        selector = f"app.kubernetes.io/instance={NAME},app.kubernetes.io/component={component}"
        found = self.kubectl.items("pods", "--selector", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def names(self, component: str) -> list[str]:
        """Their names."""
        return [pod["metadata"]["name"] for pod in self.pods(component)]

    def model_servers(self) -> dict[str, dict[str, Any]]:
        """The model servers' pods by "ip:port"."""
        pods = self.pods("model-server")
        return {f"{pod['status']['podIP']}:8000": pod for pod in pods if "podIP" in pod["status"]}

    def page(self, router: str, path: str) -> dict[str, Any]:
        """A debug page of one router."""
        found: dict[str, Any] = json.loads(self.kubectl.page(router, METRICS_PORT, path))
        return found

    def decision(self, request_id: str) -> dict[str, Any]:
        """The explanation of one pick, of whichever router made it."""
        for router in self.names("router"):
            found = self.page(router, f"/debug/decisions?request_id={request_id}")["decisions"]
            if found:
                decision: dict[str, Any] = found[0]
                return decision
        raise AssertionError(f"no router has a record of request {request_id}")

    def scale(self, component: str, replicas: int) -> None:
        """Changes the number of a component's pods; does not wait."""
        name = {"model-server": MODEL_SERVERS, "router": ROUTERS}[component]
        self.kubectl("scale", f"deployment/{name}", "--replicas", str(replicas))

    def await_settled(self, *, routers: int, model_servers: int) -> None:
        """Waits until there are that many pods, and every router follows each model server without doubt."""

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
        """Addresses of the pods that a router would pick and whose caches it knows exactly."""
        pods = self.page(router, "/debug/pods")["pods"]
        return {pod["address"] for pod in pods if pod["ready"] and pod["view"] == "EXACT"}


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is Ready."""
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def image_values() -> dict[str, Any]:
    """Values for the images under test, on a machine that has two cores for all of it."""
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
    """Values of the release that most tests share: two routers, peers, and metrics for one more namespace."""
    label = {"kubernetes.io/metadata.name": f"{namespace}-monitoring"}
    monitoring = {"namespaceSelector": {"matchLabels": label}}
    return {
        "router": {"replicas": 2},
        "peers": {"enabled": True},
        "indexer": {"hashSeed": 8124},
        "networkPolicy": {"monitoring": [monitoring]},
    }


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees of values; the second one wins."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        result[name] = merged(below, value) if both else value
    return result


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.partition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}
