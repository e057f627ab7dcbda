"""Minimal Kubernetes API from which a picker discovers its pods.

`python -m benchmarks.fake_kube_api PORT PODS POD_PORT`. Serves lists and watches of an InferencePool and its
pods, `pod_host(0)` and following, which are Ready from the start and never change. No measured request
reaches it.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMESPACE, POOL = "default", "pool"
_GROUP, _LABELS, _VERSION = "inference.networking.k8s.io", {"app": "pods"}, "1"


def pod_host(number: int) -> str:
    """Return a pod's address; all pods use the same port."""
    return f"127.0.1.{number + 1}"


def main(port: int, pods: int, pod_port: int) -> None:
    """Serve until the process is killed."""
    kept = {
        f"/api/v1/namespaces/{NAMESPACE}/pods": [_pod(number) for number in range(pods)],
        f"/apis/{_GROUP}/v1/namespaces/{NAMESPACE}/inferencepools": [_pool(pod_port)],
    }
    discovery = _discovery()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            query = parse_qs(asked.query)
            objects = kept.get(asked.path)
            if objects and query.get("watch") == ["true"]:
                self._watch(objects if query.get("sendInitialEvents") == ["true"] else ())
            elif objects:
                self._answer(200, _listed(objects))
            elif asked.path in discovery:
                self._answer(200, discovery[asked.path])
            else:
                self._answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _watch(self, told: list[dict[str, Any]] | tuple[()]) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("connection", "close")
            self.end_headers()
            for event in _initial_events(told) if told else ():
                self.wfile.write(json.dumps(event).encode() + b"\n")
            threading.Event().wait()

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


def _pod(number: int) -> dict[str, Any]:
    ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    made = _object("v1", "Pod", f"pod-{number}")
    return {**made, "status": {**ready, "podIP": pod_host(number)}}


def _pool(pod_port: int) -> dict[str, Any]:
    spec = {
        "selector": {"matchLabels": _LABELS},
        "targetPorts": [{"number": pod_port}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
    }
    return {**_object(f"{_GROUP}/v1", "InferencePool", POOL), "spec": spec}


def _object(api_version: str, kind: str, name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE, "uid": name, "labels": _LABELS}
    return {"apiVersion": api_version, "kind": kind, "metadata": {**metadata, "resourceVersion": _VERSION}}


def _listed(objects: list[dict[str, Any]]) -> dict[str, Any]:
    of = {"apiVersion": objects[0]["apiVersion"], "kind": objects[0]["kind"] + "List"}
    return {**of, "metadata": {"resourceVersion": _VERSION}, "items": objects}


def _initial_events(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the initial events of a watch, ending with the bookmark."""
    known = {"resourceVersion": _VERSION, "annotations": {"k8s.io/initial-events-end": "true"}}
    bookmark = {"apiVersion": objects[0]["apiVersion"], "kind": objects[0]["kind"], "metadata": known}
    return [*({"type": "ADDED", "object": one} for one in objects), {"type": "BOOKMARK", "object": bookmark}]


def _discovery() -> dict[str, dict[str, Any]]:
    version = {"groupVersion": f"{_GROUP}/v1", "version": "v1"}
    group = {"name": _GROUP, "versions": [version], "preferredVersion": version}
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": _resources("v1", "pods", "Pod"),
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        f"/apis/{_GROUP}": {"kind": "APIGroup", "apiVersion": "v1", **group},
        f"/apis/{_GROUP}/v1": _resources(f"{_GROUP}/v1", "inferencepools", "InferencePool"),
    }


def _resources(group_version: str, name: str, kind: str) -> dict[str, Any]:
    resource = {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind}
    listed = [{**resource, "verbs": ["get", "list", "watch"]}]
    return {"kind": "APIResourceList", "groupVersion": group_version, "resources": listed}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
