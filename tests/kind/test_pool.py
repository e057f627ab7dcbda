"""Gateway mode: an InferencePool selects the pods, and a gateway calls the router named by it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kind.cluster import NODE_PORTS, Cluster
from tests.support.kind.gateway import GATEWAY, start_gateway
from tests.support.kind.release import Release
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import Conversation

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def pooled(cluster: Cluster, pools: None) -> Iterator[Release]:
    """Install a release in gateway mode, with an Envoy configured as an inference gateway."""
    kubectl = cluster.kubectl(f"kvroute-{os.getpid()}-pool")
    release = Release(cluster, kubectl, NODE_PORTS[2])
    try:
        release.install(
            {
                "mode": "gateway",
                "gateway": {"httpRoute": {"create": False}},
                "networkPolicy": {"gateways": [{"podSelector": {"matchLabels": GATEWAY}}]},
            }
        )
        start_gateway(release, "kvroute-epp")
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
