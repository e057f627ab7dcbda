"""Helm chart against a real API server: install, upgrade and uninstall."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart.helm import CHART, EVERYTHING, FULLNAME, RELEASE, text
from tests.support.kube.apiserver import ApiServer

# Kinds of the Prometheus operator, whose CRDs are not installed here.
_MONITORING = "monitoring.coreos.com"
_VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": EVERYTHING,
    "several routers": {"router": {"replicas": 3}, "peers": {"enabled": True}, "indexer": {"hashSeed": 1}},
    "own pods": {
        "modelServers": {"enabled": False, "matchLabels": {"app": "mine"}, "targetPorts": [8000, 8001]}
    },
    "fail open": {"envoy": {"failOpen": True, "service": {"type": "NodePort", "nodePort": 30080}}},
    "several models": {
        "modelServers": {
            "autoscaling": {"kind": "hpa"},
            "loraAdapters": [{"name": "sql", "path": "/adapters/sql"}],
        },
        "moreModelServers": {"second": {"model": {"name": "second"}, "replicas": 1}},
    },
    "one replica and a volume": {
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "modelServers": {
            "autoscaling": {"kind": "hpa", "waitingRequests": 4},
            "model": {"name": "m", "source": "hub", "hub": {"repository": "o/n", "cache": {"size": "1Gi"}}},
        },
    },
}


class Cluster:
    """kubectl and helm as administrator, in a namespace that enforces restricted pods."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.namespace = namespace
        self._environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl in the namespace."""
        return self._run(["kubectl", "--namespace", self.namespace, *arguments], stdin)

    def helm(self, *arguments: str, values: dict[str, Any] | None = None) -> None:
        """Run helm in the namespace and expect success."""
        done = self._run(
            ["helm", "--namespace", self.namespace, *arguments],
            yaml.safe_dump(values) if values is not None else None,
        )
        assert done.returncode == 0, done.stderr

    def objects(self) -> set[str]:
        """Return all objects of the release and the namespace, except Events and defaults."""
        kinds = self.kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").stdout.split()
        wanted = ",".join(sorted(kind for kind in kinds if not kind.startswith("events")))
        listed = self.kubectl("get", wanted, "-o", "name", "--ignore-not-found").stdout.split()
        wide = self.kubectl("get", "clusterroles,clusterrolebindings,priorityclasses", "-o", "name").stdout
        listed += [name for name in wide.split() if self.namespace in name]
        return set(listed) - {"configmap/kube-root-ca.crt", "serviceaccount/default"}

    def _run(self, command: list[str], stdin: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, env=self._environment)


@pytest.fixture
def cluster(api_server: ApiServer, request: pytest.FixtureRequest) -> Cluster:
    """Namespace of the shared control plane, with the Gateway API's CRDs."""
    absent = [tool for tool in ("kubectl", "helm") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"needs {' and '.join(absent)} on PATH")
    folder = Path(os.environ.get("GATEWAY_API_CRDS", "/nonexistent"))
    if not folder.is_dir():
        pytest.skip("GATEWAY_API_CRDS does not name a folder: there is no definition of HTTPRoute")
    api_server.apply_definitions(folder, only="httproutes")
    name = f"chart-{abs(hash(request.node.nodeid)) % 10**8}"
    labels = {f"pod-security.kubernetes.io/{each}": "restricted" for each in ("enforce", "warn")}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    api_server.request("POST", "/api/v1/namespaces", body)
    return Cluster(api_server, name)


@pytest.mark.parametrize("values", _VALUES.values(), ids=_VALUES.keys())
def test_the_api_server_accepts_every_object(cluster: Cluster, values: dict[str, Any]) -> None:
    """A strict server-side dry run of all objects passes without a warning about restricted pods."""
    objects = [each for each in yaml.safe_load_all(text(values)) if each]
    kept = [each for each in objects if not each["apiVersion"].startswith(_MONITORING)]
    for each in kept:
        each["metadata"].pop("namespace", None)
    done = cluster.kubectl(
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        "-",
        stdin=yaml.safe_dump_all(kept),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == len(kept)


def test_upgrade_and_uninstall_leave_nothing(cluster: Cluster) -> None:
    """Upgrades apply changed values, and an uninstall removes every object."""
    before = cluster.objects()
    cluster.helm("install", RELEASE, str(CHART), "--values", "-", values={})
    installed = cluster.objects()
    assert f"deployment.apps/{FULLNAME}-epp" in installed
    changed = {
        "commonLabels": {"team": "x"},
        "router": {"replicas": 3, "verbosity": 1},
        "envoy": {"door": "ext_proc"},
        "modelServers": {"replicas": 5, "podAnnotations": {"restarted": "now"}},
        "indexer": {"backend": "redis", "hashSeed": 1, "redis": {"deploy": True}},
        "autoscaling": {"enabled": True},
    }
    cluster.helm("upgrade", RELEASE, str(CHART), "--values", "-", values=changed)
    assert f"deployment.apps/{FULLNAME}-redis" in cluster.objects()
    to_gateway = {**EVERYTHING, "monitoring": {"dashboard": True, "auth": True}}
    cluster.helm("upgrade", RELEASE, str(CHART), "--values", "-", "--reset-values", values=to_gateway)
    now = cluster.objects()
    assert f"inferencepool.inference.networking.k8s.io/{FULLNAME}" in now
    assert f"clusterrole.rbac.authorization.k8s.io/{FULLNAME}-{cluster.namespace}-metrics-auth" in now
    assert f"deployment.apps/{FULLNAME}-envoy" not in now
    cluster.helm("upgrade", RELEASE, str(CHART), "--reset-values")
    cluster.helm("uninstall", RELEASE)
    kept = {f"persistentvolumeclaim/{FULLNAME}-models"}
    assert cluster.objects() - before == kept, "the volume claim was to be kept, and nothing else"


def test_the_routers_account_has_minimal_rights(cluster: Cluster) -> None:
    """The router's account may list pods and the pool's kinds and post Events, and nothing else."""
    cluster.helm(
        "install",
        RELEASE,
        str(CHART),
        "--values",
        "-",
        values={**EVERYTHING, "monitoring": {}, "priorityClass": {}},
    )
    account = f"--as=system:serviceaccount:{cluster.namespace}:{FULLNAME}-epp"

    def may(verb: str, resource: str, *where: str) -> bool:
        return cluster.kubectl("auth", "can-i", verb, resource, account, *where).stdout.strip() == "yes"

    for resource in (
        "pods",
        "inferencepools.inference.networking.k8s.io",
        "inferenceobjectives.inference.networking.x-k8s.io",
    ):
        assert all(may(verb, resource) for verb in ("get", "list", "watch")), resource
        assert not may("delete", resource)
    assert may("create", "events")
    assert may("patch", "events")
    assert not may("get", "secrets")
    assert not may("list", "pods", "--all-namespaces")
    assert not may("create", "pods", "--subresource=exec")
    listed = json.loads(cluster.kubectl("get", "clusterroles", "-o", "json").stdout)["items"]
    assert not [each for each in listed if "kvroute" in each["metadata"]["name"]]
