"""Running the hermetic cases: their pods as servers of metrics pages, their configurations as routers."""

from __future__ import annotations

import base64
import gzip
import json
import random
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf import json_format

from router.app.config import parse_flags
from router.app.server import RouterServer
from tests.support.paths import DATA
from tests.support.router.doors import set_headers, wait_until
from tests.support.router.server import get

HERMETIC = json.loads(gzip.decompress((DATA / "hermetic_cases.json.gz").read_bytes()))
QUICK = ["--host", "127.0.0.1", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]


class MetricsPod(ThreadingHTTPServer):
    """Model server with only a metrics page."""

    daemon_threads = True

    def __init__(self, host: str, case: Mapping[str, Any]) -> None:
        super().__init__((host, 0), _Handler)
        self.page = metrics_page(case)
        self.ip: str = case["ip"]
        self.name: str = case["name"]
        self.labels: Mapping[str, str] = case.get("labels", {})
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> str:
        """The pod's address."""
        return f"{self.server_address[0]!s}:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end early, which routers that stop leave behind."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MetricsPod

    def do_GET(self) -> None:
        page = self.server.page if self.path == "/metrics" else b""
        self.send_response(200 if page else 404)
        self.send_header("content-length", str(len(page)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(page)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def metrics_page(case: Mapping[str, Any]) -> bytes:
    """Return the metrics page of a pod in the case's state."""
    running, waiting = ",".join(case["active_models"]), ",".join(case["waiting_models"])
    return (
        f"vllm:num_requests_waiting {case['waiting_queue']}\n"
        f"vllm:num_requests_running 0\n"
        f"vllm:kv_cache_usage_perc {case['kv_cache_usage']}\n"
        f'vllm:lora_requests_info{{max_lora="{case["max_active_models"]}",running_lora_adapters="{running}",'
        f'waiting_lora_adapters="{waiting}"}} 1\n'
    ).encode()


def pod(number: int, *, waiting: int = 0, usage: float = 0.1, **labels: str) -> dict[str, Any]:
    """Return a case's pod by its name in the case."""
    return {
        "name": f"pod-{number}",
        "ip": f"192.168.1.{number + 1}",
        "waiting_queue": waiting,
        "kv_cache_usage": usage,
        "active_models": [],
        "waiting_models": [],
        "max_active_models": 0,
        "labels": labels,
    }


class Scene:
    """A running router with a case's configuration and pods.

    Attributes:
        pods: Pods in the case's order.
    """

    def __init__(self, router: RouterServer, pods: Sequence[MetricsPod]) -> None:
        self.router = router
        self.pods = pods

    def here(self, value: Any) -> Any:
        """Replace the case's addresses in a value by those of the running pods."""
        text = json.dumps(value)
        for pod in self.pods:
            text = text.replace(f"{pod.ip}:8000", pod.address).replace(pod.ip, pod.address.rpartition(":")[0])
        return json.loads(text)


@contextmanager
def scene(case: Mapping[str, Any], directory: Path, *flags: str) -> Iterator[Scene]:
    """Start the case's pods and a router with its configuration, and wait for every pod's load metrics.

    A case may contain a configuration instead of its name, and further `resources`.
    """
    a, b = random.randrange(1, 250), random.randrange(1, 250)
    with ExitStack() as stack:
        pods = [
            stack.enter_context(_running(MetricsPod(f"127.{a}.{b}.{place}", told)))
            for place, told in enumerate(case["pods"], 1)
        ]
        entries = []
        for pod in pods:
            host, _, port = pod.address.rpartition(":")
            entries.append({"name": pod.name, "address": host, "port": port, "labels": dict(pod.labels)})
        (directory / "pods.yaml").write_text(yaml.safe_dump({"endpoints": entries}))
        named = case["config"]
        config_file = named if isinstance(named, dict) else HERMETIC["configs"][named]
        (directory / "config.yaml").write_text(yaml.safe_dump(config_file))
        resources = [*_resources(), *case.get("resources", ())]
        (directory / "resources.yaml").write_text(yaml.safe_dump_all(resources))
        config, _ = parse_flags(
            [
                *QUICK,
                *("--pods-file", str(directory / "pods.yaml")),
                *("--config-file", str(directory / "config.yaml")),
                *("--resources-file", str(directory / "resources.yaml")),
                *("--refresh-metrics-interval", "100ms", "--compat", "answers"),
                *case.get("flags", ()),
                *flags,
            ]
        )
        router = RouterServer(config)
        stack.callback(router.close)
        router.start()
        wait_until(lambda: _is_told(router, pods), "the pods' loads")
        yield Scene(router, pods)


def waiting(played: Scene) -> int:
    """Return the number of queued requests on the page of plugin states."""
    states = json.loads(get(played.router, "/debug/plugins/state")[1])["plugins"]
    return int(states["flow-control"]["state"]["waiting"])


@contextmanager
def _running(pod: MetricsPod) -> Iterator[MetricsPod]:
    try:
        yield pod
    finally:
        pod.shutdown()
        pod.server_close()


def _is_told(router: RouterServer, pods: Sequence[MetricsPod]) -> bool:
    known = router.pods.current
    return len(known) == len(pods) and all(pod.ready and pod.load is not None for pod in known.values())


def _resources() -> list[dict[str, Any]]:
    base = HERMETIC["k8s_objects"]["base"]
    objectives, rewrite = base["InferenceObjective"], base["InferenceModelRewrite"]
    resources = [
        {
            "apiVersion": objectives["apiVersion"],
            "kind": "InferenceObjective",
            "metadata": {"name": item["name"]},
            "spec": {} if item["priority"] is None else {"priority": item["priority"]},
        }
        for item in objectives["items"]
    ]
    rules = [
        {
            "matches": [{"model": {"value": rule["match"]}}],
            "targets": [{"modelRewrite": target} for target in rule["targets"]],
        }
        for rule in rewrite["rules"]
    ]
    resources.append(
        {
            "apiVersion": rewrite["apiVersion"],
            "kind": "InferenceModelRewrite",
            "metadata": {"name": rewrite["name"]},
            "spec": {"rules": rules},
        }
    )
    return resources


def message(case: Mapping[str, Any]) -> pb.ProcessingRequest:
    """Build one of a case's messages."""
    kind, made = case["type"], pb.ProcessingRequest()
    part = getattr(made, kind)
    part.SetInParent()
    for name, value in case.get("headers", {}).items():
        part.headers.headers.add(key=name, raw_value=value.encode())
    if kind.endswith("_body"):
        part.body = _body(case)
    if "end_of_stream" in case:
        part.end_of_stream = case["end_of_stream"]
    for namespace, values in case.get("filter_metadata", {}).items():
        made.metadata_context.filter_metadata[namespace].update(values)
    return made


def _body(case: Mapping[str, Any]) -> bytes:
    if "body_b64" in case:
        return base64.b64decode(case["body_b64"])
    body = case["body"]
    if isinstance(body, dict):
        before, filler, count, after = body["repeat"]
        body = before + filler * count + after
    return str(body).encode()


def check_answer(answer: pb.ProcessingResponse, expected: Mapping[str, Any]) -> None:
    """Compare one response with the case's."""
    kind = expected["type"]
    assert answer.WhichOneof("response") == kind
    if "set_headers" in expected or kind == "immediate_response":
        _same(set_headers(answer), expected.get("set_headers", {}))
    metadata = json_format.MessageToDict(answer.dynamic_metadata)
    if "assert_dynamic_metadata" in expected:
        _same(metadata, expected["assert_dynamic_metadata"])
    elif "streamed_response" in expected or "set_headers" in expected:
        _same(metadata, expected.get("dynamic_metadata", {}))
    if kind == "immediate_response":
        assert answer.immediate_response.status.code == expected["status"]
        assert answer.immediate_response.body.decode() == expected["body"]
    elif "clear_route_cache" in expected:
        assert answer.request_headers.response.clear_route_cache == expected["clear_route_cache"]
    if "streamed_response" in expected:
        _check_chunk(getattr(answer, kind).response.body_mutation, expected["streamed_response"])


def _check_chunk(mutation: pb.BodyMutation, expected: Mapping[str, Any]) -> None:
    assert mutation.WhichOneof("mutation") == "streamed_response"
    chunk = mutation.streamed_response
    assert chunk.end_of_stream == expected["end_of_stream"]
    if "body_len" in expected:
        assert len(chunk.body) == expected["body_len"]
    else:
        assert chunk.body == _body(expected)


def _same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert isinstance(got, dict)
        assert sorted(got) == sorted(expected)
        for key, value in expected.items():
            _same(got[key], value)
    elif expected == "<uuid4>":
        assert str(uuid.UUID(got, version=4)) == got
    elif expected == "<number>":
        assert isinstance(got, float)
        assert got >= 0.0
    else:
        assert got == expected


def steps_of(case: Mapping[str, Any]) -> str:
    """Return the case's steps as one text, to check that a test follows the data."""
    return re.sub(r"\s+", " ", "; ".join(step["do"] for step in case.get("steps", ())))
