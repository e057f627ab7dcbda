"""The kind cluster of all tests, by KIND_NODE_IMAGE, KIND_CONFIG and KIND_CLUSTER.

The nodes mount this machine's installed torch, so that no image has to contain it. Three ports of the first
node are open on this machine's loopback address.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.kind.tools import Kubectl, run
from tests.support.loopback import free_port

# Ports of Services of type NodePort.
NODE_PORTS = (30080, 30081, 30082)
# Mount point of this machine's Python packages in the nodes.
PACKAGES = "/opt/host-packages"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster.

    Attributes:
        name: Name in kind.
        kubeconfig: A file of its own, never the user's.
        urls: Base URL on this machine for each of NODE_PORTS.
    """

    name: str
    kubeconfig: Path
    urls: dict[int, str]

    @property
    def node(self) -> str:
        """Name of the first node's container."""
        return f"{self.name}-control-plane"

    def kubectl(self, namespace: str = "default") -> Kubectl:
        """Return kubectl for a namespace."""
        return Kubectl(self.kubeconfig, namespace)

    def in_node(self, *command: str) -> str:
        """Run a program in the first node."""
        return run("docker", "exec", self.node, *command)

    def kill_container(self, container_id: str) -> None:
        """Kill a container without a grace period, as a crash would; Kubernetes may restart it."""
        # "containerd://ID"; the node's own ctr, because not every node image has crictl.
        container = container_id.rpartition("/")[2]
        self.in_node("ctr", "--namespace", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container)


def mounts_torch() -> bool:
    """Return whether this machine's torch runs in the images, which have Python 3.11 on Linux."""
    return sys.platform == "linux" and sys.version_info[:2] == (3, 11)


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Create a cluster and delete it at the end; or use KIND_CLUSTER, which is kept.

    Args:
        folder: Folder for the cluster's files.
    """
    kept = os.environ.get("KIND_CLUSTER")
    name = kept or f"kvroute-test-{os.getpid()}"
    kubeconfig = folder / "kubeconfig"
    named = ("--name", name, "--kubeconfig", str(kubeconfig))
    try:
        if kept and kept in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", *named)
        else:
            _create(folder, named)
        yield Cluster(name, kubeconfig, {port: _url(name, port) for port in NODE_PORTS})
    finally:
        if not kept:
            run("kind", "delete", "cluster", *named)


def _create(folder: Path, named: tuple[str, ...]) -> None:
    given = os.environ.get("KIND_CONFIG")
    config = yaml.safe_load(Path(given).read_text()) if given else {}
    path = folder / "kind.yaml"
    path.write_text(yaml.safe_dump(_with_mounts_and_ports(config)))
    image = os.environ.get("KIND_NODE_IMAGE")
    chosen = ("--image", image) if image else ()
    run("kind", "create", "cluster", *named, *chosen, "--config", str(path), "--wait", "180s")


def _with_mounts_and_ports(config: dict[str, Any]) -> dict[str, Any]:
    nodes = config.get("nodes") or [{"role": "control-plane"}]
    packages = {"hostPath": sysconfig.get_path("purelib"), "containerPath": PACKAGES, "readOnly": True}
    ports = [
        {"containerPort": port, "hostPort": free_port(), "listenAddress": "127.0.0.1"} for port in NODE_PORTS
    ]
    nodes = [
        {**node, "extraMounts": [*node.get("extraMounts", ()), *([packages] if mounts_torch() else ())]}
        for node in nodes
    ]
    nodes[0] = {**nodes[0], "extraPortMappings": [*nodes[0].get("extraPortMappings", ()), *ports]}
    return {"kind": "Cluster", "apiVersion": "kind.x-k8s.io/v1alpha4", **config, "nodes": nodes}


def _url(name: str, port: int) -> str:
    return f"http://{run('docker', 'port', f'{name}-control-plane', f'{port}/tcp').splitlines()[0]}"
