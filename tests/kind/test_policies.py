"""What must be denied is denied: to the chart's service accounts by RBAC, to strangers by NetworkPolicies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kind.bystander import opens, start_bystander, stop_bystander
from tests.kind.release import Release
from tests.kind.tools import Kubectl, eventually
from tests.kind.traffic import Conversation

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

_ROUTER_PORTS = (9002, 9090)
_MODEL_SERVER_PORTS = (5557, 5558)


@pytest.fixture
def stranger(release: Release) -> Iterator[Kubectl]:
    """A pod in a namespace of its own; see `opens`."""
    kubectl = release.cluster.kubectl(f"{release.kubectl.namespace}-stranger")
    kubectl("create", "namespace", kubectl.namespace)
    start_bystander(kubectl)
    yield kubectl
    kubectl("delete", "namespace", kubectl.namespace, "--wait=false")


def test_the_routers_account_may_only_watch(release: Release) -> None:
    """It reads its namespace's pods and writes events there; no secrets, no changes, no other namespace."""
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


def test_model_servers_and_envoy_cannot_ask_the_api_server(release: Release) -> None:
    """Their pods carry no token of a service account: nothing that breaks into one gets further by it."""
    for pod in [*release.pods("model-server"), *release.pods("envoy")]:
        volumes = [source for volume in pod["spec"]["volumes"] for source in volume]
        assert pod["spec"].get("automountServiceAccountToken") is False
        assert "projected" not in volumes


def test_every_container_is_confined(release: Release) -> None:
    """No container is root, can become it, can write to its image, or keeps a capability."""
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


def test_strangers_reach_the_gateway_and_nothing_behind_it(release: Release, stranger: Kubectl) -> None:
    """From another namespace Envoy answers; routers, their metrics and the model servers' events do not."""
    gateway = f"kvroute-envoy.{release.kubectl.namespace}.svc:80"
    closed = _behind(release)
    for host, port in (address.split(":") for address in closed):
        # From the node everything is reached: so it is the policies that keep others out.
        release.cluster.in_node("bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}")
    eventually("Envoy is reached", lambda: opens(stranger, [gateway]))
    eventually("the policies are in force", lambda: not opens(stranger, closed))
    assert not Conversation(release.url).ask().failed


def test_neighbours_do_not_reach_behind_the_gateway(release: Release) -> None:
    """A pod of the same namespace that is not of the release gets no further than a stranger."""
    start_bystander(release.kubectl)
    try:
        eventually("Envoy is reached", lambda: opens(release.kubectl, ["kvroute-envoy:80"]))
        eventually("the policies are in force", lambda: not opens(release.kubectl, _behind(release)))
    finally:
        stop_bystander(release.kubectl)


def test_only_monitoring_reads_metrics(release: Release) -> None:
    """From the namespaces named in the values metrics are read, and the routers are not asked."""
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
    """Addresses that only the release's own pods may connect to."""
    routers = [pod["status"]["podIP"] for pod in release.pods("router")]
    servers = [pod["status"]["podIP"] for pod in release.pods("model-server")]
    addresses = [f"{router}:{port}" for router in routers for port in _ROUTER_PORTS]
    return addresses + [f"{server}:{port}" for server in servers for port in _MODEL_SERVER_PORTS]
