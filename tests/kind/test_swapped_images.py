"""llm-d's rendered charts with other images: this router as the picker, our Envoy, our model servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.support.kind.cluster import NODE_PORTS, Cluster
from tests.support.kind.gateway import open_port, start_gateway
from tests.support.kind.images import ENVOY, ROUTER
from tests.support.kind.release import CHART, NAME, Release, image_values, merged
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import Answer, Conversation
from tests.support.paths import ROOT

CHARTS = ROOT.parent / "shared" / "data" / "llmd_chart"
pytestmark = [
    pytest.mark.kind,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not CHARTS.is_dir(), reason="llm-d's rendered charts (../shared/data) are not here"),
]

_EPP = {"llm-d-router-gateway": "pool-epp"}
_SELECTED = {"app": "kvroute-model"}
_GATEWAY_PORT = 8081
# A user reads an answer before the next question; the last block's event needs a few milliseconds.
_READS_S = 1.0


@dataclass(frozen=True, slots=True)
class Swapped:
    """A rendered chart that runs with our images."""

    release: Release

    @property
    def router(self) -> str:
        """Name of the picker's pod; empty while there is none."""
        return str(self._pods()[0]["metadata"]["name"]) if self._pods() else ""

    def await_settled(self) -> None:
        """Wait until one picker is Ready and follows both model servers EXACT."""

        def settled() -> bool:
            pods = self._pods()
            if len(pods) != 1 or not all(each["ready"] for each in pods[0]["status"]["containerStatuses"]):
                return False
            return len(self.release.followed(self.router)) == 2

        eventually("a Ready picker follows both model servers", settled, deadline_s=300)

    def latest_decision(self) -> dict[str, Any]:
        """Return the picker's latest decision."""
        found: dict[str, Any] = self.release.page(self.router, "/debug/decisions?n=1")["decisions"][0]
        return found

    def _pods(self) -> list[dict[str, Any]]:
        labels = ",".join(f"{name}={value}" for name, value in _EPP.items())
        found = self.release.kubectl.items("pods", "--selector", labels)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


@pytest.fixture(scope="module", params=["standalone", "gateway"])
def swapped(request: pytest.FixtureRequest, cluster: Cluster, pools: None) -> Iterator[Swapped]:
    """Apply a rendered chart with swapped images, with two model servers behind its pool."""
    documents = yaml.safe_load_all((CHARTS / f"{request.param}.yaml").read_text())
    objects = [_with_our_images(each) for each in documents if each]
    namespace = objects[0]["metadata"]["namespace"]
    release = Release(cluster, cluster.kubectl(namespace), NODE_PORTS[2])
    eventually("the namespace is free", lambda: f"{namespace} " not in release.kubectl("get", "namespaces"))
    try:
        release.kubectl("create", "namespace", namespace)
        release.kubectl.apply(*_model_servers(release))
        # The chart sets a field of InferencePool that is newer than the CRDs of some clusters.
        manifest = "\n---\n".join(map(json.dumps, objects))
        release.kubectl("apply", "--validate=warn", "--filename", "-", stdin=manifest)
        if request.param == "gateway":
            start_gateway(release, "pool-epp", tls=True)
        else:
            open_port(release, _EPP, _GATEWAY_PORT)
        swapped = Swapped(release)
        swapped.await_settled()
        eventually("an answer", lambda: not Conversation(release.url).ask().failed)
        yield swapped
    finally:
        release.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
        release.discard()


def test_a_conversation_sticks_with_predicted_hits(swapped: Swapped) -> None:
    """Each turn goes to the pod of the first, and is served from its cache as far as was predicted."""
    conversation, pods = Conversation(swapped.release.url, sentences=60), set()
    for turn in range(4):
        answer = conversation.ask()
        assert not answer.failed, answer.error
        time.sleep(_READS_S)
        decision = swapped.latest_decision()
        pods.add(decision["pod"])
        if turn:
            cached = decision["predicted_cached_tokens"], decision["delivered_cached_tokens"]
            assert cached == (answer.cached_tokens, answer.cached_tokens)
            assert answer.cached_tokens > 500
    assert len(pods) == 1


def test_a_killed_picker_finds_the_caches_again(swapped: Swapped) -> None:
    """After a crash of the picker the next turn goes to the pod with the conversation's blocks."""
    conversation = Conversation(swapped.release.url, sentences=60)
    assert not conversation.ask().failed
    pod = swapped.latest_decision()["pod"]
    name, kubectl = swapped.router, swapped.release.kubectl

    def picker() -> dict[str, Any]:
        statuses = kubectl.get("pod", name)["status"]["containerStatuses"]
        (status,) = (each for each in statuses if each["name"] == "epp")
        return dict(status)

    swapped.release.cluster.kill_container(picker()["containerID"])
    eventually("its container was started again", lambda: picker()["restartCount"] > 0)
    swapped.await_settled()
    answer = eventually("an answer", lambda: _answered(conversation))
    decision = swapped.latest_decision()
    assert (decision["pod"], decision["predicted_cached_tokens"]) == (pod, answer.cached_tokens)
    assert answer.cached_tokens > 500


def test_a_restarted_deployment_serves_again(swapped: Swapped) -> None:
    """After `kubectl rollout restart` requests are answered, and a conversation finds its blocks."""
    conversation = Conversation(swapped.release.url, sentences=60)
    assert not conversation.ask().failed
    pod, before = swapped.latest_decision()["pod"], swapped.router
    swapped.release.kubectl("rollout", "restart", "deployment/pool-epp")
    eventually("another picker runs", lambda: swapped.router not in ("", before), deadline_s=300)
    swapped.await_settled()
    answer = eventually("an answer", lambda: _answered(conversation))
    decision = swapped.latest_decision()
    assert (decision["pod"], decision["predicted_cached_tokens"]) == (pod, answer.cached_tokens)
    assert answer.cached_tokens > 500


def _answered(conversation: Conversation) -> Answer | None:
    answer = conversation.ask()
    return None if answer.failed else answer


def _model_servers(release: Release) -> Iterator[dict[str, Any]]:
    """Yield the objects of our chart's model servers, with the label that llm-d's pool selects."""
    values = merged(image_values(), {"modelServers": {"podLabels": _SELECTED}})
    rendered = release.helm(
        "template", NAME, str(CHART), "--kube-version", "1.34.0", "--values", "-", stdin=json.dumps(values)
    )
    for each in filter(None, yaml.safe_load_all(rendered)):
        component = each["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        if component == "model-server" and each["kind"] in ("ConfigMap", "Deployment"):
            yield each


def _with_our_images(each: dict[str, Any]) -> dict[str, Any]:
    """Return an object with our images; without requests of CPU and memory, which a test's node lacks."""
    if each["kind"] == "Deployment":
        for container in each["spec"]["template"]["spec"]["containers"]:
            container["image"] = ROUTER if container["name"] == "epp" else ENVOY
            container["imagePullPolicy"] = "Never"
            del container["resources"]
    return each
