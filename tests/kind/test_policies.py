"""Denied access: to the chart's service accounts by RBAC, to other pods by NetworkPolicies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kind.bystander import opens, start_bystander, stop_bystander
from tests.support.kind.release import Release
from tests.support.kind.tools import Kubectl, eventually
from tests.support.kind.traffic import Conversation

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

_ROUTER_PORTS = (9002, 9090)
_MODEL_SERVER_PORTS = (5557, 5558)


@pytest.fixture
def stranger(release: Release) -> Iterator[Kubectl]:
    """Run a pod in a namespace of its own that can try connections."""
    kubectl = release.cluster.kubectl(f"{release.kubectl.namespace}-stranger")
    kubectl("create", "namespace", kubectl.namespace)
    start_bystander(kubectl)
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


def test_the_routers_account_has_minimal_rights(release: Release) -> None:
    """The router's account may read pods and write events in its namespace, and nothing else."""
    spec = release.pods("router")[0]["spec"]
    account, may = spec["serviceAccountName"], release.kubectl.may
    assert account != "default"
    assert all(may(account, verb, "pods") for verb in ("get", "list", "watch"))
    assert may(account, "create", "events")
    denied = [(verb, "pods") for verb in ("create", "update", "patch", "delete")]
    denied += [("get", "secrets"), ("list", "secrets"), ("list", "configmaps"), ("create", "pods/exec")]
    denied += [("patch", "deployments.apps"), ("create", "rolebindings.rbac.authorization.k8s.io")]
    assert [pair for pair in denied if may(account, *pair)] == []
    assert not may(account, "list", "pods", everywhere=True)
    assert not may(account, "create", "events", everywhere=True)


def test_model_servers_and_envoy_have_no_token(release: Release) -> None:
    """Pods of model servers and Envoy have no service account token."""
    for pod in [*release.pods("model-server"), *release.pods("envoy")]:
        volumes = [source for volume in pod["spec"]["volumes"] for source in volume]
        assert pod["spec"].get("automountServiceAccountToken") is False
        assert "projected" not in volumes


def test_every_container_is_confined(release: Release) -> None:
    """No container runs as root, can gain privileges, can write to its image, or has a capability."""
    components = ("router", "envoy", "model-server")
    for pod in [pod for component in components for pod in release.pods(component)]:
        of_pod: dict[str, Any] = pod["spec"]["securityContext"]
        for container in pod["spec"]["containers"]:
            context = {**of_pod, **container["securityContext"]}
            assert context["runAsNonRoot"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_other_namespaces_reach_only_the_gateway(release: Release, stranger: Kubectl) -> None:
    """From another namespace only Envoy is reachable, not routers, their metrics or engines' events."""
    gateway = f"kvroute-envoy.{release.kubectl.namespace}.svc:80"
    closed = _behind(release)
    for host, port in (address.split(":") for address in closed):
        # The node reaches everything, so it is the policies that deny the pod.
        release.cluster.in_node("bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}")
    eventually("Envoy is reached", lambda: opens(stranger, [gateway]))
    eventually("the policies are in force", lambda: not opens(stranger, closed))
    assert not Conversation(release.url).ask().failed


def test_other_pods_of_the_namespace_reach_only_the_gateway(release: Release) -> None:
    """A pod of the same namespace outside the release reaches only Envoy."""
    start_bystander(release.kubectl)
    try:
        eventually("Envoy is reached", lambda: opens(release.kubectl, ["kvroute-envoy:80"]))
        eventually("the policies are in force", lambda: not opens(release.kubectl, _behind(release)))
    finally:
        stop_bystander(release.kubectl)


def test_only_monitoring_reads_metrics(release: Release) -> None:
    """Namespaces named in the values reach the metrics port, not the routers' gRPC port."""
    kubectl = release.cluster.kubectl(f"{release.kubectl.namespace}-monitoring")
    kubectl("create", "namespace", kubectl.namespace)
    try:
        start_bystander(kubectl)
        router = release.pods("router")[0]["status"]["podIP"]
        eventually("metrics are reached", lambda: opens(kubectl, [f"{router}:9090"]))
        closed = [address for address in _behind(release) if not address.endswith(":9090")]
        eventually("the policies are in force", lambda: not opens(kubectl, closed))
    finally:
        kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


def _behind(release: Release) -> list[str]:
    """Return the addresses to which only the release's own pods may connect."""
    routers = [pod["status"]["podIP"] for pod in release.pods("router")]
    servers = [pod["status"]["podIP"] for pod in release.pods("model-server")]
    addresses = [f"{router}:{port}" for router in routers for port in _ROUTER_PORTS]
    return addresses + [f"{server}:{port}" for server in servers for port in _MODEL_SERVER_PORTS]
