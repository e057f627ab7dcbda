"""Two routers of one release share their requests in flight, through restarts of either."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.kind.release import METRICS_PORT, Release
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import steady_load

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]


def test_an_access_log_at_one_router_ends_requests_of_both(release: Release) -> None:
    """An access log that reaches one router ends the requests of both; none stays in flight."""
    await_fleet(release)
    with steady_load(release.url) as load:
        eventually("requests were answered", lambda: len(load.answers) >= 60)
    load.assert_none_failed()
    for router in release.names("router"):
        assert sample(release, router, "kvroute_router_ledger_news_total", kind="sent") > 0
        ends = {"source": "access_log", "outcome": "done"}
        assert sample(release, router, "kvroute_router_request_ends_total", **ends) > 0
        for name in ("llm_d_epp_request_running", "kvroute_router_ledger_others_requests"):
            eventually(f"{name} is 0", lambda router=router, name=name: not sample(release, router, name))


def test_a_router_that_is_replaced_is_followed_at_its_new_address(release: Release) -> None:
    """A replaced router is followed at its new address, and its old address is dropped."""
    await_fleet(release)
    gone = release.names("router")[0]
    release.kubectl("delete", "pod", gone, "--wait=false")
    release.await_settled(routers=2, model_servers=2)
    assert gone not in release.names("router")
    await_fleet(release)


def await_fleet(release: Release) -> None:
    """Wait until each of two routers follows only the other."""

    def states() -> list[list[str]]:
        pages = [release.page(router, "/ready") for router in release.names("router")]
        return [[peer["state"] for peer in page["routers"]] for page in pages]

    eventually("each router follows the other", lambda: states() == [["followed"]] * 2, deadline_s=120)


def sample(release: Release, router: str, name: str, **labels: str) -> float:
    """Return a sample of a router's metrics; 0 if it is missing."""
    page = release.kubectl.page(router, METRICS_PORT, "/metrics")
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())
