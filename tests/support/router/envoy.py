"""A real Envoy before a router and fake pods, for integration tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import urllib3

from kvroute.envoy_config import EnvoySettings, Responses, bootstrap
from kvroute.stack import envoy_command
from router.app.server import RouterServer
from tests.support.loopback import HERE, free_ports, listens
from tests.support.router.bench import TINY
from tests.support.router.doors import wait_until
from tests.support.router.server import FakePod, fake_pods, ready_pods, running_router, write_pods

Mode = Literal["check_grpc", "ext_proc usage", "ext_proc full"]
BODY = {"model": TINY, "prompt": "hello " * 100}


class Gateway:
    """A running Envoy in front of a router."""

    def __init__(
        self, ports: range, router: RouterServer, pods: list[FakePod], envoy: subprocess.Popen[bytes]
    ) -> None:
        port, admin = ports
        self.address = ("127.0.0.1", port)
        self.envoy = envoy
        self._url = f"http://127.0.0.1:{port}"
        self._admin = f"http://127.0.0.1:{admin}"
        self._http = urllib3.PoolManager(maxsize=64, retries=False, timeout=300)
        self.router = router
        self.pods = pods

    def post(self, body: object, path: str = "/v1/completions", **headers: str) -> urllib3.BaseHTTPResponse:
        """Post JSON, or bytes unchanged."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.request("POST", self._url + path, body=data, headers=sent)

    def get(self, path: str, **headers: str) -> urllib3.BaseHTTPResponse:
        """Get a path."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.request("GET", self._url + path, headers=sent)

    def stat(self, name: str) -> int:
        """Return one of Envoy's own counters."""
        page = self._http.request("GET", f"{self._admin}/stats?format=json&filter=^{name}$")
        (found,) = page.json()["stats"]
        return int(found["value"])

    def has_router(self) -> bool:
        """Return whether Envoy considers the router healthy."""
        return self.stat("cluster.router.membership_healthy") == 1

    def decision(self, response: urllib3.BaseHTTPResponse) -> dict[str, Any]:
        """Return the decision for a response's request."""
        record = self.router.decision_log.find(response.headers["x-request-id"])
        assert record is not None
        return record


@contextmanager
def gateway(
    directory: Path, mode: Mode, *, fail_open: bool = False, pods_host: str = HERE, **settings: Any
) -> Iterator[Gateway]:
    """Run two fake pods, a router and an Envoy."""
    responses: Responses = "full" if mode == "ext_proc full" else "usage"
    with fake_pods(2, pods_host) as pods:
        pods_file = write_pods(directory / "pods.yaml", [pod.address for pod in pods])
        with running_router(pods_file, responses_full=responses == "full", **settings) as router:
            wait_until(lambda: len(ready_pods(router)) == 2, "pods")
            ports = free_ports(2)
            envoy_settings = EnvoySettings(
                gateway=("127.0.0.1", ports[0]),
                routers=[("127.0.0.1", router.ports["grpc"])],
                pods=[(pod.host, pod.port) for pod in pods],
                door="ext_proc" if mode.startswith("ext_proc") else mode,
                responses=responses,
                failure_mode_allow=fail_open,
            )
            with running_envoy(directory, bootstrap(envoy_settings), *ports) as envoy:
                running = Gateway(ports, router, pods, envoy)
                wait_until(running.has_router, "Envoy's trust in the router")
                yield running


def patient(config: dict[str, Any]) -> dict[str, Any]:
    """Raise Envoy's timeouts for the router: a test machine may be busy for seconds."""
    for cluster in config["static_resources"]["clusters"]:
        for check in cluster.get("health_checks", []):
            check["timeout"] = "5s"
        for options in cluster.get("typed_extension_protocol_options", {}).values():
            http2 = options["explicit_http_config"].get("http2_protocol_options", {})
            if "connection_keepalive" in http2:
                http2["connection_keepalive"]["timeout"] = "5s"
    return config


@contextmanager
def running_envoy(
    directory: Path, config: dict[str, Any], port: int, admin: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Run an Envoy that listens on `port`; its log is envoy.log in `directory`."""
    path = directory / "envoy.json"
    address = {"socket_address": {"address": HERE, "port_value": admin}}
    path.write_text(json.dumps({**patient(config), "admin": {"address": address}}))
    command = [envoy_command(), "-c", str(path), "--disable-hot-restart", "--log-level", "warning"]
    with (
        (directory / "envoy.log").open("wb") as log,
        subprocess.Popen([*command, "--concurrency", "1"], stderr=log) as process,
    ):
        try:
            wait_until(lambda: listens(port), "Envoy")
            yield process
        finally:
            process.terminate()
            process.wait(300)


def request_bytes(body: object, more_headers: str = "") -> bytes:
    """Return a POST as bytes, for clients that do not wait for the response."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {len(data)}\r\n"
    return f"{head}{more_headers}\r\n".encode() + data
