"""A namespace of a test's own with pods, pools and routers; model servers are local HTTP servers."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc

from router._pb import endpoint_picker_pb2 as pb
from router._pb import endpoint_picker_pb2_grpc as pb_grpc
from router.app.server import RouterServer
from router.config.kube import LLMD_GROUP, OLD_GROUP, POOL_GROUP, KubeConfig
from router.pods.kube.problems import Reason
from tests.integration.kube.apiserver import ApiServer
from tests.integration.router_server_support import FakePod, get, running_router

SELECTOR = {"app": "llm"}
POOL = "pool"

_PATIENCE_S = 300.0
_numbers = itertools.count(1)
_POOLS = f"/apis/{POOL_GROUP}/v1/namespaces"


class Namespace:
    """One namespace; whatever is made in it can be changed by name.

    Args:
        server: The API server.
        port: Where all its model servers listen, each at an address of its own.
    """

    def __init__(self, server: ApiServer, port: int) -> None:
        self.server = server
        self.name = f"test-{os.getpid()}-{next(_numbers)}"
        self.port = port
        self.servers: dict[str, FakePod] = {}
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.name}})

    def close(self) -> None:
        """Ends the model servers."""
        for fake in self.servers.values():
            fake.stop()

    def pod(
        self,
        name: str,
        *,
        ready: bool = True,
        serves: bool = True,
        labels: Mapping[str, str] = SELECTOR,
        annotations: Mapping[str, str] | None = None,
    ) -> FakePod | None:
        """A new pod, with a model server where `serves` says so."""
        address, fake = next_address(), None
        if serves:
            fake = self.servers[name] = FakePod(self.port, address)
        self.make_pod(name, address, labels=labels, annotations=annotations)
        if ready:
            self.set_status(name)
        return fake

    def make_pod(
        self,
        name: str,
        address: str,
        *,
        labels: Mapping[str, str] = SELECTOR,
        annotations: Mapping[str, str] | None = None,
        readiness_port: int | None = None,
    ) -> None:
        """A pod's object, Running and not Ready."""
        metadata = {"name": name, "labels": dict(labels), "annotations": dict(annotations or {})}
        probe = {"readinessProbe": {"tcpSocket": {"port": readiness_port}}} if readiness_port else {}
        spec = {"containers": [{"name": "engine", "image": "none", **probe}]}
        self.server.request("POST", self._pods(), {"metadata": metadata, "spec": spec})
        self.set_status(name, ready=False, address=address)

    def set_status(
        self,
        name: str,
        *,
        ready: bool = True,
        address: str | None = None,
        restarts: int = 0,
        phase: str = "Running",
    ) -> None:
        """Writes a pod's status, as a kubelet would."""
        status: dict[str, Any] = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [
                {
                    "name": "engine",
                    "image": "none",
                    "imageID": "",
                    "ready": ready,
                    "restartCount": restarts,
                    "containerID": f"containerd://{name}-{restarts}",
                }
            ],
        }
        if address is not None:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        self.server.request("PATCH", self._pods(name) + "/status", {"status": status})

    def patch_pod(self, name: str, change: Mapping[str, Any]) -> None:
        """Changes a pod's object."""
        self.server.request("PATCH", self._pods(name), change)

    def delete_pod(self, name: str, *, grace_s: int = 0) -> None:
        """Deletes a pod; with a grace period it is ending until it is deleted without one."""
        self.server.request("DELETE", self._pods(name), {"gracePeriodSeconds": grace_s})

    def bind(self, name: str, node: str = "node") -> None:
        """Gives a pod a node: only then does a deletion wait for its grace period."""
        binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        self.server.request("POST", self._pods(name) + "/binding", binding)

    def pool(
        self, name: str = POOL, *, selector: Mapping[str, str] = SELECTOR, ports: Sequence[int] = ()
    ) -> None:
        """Makes or changes an InferencePool."""
        spec = {
            "selector": {"matchLabels": dict(selector)},
            "targetPorts": [{"number": number} for number in ports or [self.port]],
            "endpointPickerRef": {"name": "router", "port": {"number": 9002}},
        }
        path = f"{_POOLS}/{self.name}/inferencepools"
        if self.server.request("GET", f"{path}/{name}", check=False)[0] == 200:
            # A merge would keep the former labels.
            change = [{"op": "replace", "path": "/spec", "value": spec}]
            self.server.request("PATCH", f"{path}/{name}", change, patch="json")
        else:
            self.make(POOL_GROUP, "v1", "InferencePool", "inferencepools", name, spec)

    def delete_pool(self, name: str = POOL) -> None:
        """Deletes a pool."""
        self.server.request("DELETE", f"{_POOLS}/{self.name}/inferencepools/{name}")

    def make(
        self, group: str, version: str, kind: str, plural: str, name: str, spec: Mapping[str, Any]
    ) -> None:
        """Makes an object of a definition."""
        body = {
            "apiVersion": f"{group}/{version}",
            "kind": kind,
            "metadata": {"name": name},
            "spec": dict(spec),
        }
        self.server.request("POST", f"/apis/{group}/{version}/namespaces/{self.name}/{plural}", body)

    def objective(self, name: str, priority: int, *, pool: str = POOL, group: str = OLD_GROUP) -> None:
        """Makes an InferenceObjective."""
        spec = {"priority": priority, "poolRef": {"name": pool}}
        self.make(group, "v1alpha2", "InferenceObjective", "inferenceobjectives", name, spec)

    def rewrite(
        self, name: str, model: str, target: str, *, pool: str = POOL, group: str = OLD_GROUP
    ) -> None:
        """Makes an InferenceModelRewrite."""
        rule = {"matches": [{"model": {"value": model}}], "targets": [{"modelRewrite": target}]}
        spec = {"poolRef": {"name": pool}, "rules": [rule]}
        self.make(group, "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites", name, spec)

    def change(self, plural: str, name: str, spec: Mapping[str, Any], *, group: str = OLD_GROUP) -> None:
        """Changes an objective or a rewrite."""
        path = f"/apis/{group}/v1alpha2/namespaces/{self.name}/{plural}/{name}"
        self.server.request("PATCH", path, {"spec": spec})

    def delete(self, plural: str, name: str, *, group: str = OLD_GROUP) -> None:
        """Deletes an objective or a rewrite."""
        self.server.request("DELETE", f"/apis/{group}/v1alpha2/namespaces/{self.name}/{plural}/{name}")

    def account(self, name: str = "router") -> None:
        """A service account without any rights."""
        path = f"/api/v1/namespaces/{self.name}/serviceaccounts"
        self.server.request("POST", path, {"metadata": {"name": name}})

    def grant(self, name: str = "router", *, without: Sequence[str] = ()) -> None:
        """Gives the account the rights that a router needs, but for some resources."""
        reads = ["get", "list", "watch"]
        rules = [
            {"apiGroups": [""], "resources": ["pods"], "verbs": reads},
            {"apiGroups": [POOL_GROUP, OLD_GROUP], "resources": ["inferencepools"], "verbs": reads},
            {
                "apiGroups": [LLMD_GROUP, OLD_GROUP],
                "resources": ["inferenceobjectives", "inferencemodelrewrites"],
                "verbs": reads,
            },
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
        ]
        granted = [rule for rule in rules if not set(rule["resources"]) & set(without)]
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.name}"
        role = {"metadata": {"name": name}, "rules": granted}
        if self.server.request("POST", f"{path}/roles", role, check=False)[0] == 409:
            self.server.request("PUT", f"{path}/roles/{name}", role)
        binding = {
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": self.name}],
        }
        self.server.request("POST", f"{path}/rolebindings", binding, check=False)

    def events(self) -> list[dict[str, Any]]:
        """All Kubernetes Events."""
        return list(self.server.request("GET", f"/api/v1/namespaces/{self.name}/events")[1]["items"])

    def config(self, **settings: Any) -> KubeConfig:
        """A router's, as an administrator that follows the pool."""
        known: dict[str, Any] = {"pool": POOL, "namespace": self.name, "kubeconfig": self.server.kubeconfig}
        if "selector" in settings:
            known |= {"pool": "", "target_ports": (self.port,)}
        return KubeConfig(**{**known, **settings})

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.name}/pods" + (f"/{name}" if name else "")


@contextmanager
def kube_router(config: KubeConfig, **settings: Any) -> Iterator[RouterServer]:
    """A started router that finds its pods in Kubernetes."""
    with running_router(None, kube=config, **settings) as router:
        yield router


class Picker:
    """Asks a router over gRPC."""

    def __init__(self, router: RouterServer) -> None:
        self._stack = ExitStack()
        self._channel = self._stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}"))
        self._stub = pb_grpc.EndpointPickerStub(self._channel)

    def close(self) -> None:
        """Ends the connection."""
        self._stack.close()

    def pick(self, **fields: Any) -> str:
        """The address of one pick; "" when there is no pod for it, "shed" when they are saturated."""
        try:
            return self._picked(fields)
        except grpc.RpcError as error:
            refusals = {grpc.StatusCode.UNAVAILABLE: "", grpc.StatusCode.RESOURCE_EXHAUSTED: "shed"}
            if error.code() in refusals:
                return refusals[error.code()]
            raise

    def refusal(self) -> str:
        """Why one pick finds no pod; "" when it finds one."""
        try:
            self._picked({})
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    def begin(self, request_id: str) -> None:
        """Picks for a request that stays in flight."""
        request = pb.PickEndpointRequest(request_id=request_id, model="kvroute-tiny", prompt="hello")
        self._stub.PickEndpoint(request, timeout=300)

    def end(self, request_id: str) -> None:
        """Tells that such a request is over."""
        done = pb.ReportOutcomeRequest.OUTCOME_DONE
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(request_id=request_id, outcome=done))

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Predicted cached tokens of a prompt at the best pod; -1 when there is no pod."""
        request = pb.PickEndpointRequest(model="kvroute-tiny", token_ids=pb.TokenIds(ids=token_ids))
        try:
            answer = self._stub.PickEndpoint(request, timeout=300)
        except grpc.RpcError:
            return -1
        failed = pb.ReportOutcomeRequest.OUTCOME_FAILED
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(request_id=answer.request_id, outcome=failed))
        return int(answer.endpoints[0].cached_tokens)

    def picks(self, count: int = 12) -> set[str]:
        """The addresses of some picks."""
        return {self.pick() for _ in range(count)}

    def _picked(self, fields: Mapping[str, Any]) -> str:
        request = pb.PickEndpointRequest(**{"model": "kvroute-tiny", "prompt": "hello", **fields})
        answer = self._stub.PickEndpoint(request, timeout=300)
        # Over at once, so that the next pick finds the pods as this one did.
        done = pb.ReportOutcomeRequest.OUTCOME_DONE
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(request_id=answer.request_id, outcome=done))
        return str(answer.endpoints[0].address)


def next_address() -> str:
    """A loopback address that no other pod of this process has."""
    number = next(_numbers)
    return f"127.{1 + os.getpid() % 200}.{1 + number // 250 % 250}.{1 + number % 250}"


def eventually_picked(picker: Picker, *addresses: str) -> None:
    """Waits until exactly these are picked."""
    eventually(lambda: picker.picks() == set(addresses), f"picks of {addresses}")


def problems(router: RouterServer) -> dict[str, str]:
    """What the router complains of, by reason; not that these tests' model servers publish no events."""
    shown = json.loads(get(router, "/debug/discovery")[1])
    return {
        problem["reason"]: problem["detail"]
        for problem in shown["problems"]
        if problem["reason"] != Reason.ENGINE_WITHOUT_EVENTS
    }


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Waits for what takes its time also where nothing is wrong."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {_PATIENCE_S} s: {what}"
        time.sleep(0.05)
