"""Namespace of one test with pods, pools and routers; model servers are local HTTP servers."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ext_proc_grpc

from router._pb import endpoint_picker_pb2 as pb
from router.app.server import RouterServer
from router.config.kube import LLMD_GROUP, OLD_GROUP, POOL_GROUP, KubeConfig
from router.pods.kube.problems import Reason
from tests.support.kube.apiserver import ApiServer
from tests.support.router.doors import Stream, body, headers, streamed_bytes
from tests.support.router.server import FakePod, get, running_router
from tests.support.stubs import picker_stub

SELECTOR = {"app": "llm"}
POOL = "pool"

_PATIENCE_S = 300.0
_numbers = itertools.count(1)
_POOLS = f"/apis/{POOL_GROUP}/v1/namespaces"


class Namespace:
    """Namespace whose objects can be created and changed by name.

    Args:
        server: The API server.
        port: Port of all its model servers, each at its own address.
    """

    def __init__(self, server: ApiServer, port: int) -> None:
        self.server = server
        self.name = f"test-{os.getpid()}-{next(_numbers)}"
        self.port = port
        self.servers: dict[str, FakePod] = {}
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.name}})

    def close(self) -> None:
        """Stop the model servers."""
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
        """Create a pod, with a model server if `serves` is set."""
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
        """Create a pod's object, Running and not Ready."""
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
        """Write a pod's status, like a kubelet."""
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
        """Change a pod's object."""
        self.server.request("PATCH", self._pods(name), change)

    def delete_pod(self, name: str, *, grace_s: int = 0) -> None:
        """Delete a pod; with a grace period it stays terminating until deleted without one."""
        self.server.request("DELETE", self._pods(name), {"gracePeriodSeconds": grace_s})

    def bind(self, name: str, node: str = "node") -> None:
        """Assign a pod to a node; only then does a deletion wait for its grace period."""
        binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        self.server.request("POST", self._pods(name) + "/binding", binding)

    def pool(
        self, name: str = POOL, *, selector: Mapping[str, str] = SELECTOR, ports: Sequence[int] = ()
    ) -> None:
        """Create or change an InferencePool."""
        spec = {
            "selector": {"matchLabels": dict(selector)},
            "targetPorts": [{"number": number} for number in ports or [self.port]],
            "endpointPickerRef": {"name": "router", "port": {"number": 9002}},
        }
        path = f"{_POOLS}/{self.name}/inferencepools"
        if self.server.request("GET", f"{path}/{name}", check=False)[0] == 200:
            # A merge patch would keep the old labels.
            change = [{"op": "replace", "path": "/spec", "value": spec}]
            self.server.request("PATCH", f"{path}/{name}", change, patch="json")
        else:
            self.make(POOL_GROUP, "v1", "InferencePool", "inferencepools", name, spec)

    def delete_pool(self, name: str = POOL) -> None:
        """Delete a pool."""
        self.server.request("DELETE", f"{_POOLS}/{self.name}/inferencepools/{name}")

    def make(
        self, group: str, version: str, kind: str, plural: str, name: str, spec: Mapping[str, Any]
    ) -> None:
        """Create a custom resource."""
        body = {
            "apiVersion": f"{group}/{version}",
            "kind": kind,
            "metadata": {"name": name},
            "spec": dict(spec),
        }
        self.server.request("POST", f"/apis/{group}/{version}/namespaces/{self.name}/{plural}", body)

    def objective(self, name: str, priority: int, *, pool: str = POOL, group: str = OLD_GROUP) -> None:
        """Create an InferenceObjective."""
        spec = {"priority": priority, "poolRef": {"name": pool}}
        self.make(group, "v1alpha2", "InferenceObjective", "inferenceobjectives", name, spec)

    def rewrite(
        self, name: str, model: str, target: str, *, pool: str = POOL, group: str = OLD_GROUP
    ) -> None:
        """Create an InferenceModelRewrite."""
        rule = {"matches": [{"model": {"value": model}}], "targets": [{"modelRewrite": target}]}
        spec = {"poolRef": {"name": pool}, "rules": [rule]}
        self.make(group, "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites", name, spec)

    def change(self, plural: str, name: str, spec: Mapping[str, Any], *, group: str = OLD_GROUP) -> None:
        """Change an objective or a rewrite."""
        path = f"/apis/{group}/v1alpha2/namespaces/{self.name}/{plural}/{name}"
        self.server.request("PATCH", path, {"spec": spec})

    def delete(self, plural: str, name: str, *, group: str = OLD_GROUP) -> None:
        """Delete an objective or a rewrite."""
        self.server.request("DELETE", f"/apis/{group}/v1alpha2/namespaces/{self.name}/{plural}/{name}")

    def account(self, name: str = "router") -> None:
        """Create a service account without any rights."""
        path = f"/api/v1/namespaces/{self.name}/serviceaccounts"
        self.server.request("POST", path, {"metadata": {"name": name}})

    def grant(self, name: str = "router", *, without: Sequence[str] = ()) -> None:
        """Grant the account the rights that a router needs, except for some resources."""
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
        """Return all Kubernetes Events."""
        return list(self.server.request("GET", f"/api/v1/namespaces/{self.name}/events")[1]["items"])

    def config(self, **settings: Any) -> KubeConfig:
        """Return a router's configuration that follows the pool as administrator."""
        known: dict[str, Any] = {"pool": POOL, "namespace": self.name, "kubeconfig": self.server.kubeconfig}
        if "selector" in settings:
            known |= {"pool": "", "target_ports": (self.port,)}
        return KubeConfig(**{**known, **settings})

    def _pods(self, name: str = "") -> str:
        return f"/api/v1/namespaces/{self.name}/pods" + (f"/{name}" if name else "")


@contextmanager
def kube_router(config: KubeConfig, **settings: Any) -> Iterator[RouterServer]:
    """Run a router that discovers its pods in Kubernetes."""
    with running_router(None, kube=config, **settings) as router:
        yield router


class Picker:
    """Client that requests picks over gRPC, at one of the router's ports."""

    def __init__(self, router: RouterServer, port: str = "grpc") -> None:
        self._stack = ExitStack()
        self._channel = self._stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{router.ports[port]}"))
        self._stub = picker_stub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()

    def pick(self, **fields: Any) -> str:
        """Return the address of one pick; "" if there is no pod for it, "shed" if the pods are saturated."""
        try:
            return self._picked(fields)
        except grpc.RpcError as error:
            refusals = {grpc.StatusCode.UNAVAILABLE: "", grpc.StatusCode.RESOURCE_EXHAUSTED: "shed"}
            if error.code() in refusals:
                return refusals[error.code()]
            raise

    def refusal(self, **fields: Any) -> str:
        """Return why a pick finds no pod; "" if it finds one."""
        try:
            self._picked(fields)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
        return ""

    def begin(self, request_id: str) -> None:
        """Pick for a request that stays in flight."""
        request = pb.PickEndpointRequest(request_id=request_id, model="kvroute-tiny", prompt="hello")
        self._stub.PickEndpoint(request, timeout=300)

    def end(self, request_id: str) -> None:
        """Report the end of such a request."""
        done = pb.ReportOutcomeRequest.OUTCOME_DONE
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(request_id=request_id, outcome=done))

    def cached_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the predicted cached tokens of a prompt at the best pod; -1 without a pod."""
        request = pb.PickEndpointRequest(model="kvroute-tiny", token_ids=pb.TokenIds(ids=token_ids))
        try:
            answer = self._stub.PickEndpoint(request, timeout=300)
        except grpc.RpcError:
            return -1
        failed = pb.ReportOutcomeRequest.OUTCOME_FAILED
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(request_id=answer.request_id, outcome=failed))
        return int(answer.endpoints[0].cached_tokens)

    def picks(self, count: int = 12) -> set[str]:
        """Return the addresses of some picks."""
        return {self.pick() for _ in range(count)}

    def _picked(self, fields: Mapping[str, Any]) -> str:
        request = pb.PickEndpointRequest(**{"model": "kvroute-tiny", "prompt": "hello", **fields})
        answer = self._stub.PickEndpoint(request, timeout=300)
        # Report the end at once, so that the next pick sees the same load.
        done = pb.ReportOutcomeRequest.OUTCOME_DONE
        self._stub.ReportOutcome(pb.ReportOutcomeRequest(request_id=answer.request_id, outcome=done))
        return str(answer.endpoints[0].address)


def rewritten(router: RouterServer, model: str, port: str = "grpc") -> str:
    """Return a request's model after the rewrite at a port; "" if the request is rejected."""
    with grpc.insecure_channel(f"127.0.0.1:{router.ports[port]}") as channel:
        stream = Stream(ext_proc_grpc.ExternalProcessorStub(channel))
        stream.send(headers(path="/v1/completions"))
        stream.send(body(json.dumps({"model": model, "prompt": "hello"}).encode()))
        answer = stream.receive()
        if answer.HasField("immediate_response"):
            return ""
        sent, _ = streamed_bytes([stream.receive()])
        stream.cancel()
    return str(json.loads(sent)["model"])


def next_address() -> str:
    """Return a loopback address that no other pod of this process has."""
    number = next(_numbers)
    return f"127.{1 + os.getpid() % 200}.{1 + number // 250 % 250}.{1 + number % 250}"


def eventually_picked(picker: Picker, *addresses: str) -> None:
    """Wait until exactly these pods are picked."""
    eventually(lambda: picker.picks() == set(addresses), f"picks of {addresses}")


def problems(router: RouterServer) -> dict[str, str]:
    """Return the router's problems by reason, except EngineWithoutEvents: these tests publish no events."""
    shown = json.loads(get(router, "/debug/discovery")[1])
    return {
        problem["reason"]: problem["detail"]
        for problem in shown["problems"]
        if problem["reason"] != Reason.ENGINE_WITHOUT_EVENTS
    }


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition that may take a while."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {_PATIENCE_S} s: {what}"
        time.sleep(0.05)
