"""Life of a release: default values, `helm test`, uninstall."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.kind.cluster import NODE_PORTS, Cluster
from tests.support.kind.release import Release
from tests.support.kind.tools import ToolError, eventually
from tests.support.kind.traffic import Conversation

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

# Created by Kubernetes in every namespace, or reports about deleted objects.
_NOT_OURS = ("configmap/kube-root-ca.crt", "serviceaccount/default", "event/", "event.events.k8s.io/")


@pytest.fixture
def fresh(cluster: Cluster) -> Iterator[Release]:
    """Install a release with default values, except for the images, in an empty namespace."""
    kubectl = cluster.kubectl(f"kvroute-{os.getpid()}-fresh")
    release = Release(cluster, kubectl, NODE_PORTS[1])
    try:
        release.install()
        yield release
    finally:
        release.discard()


def test_default_values_serve_and_uninstall_cleanly(fresh: Release) -> None:
    """With default values a chat is answered, `helm test` passes and uninstall leaves only the test's pod."""
    fresh.expose()
    answer = eventually("an answer", lambda: _answered(fresh))
    assert answer
    told = fresh.helm("test", "kvroute", "--timeout", "5m", "--logs")
    assert "Phase:          Succeeded" in told
    assert "the conversation stuck" in told
    fresh.kubectl("delete", "pod", "kvroute-test")
    fresh.helm("uninstall", "kvroute", "--wait", "--timeout", "5m")
    fresh.kubectl("delete", "service", "gateway-of-tests")
    eventually("nothing is left", lambda: not _left(fresh))


def test_the_release_passes_its_own_test(release: Release) -> None:
    """`helm test` sends a conversation and checks that it stays at one pod, also with two routers."""
    assert "Phase:          Succeeded" in release.helm("test", "kvroute", "--timeout", "5m")


def test_a_typo_in_the_values_is_refused(release: Release) -> None:
    """An unknown value fails `helm upgrade` before any change, with its path in the message."""
    with pytest.raises(ToolError, match=r"modelServers.*replica"):
        release.install({"modelServers": {"replica": 3}})


def _answered(release: Release) -> str | None:
    answer = Conversation(release.url).ask()
    return None if answer.failed else answer.text


def _left(release: Release) -> list[str]:
    """Return every object in the release's namespace that Kubernetes did not create itself."""
    listed = release.kubectl("api-resources", "--verbs=list", "--namespaced", "--output", "name")
    kinds = ",".join(kind for kind in listed.split() if not kind.startswith("events"))
    found = release.kubectl("get", kinds, "--output", "name", "--ignore-not-found")
    return [name for name in found.split() if not name.startswith(_NOT_OURS)]
