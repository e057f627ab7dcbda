"""The chart as rendered by Helm for tests: the `helm` on PATH, else a library."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import helm_python
import yaml

from tests.support.chart.envoy_parts import manager
from tests.support.paths import ROOT

CHART = ROOT / "charts" / "kvroute"
RELEASE = "rel"
NAMESPACE = "llm"
FULLNAME = "rel-kvroute"
# A Helm built without its release's flags assumes a very old cluster.
_KUBERNETES = "1.34"
_INFORMATION = 1

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rendering:
    """Result of rendering the chart.

    Attributes:
        text: The manifests; "" if the values were rejected.
        error: The error of rejected values; else "".
    """

    text: str
    error: str


def template(values: Mapping[str, Any] | None = None) -> Rendering:
    """Render the chart with values as from a file."""
    program = shutil.which("helm")
    if program is None:
        return _rendered_by_library(dict(values or {}))
    command = [program, "template", RELEASE, str(CHART), "--kube-version", _KUBERNETES]
    command += ["--namespace", NAMESPACE, "--values", "-"]
    done = subprocess.run(command, input=yaml.safe_dump(dict(values or {})), capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stderr), done.stderr
    return Rendering(done.stdout, done.stderr)


def lint() -> list[str]:
    """Return the warnings of `helm lint`."""
    program = shutil.which("helm")
    if program is None:
        found = helm_python.lint(CHART, strict=True)
        return [each["error"] for each in found["messages"] if each["severity"] > _INFORMATION]
    done = subprocess.run([program, "lint", "--strict", str(CHART)], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    return [line for line in lines if done.returncode or "[WARNING]" in line or "[ERROR]" in line]


def _rendered_by_library(values: dict[str, Any]) -> Rendering:
    with helm_python.Chart.load(CHART) as chart:
        try:
            files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
        except helm_python.HelmError as error:
            return Rendering("", str(error))
    return Rendering("".join(f"---\n{text}\n" for name, text in files.items() if name.endswith(".yaml")), "")


def text(values: Mapping[str, Any] | None = None) -> str:
    """Return the rendered text; an error fails the test."""
    rendering = template(values)
    assert not rendering.error
    return rendering.text


def manifests(values: Mapping[str, Any] | None = None) -> list[Manifest]:
    """Return the rendered objects."""
    return [one for one in yaml.safe_load_all(text(values)) if one]


def one(objects: list[Manifest], kind: str, suffix: str) -> Manifest:
    """Return the only object of a kind whose name has this suffix."""
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == FULLNAME + suffix]
    return found


def container(workload: Manifest, name: str) -> Manifest:
    """Return a container of a workload's pods."""
    (found,) = [c for c in workload["spec"]["template"]["spec"]["containers"] if c["name"] == name]
    return dict(found)


def pods(objects: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Return name and pod template of every workload."""
    for each in objects:
        if each["kind"] in ("Deployment", "Job"):
            yield each["metadata"]["name"], each["spec"]["template"]
        elif each["kind"] == "Pod":
            yield each["metadata"]["name"], each


def envoy_bootstrap(values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the rendered Envoy configuration."""
    read: dict[str, Any] = yaml.safe_load(one(manifests(values), "ConfigMap", "-envoy")["data"]["envoy.yaml"])
    return read


def gateway_manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """Return the HTTP connection manager of the rendered gateway."""
    (listener,) = [each for each in bootstrap["static_resources"]["listeners"] if each["name"] == "gateway"]
    return manager(listener)


def clusters(bootstrap: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rendered Envoy's clusters by name."""
    return {each["name"]: each for each in bootstrap["static_resources"]["clusters"]}


EVERYTHING: dict[str, Any] = {
    "mode": "gateway",
    "router": {
        "replicas": 3,
        "tokenizers": {"org/base": "hf:org/base@main"},
        "config": {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [{"type": "ttft-cost-scorer"}],
        },
        "objectives": [{"name": "batch", "priority": -1}, {"name": "chat", "priority": 10}],
        "tracing": {"enabled": True, "endpoint": "http://collector.observability:4317"},
        "hubTokenSecret": {"name": "hub"},
    },
    "gateway": {
        "inferencePool": {"failureMode": "FailOpen"},
        "httpRoute": {
            "parentRefs": [{"name": "inference", "namespace": "gateways", "sectionName": "http"}],
            "hostnames": ["llm.example.com"],
        },
    },
    "modelServers": {
        "engine": "vllm",
        "replicas": 4,
        "model": {
            "name": "qwen3-8b",
            "source": "hub",
            "hub": {
                "repository": "Qwen/Qwen3-8B",
                "tokenSecret": {"name": "hub"},
                "cache": {"size": "100Gi", "keep": True},
            },
        },
        "gpus": 2,
        "tensorParallel": 2,
        "hostTierGiB": 32,
        "sharedMemory": "8Gi",
        "extraArgs": ["--max-model-len=32768"],
        "resources": {"requests": {"cpu": 4, "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
    },
    "indexer": {"backend": "redis", "hashSeed": 4711, "redis": {"deploy": True}},
    "tokenizer": {"enabled": True, "source": "hf:Qwen/Qwen3-8B@main"},
    "peers": {"enabled": True},
    "monitoring": {
        "serviceMonitor": True,
        "podMonitor": True,
        "prometheusRule": True,
        "dashboard": True,
        "auth": True,
        "labels": {"release": "prometheus"},
    },
    "autoscaling": {"enabled": True, "targetPicksPerSecond": 200},
    "priorityClass": {"create": True},
    "commonLabels": {"team": "inference"},
}
"""Gateway mode with every part of the chart switched on."""
