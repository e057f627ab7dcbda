"""Pods that fail or lie idle beside good ones, behind a real Envoy: they get next to no requests."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from router.inflight.failures import OUT_AFTER
from tests.support.router.doors import wait_until
from tests.support.router.envoy import BODY, Gateway, Mode, gateway
from tests.support.router.server import get

REQUESTS = 500


def ready_page(served: Gateway) -> dict[str, object]:
    """Return the content of /ready."""
    page: dict[str, object] = json.loads(get(served.router, "/ready")[1])
    return page


def post_all(served: Gateway, threads: int) -> list[int]:
    """Send all requests, each with a prompt of its own; return their statuses."""
    with ThreadPoolExecutor(threads) as pool:
        bodies = ({**BODY, "prompt": f"{number} hello"} for number in range(REQUESTS))
        return [answer.status for answer in pool.map(served.post, bodies)]


@pytest.mark.parametrize("mode", ["check_grpc", "ext_proc skip", "ext_proc full"])
def test_a_pod_that_fails_at_once_gets_next_to_no_requests(tmp_path: Path, mode: Mode) -> None:
    """A pod that answers 500 at once beside a good one gets under 2 % of 500 requests."""
    with gateway(tmp_path, mode) as served:
        good, bad = served.pods
        bad.status = 500
        statuses = post_all(served, threads=2)
        assert len(bad.bodies) < 0.02 * REQUESTS
        assert statuses.count(500) == len(bad.bodies)
        assert len(good.bodies) == REQUESTS - len(bad.bodies)


def test_pods_that_all_fail_stay_in_and_come_back(tmp_path: Path) -> None:
    """If all pods fail, none is out: clients get the pods' status, and 200 as soon as the pods recover."""
    with gateway(tmp_path, "ext_proc full") as served:
        for pod in served.pods:
            pod.status = 500
        assert set(post_all(served, threads=2)) == {500}
        wait_until(lambda: len(ready_page(served)["pods_failing"]) > 0, "the finding")  # type: ignore[arg-type]
        for pod in served.pods:
            pod.status = 200
        assert served.post(BODY).status == 200


def test_errors_of_clients_are_no_failures(tmp_path: Path) -> None:
    """A pod that answers 400 is not avoided."""
    with gateway(tmp_path, "check_grpc") as served:
        for pod in served.pods:
            pod.status = 400
        assert set(post_all(served, threads=2)) == {400}
        assert min(len(pod.bodies) for pod in served.pods) > OUT_AFTER
        assert ready_page(served)["pods_failing"] == {}
