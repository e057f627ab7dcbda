"""Model servers are scaled by the seconds of work that the routers know to be queued."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.kind.metrics_adapter import start_adapter, stop_adapter
from tests.support.kind.release import MODEL_SERVERS, ROUTERS, Release, base_values, merged
from tests.support.kind.tools import eventually
from tests.support.kind.traffic import steady_load

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800)]

_METRIC = "kvroute_router_queued_seconds_per_pod"


@pytest.fixture
def scaled(release: Release) -> Iterator[Release]:
    """Switch autoscaling on, with a metrics adapter that reads the routers' gauge."""
    base = base_values(release.kubectl.namespace)
    release.install(base)
    # An earlier test's values may still be in use by pods that this replaces.
    release.await_settled(routers=2, model_servers=2)
    adapters = release.cluster.kubectl(f"{release.kubectl.namespace}-monitoring")
    adapters("create", "namespace", adapters.namespace)
    scaling = {"kind": "hpa", "minReplicas": 2, "maxReplicas": 3, "queuedSeconds": 0.002}
    try:
        start_adapter(adapters, f"http://{ROUTERS}.{release.kubectl.namespace}.svc:9090/metrics")
        release.install(merged(base, {"modelServers": {"autoscaling": scaling}}))
        yield release
    finally:
        release.install(base)
        stop_adapter(adapters)
        adapters("delete", "namespace", adapters.namespace, "--wait=false")


def test_queued_work_starts_a_model_server(scaled: Release) -> None:
    """Without load two pods stay, also when it is switched on; under load a third is started."""

    def autoscaler() -> dict[str, Any]:
        return scaled.kubectl.get("horizontalpodautoscaler", MODEL_SERVERS)

    def is_idle() -> bool:
        for each in autoscaler()["status"].get("currentMetrics") or ():
            # An entry is empty until its metric was read.
            if each.get("external", {}).get("metric", {}).get("name") == _METRIC:
                return _quantity(each["external"]["current"]["value"]) == 0.0
        return False

    eventually("the autoscaler reads no queued work", is_idle)
    assert len(scaled.pods("model-server")) == 2
    with steady_load(scaled.url, clients=8, think_s=0.0):
        eventually("a third model server", lambda: len(scaled.pods("model-server")) == 3)
    scaled.await_settled(routers=2, model_servers=3)


def _quantity(text: str) -> float:
    units = {"u": 1e-6, "m": 1e-3}
    return float(text[:-1]) * units[text[-1]] if text[-1] in units else float(text)
