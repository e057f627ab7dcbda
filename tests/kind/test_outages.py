"""Outages without a failed request: loss of a router, of the API server, and a rolling upgrade."""

from __future__ import annotations

import time

import pytest

from tests.support.kind.figures import Figures
from tests.support.kind.release import Release, base_values, merged
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import Load, steady_load

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]


def test_a_killed_router_fails_no_request(release: Release, figures: Figures) -> None:
    """When one of two routers is killed, no request fails."""
    with steady_load(release.url, think_s=0.05) as load:
        _await_answers(load, 40)
        router = release.pods("router")[0]
        release.cluster.kill_container(router["status"]["containerStatuses"][0]["containerID"])
        killed_s = time.monotonic()
        _await_answers(load, len(load.answers) + 40)
        release.await_settled(routers=2, model_servers=2)
        gap_s = load.longest_gap_s(killed_s)
    load.assert_none_failed()
    figures.add("failover_gap_s", gap_s, "longest time without an answer after a router was killed")


def test_a_restarted_api_server_fails_no_request(release: Release) -> None:
    """When the API server is killed under load, no request fails, and later changes are seen."""
    system = release.cluster.kubectl("kube-system")
    name = f"kube-apiserver-{release.cluster.node}"

    def container() -> str:
        found: str = system.get("pod", name)["status"]["containerStatuses"][0]["containerID"]
        return found

    with steady_load(release.url) as load:
        _await_answers(load, 20)
        before = container()
        release.cluster.kill_container(before)
        _await_answers(load, len(load.answers) + 20)
        eventually("the API server is back", lambda: container() != before)
        release.kubectl("delete", "pod", release.names("model-server")[0], "--wait=false")
        release.await_settled(routers=2, model_servers=2)
    load.assert_none_failed()


def test_a_rolling_upgrade_fails_no_request(release: Release) -> None:
    """A rolling upgrade of every router and model server under load fails no request."""
    before = {*release.names("router"), *release.names("model-server")}
    rolled = {"podAnnotations": {"kvroute.dev/rolled": str(time.time_ns())}}
    with steady_load(release.url) as load:
        _await_answers(load, 20)
        base = base_values(release.kubectl.namespace)
        release.install(merged(base, {"router": rolled, "modelServers": rolled}))
        release.await_settled(routers=2, model_servers=2)
        _await_answers(load, len(load.answers) + 20)
    assert not before & {*release.names("router"), *release.names("model-server")}
    load.assert_none_failed()


def _await_answers(load: Load, count: int) -> None:
    eventually(f"{count} requests were answered", lambda: len(load.answers) >= count)
