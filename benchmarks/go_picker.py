"""The Gateway API Inference Extension's endpoint picker (in Go) in place of the router behind the same Envoy.

Its module comes from the Go proxy and is compiled once into the user's cache directory, which needs `go` and
some minutes. It runs with its default configuration and flags, but without TLS and traces, and scrapes the
pods each second, as the router does. `fake_kube_api` is its Kubernetes. It does not tokenize and follows no
events: it estimates a pod's cache from the requests that it sent there.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import fake_kube_api
from benchmarks.gateway_stack import HOST, Picker, PickerPlace, fake_pods
from benchmarks.rival_environment import rivals_home
from kvroute.stack import ChildPlan

MODULE, VERSION = "sigs.k8s.io/gateway-api-inference-extension", "v1.5.0"
_BUILD_TIMEOUT_S = 3600.0
_POLL_S = 0.05
_KUBE_PORT, _METRICS_PORT, _HEALTH_PORT, _POD_PORT = 5, 6, 7, 8


def go_picker(directory: Path) -> Picker:
    """The compiled picker.

    Args:
        directory: Folder for its kubeconfig.

    Raises:
        OSError: `go` is not installed.
        subprocess.SubprocessError: The module cannot be downloaded or compiled.
    """
    program = _program()

    def children(place: PickerPlace) -> Sequence[ChildPlan]:
        base, kube = place.base_port, place.base_port + _KUBE_PORT
        hosts = [fake_kube_api.pod_host(number) for number in range(place.pods)]
        config = directory / "kubeconfig"
        config.write_text(_kubeconfig(f"http://{HOST}:{kube}"))
        api = [sys.executable, "-m", "benchmarks.fake_kube_api", str(kube)]
        api += [str(place.pods), str(base + _POD_PORT)]
        argv = [sys.executable, "-m", "benchmarks.go_picker", str(kube), str(config)]
        argv += [str(program), "--secure-serving=false", "--tracing=false"]
        argv += ["--pool-name", fake_kube_api.POOL, "--pool-namespace", fake_kube_api.NAMESPACE]
        argv += ["--refresh-metrics-interval", "1s"]
        argv += ["--grpc-port", str(base), "--grpc-health-port", str(base + _HEALTH_PORT)]
        argv += ["--metrics-port", str(base + _METRICS_PORT), "--metrics-endpoint-auth=false"]
        return (
            fake_pods(base + _POD_PORT, 1, HOST, *hosts),
            ChildPlan("kube_api", api, (kube,)),
            ChildPlan("router", argv, (base,)),
        )

    return children


def program_path() -> Path:
    """Return the path of the compiled picker."""
    return rivals_home() / f"gie-epp-{VERSION}" / "epp"


def _program() -> Path:
    program = program_path()
    home = program.parent
    if not program.exists():
        go = shutil.which("go")
        if go is None:
            raise OSError("it is written in Go, and there is no `go` on PATH")
        print(f"compiling {MODULE} {VERSION} in {home}, which takes minutes", file=sys.stderr)
        home.mkdir(parents=True, exist_ok=True)
        source = home / "source"
        shutil.rmtree(source, ignore_errors=True)
        command = [go, "mod", "download", "-json", f"{MODULE}@{VERSION}"]
        told = subprocess.run(command, cwd=home, stdout=subprocess.PIPE, timeout=_BUILD_TIMEOUT_S, check=True)
        # The module's go.sum applies only to builds in its own tree, and the module cache is read-only.
        shutil.copytree(json.loads(told.stdout)["Dir"], source, copy_function=shutil.copyfile)
        command = [go, "build", "-o", str(program), "./cmd/epp"]
        subprocess.run(
            command, cwd=source, env={**os.environ, "GOWORK": "off"}, timeout=_BUILD_TIMEOUT_S, check=True
        )
    return program


def _kubeconfig(server: str) -> str:
    name = "fake"
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": server}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "users": [{"name": name, "user": {}}],
            "current-context": name,
        }
    )


def _become(kube_port: int, config: str, argv: Sequence[str]) -> None:
    """Wait for the API, then replace this process by the picker, which exits without an API."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, kube_port)) == 0:
                break
        time.sleep(_POLL_S)
    os.execve(argv[0], argv, {**os.environ, "KUBECONFIG": config})


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
