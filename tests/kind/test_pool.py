"""Gateway mode: an InferencePool selects the pods, and a gateway calls the router named by it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvroute.envoy_config import EnvoySettings, bootstrap
from tests.support.kind.cluster import NODE_PORTS, Cluster
from tests.support.kind.images import ENVOY
from tests.support.kind.release import Release
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import Conversation

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

_GATEWAY = {"app": "gateway"}


@pytest.fixture(scope="module")
def pooled(cluster: Cluster) -> Iterator[Release]:
    """Install a release in gateway mode, with an Envoy configured as an inference gateway."""
    crds = os.environ.get("INFERENCE_EXTENSION_CRDS")
    if not crds:
        pytest.skip("INFERENCE_EXTENSION_CRDS: no folder with the CRDs of the inference extension")
    for path in sorted(Path(crds).glob("inference.networking.k8s.io_*.yaml")):
        cluster.kubectl()("apply", "--server-side", "--filename", str(path))
    kubectl = cluster.kubectl(f"kvroute-{os.getpid()}-pool")
    release = Release(cluster, kubectl, NODE_PORTS[2])
    try:
        release.install(
            {
                "mode": "gateway",
                "gateway": {"httpRoute": {"create": False}},
                "networkPolicy": {"gateways": [{"podSelector": {"matchLabels": _GATEWAY}}]},
            }
        )
        _start_gateway(release)
        eventually("an answer", lambda: not Conversation(release.url).ask().failed)
        yield release
    finally:
        release.discard()


def test_a_pool_of_the_gateway_api_is_served(pooled: Release) -> None:
    """Through ext_proc with full responses, a conversation stays at one pod with the predicted cache hits."""
    pooled.await_settled(routers=1, model_servers=2)
    conversation, answers = Conversation(pooled.url, sentences=60), []
    for _ in range(3):
        answers.append(conversation.ask())
        time.sleep(1)
    assert [answer.error for answer in answers if answer.failed] == []
    assert len({answer.pod for answer in answers}) == 1
    for answer in answers[1:]:
        decision = pooled.decision(answer.request_id)
        assert decision["predicted_cached_tokens"] == answer.cached_tokens > 500
        assert decision["delivered_cached_tokens"] == answer.cached_tokens


def test_a_changed_selector_is_followed(pooled: Release) -> None:
    """Pods that a pool no longer selects are not picked; selected again, they are."""
    pool = pooled.kubectl.items("inferencepools")[0]
    selected = pool["spec"]["selector"]["matchLabels"]

    def select(labels: dict[str, Any]) -> None:
        patch = json.dumps([{"op": "replace", "path": "/spec/selector/matchLabels", "value": labels}])
        name = pool["metadata"]["name"]
        pooled.kubectl("patch", "inferencepool", name, "--type", "json", "--patch", patch)

    router = pooled.names("router")[0]
    try:
        select({**selected, "kvroute.dev/none": "matches"})
        eventually("no pod is a candidate", lambda: not pooled.followed(router))
        assert Conversation(pooled.url).ask().status == 503
    finally:
        select(selected)
    pooled.await_settled(routers=1, model_servers=2)
    assert not Conversation(pooled.url).ask().failed


def _start_gateway(release: Release) -> None:
    service = release.kubectl.get("service", "kvroute-epp")
    address = service["spec"]["clusterIP"]
    settings = EnvoySettings(("0.0.0.0", 8080), (address, 9002), (), door="ext_proc", responses="full")
    container = {
        "name": "envoy",
        "image": ENVOY,
        "imagePullPolicy": "Never",
        "args": ["-c", "/etc/envoy/envoy.json", "--disable-hot-restart", "--concurrency", "1"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/envoy"}],
    }
    volumes = [{"name": "config", "configMap": {"name": "gateway"}}]
    release.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "gateway"},
            "data": {"envoy.json": json.dumps(bootstrap(settings))},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "gateway", "labels": _GATEWAY},
            "spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "gateway"},
            "spec": {
                "type": "NodePort",
                "selector": _GATEWAY,
                "ports": [{"port": 80, "targetPort": 8080, "nodePort": release.node_port}],
            },
        },
    )
    release.kubectl("wait", "--for=condition=Ready", "pod/gateway", "--timeout=120s")
