"""Pods that fail, stall or sleep, in a whole router and partly behind a real Envoy."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvroute.envoy_config import EnvoySettings, bootstrap
from router.inflight.failures import OUT_AFTER
from tests.support.router.doors import wait_until
from tests.support.router.envoy import BODY, Gateway, Mode, gateway
from tests.support.router.server import METRICS, fake_pods, get, ready_pods, running_router, write_pods

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


@pytest.mark.parametrize("clients", [1, 8])
@pytest.mark.parametrize("mode", ["check_grpc", "ext_proc usage", "ext_proc full"])
def test_a_pod_that_fails_at_once_gets_next_to_no_requests(tmp_path: Path, mode: Mode, clients: int) -> None:
    """A pod that answers 500 at once beside a good one gets under 2 % of 500 requests."""
    with gateway(tmp_path, mode) as served:
        good, bad = served.pods
        bad.status = 500
        statuses = post_all(served, threads=clients)
        assert len(bad.bodies) < 0.02 * REQUESTS
        assert statuses.count(500) == len(bad.bodies)
        assert len(good.bodies) == REQUESTS - len(bad.bodies)


def served_requests(served: Gateway, outcome: str) -> int:
    """Return the count of requests by whether the picked pod served them."""
    page = get(served.router, "/metrics")[1].decode()
    name = f'kvroute_router_served_requests_total{{outcome="{outcome}"}} '
    return next((int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(name)), 0)


def ignoring_picks(settings: EnvoySettings) -> dict[str, Any]:
    """Return the configuration of an Envoy that balances requests by itself, whatever the pick."""
    config = json.dumps(bootstrap(replace(settings, failure_mode_allow=True)))
    config = config.replace('"cluster": "picked_pod"', '"cluster": "round_robin"')
    changed: dict[str, Any] = json.loads(config)
    return changed


@pytest.mark.parametrize("mode", ["check_grpc", "ext_proc usage", "ext_proc full"])
@pytest.mark.parametrize("ignores", [False, True])
def test_a_gateway_that_ignores_picks_is_named(
    tmp_path: Path, mode: Mode, ignores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Envoy's log shows in each mode whether the picked pods serve; if not, /ready says so."""
    if ignores:
        monkeypatch.setattr("tests.support.router.envoy.bootstrap", ignoring_picks)
    with gateway(tmp_path, mode) as served:
        for number in range(60):
            # One conversation, so all picks are the same pod.
            assert served.post({**BODY, "prompt": f"{BODY['prompt']}{number}"}).status == 200
        wait_until(lambda: sum(served_requests(served, each) for each in ("same", "other")) == 60, "the log")
        assert (served_requests(served, "other") > 10) is ignores
        finding = ready_page(served)["picks_ignored"]
        assert ("your gateway ignores picks" in str(finding)) is ignores


def asking_twice(settings: EnvoySettings) -> dict[str, Any]:
    """Return the configuration of an Envoy with two filters that ask the router for each request's pick."""
    config = bootstrap(settings)
    (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
    filters = chain["filters"][0]["typed_config"]["http_filters"]
    (asking,) = (at for at, one in enumerate(filters) if one["name"] == "envoy.filters.http.ext_proc")
    filters.insert(asking, filters[asking])
    return config


@pytest.mark.parametrize("twice", [False, True])
def test_a_gateway_that_asks_again_is_named(
    tmp_path: Path, twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further calls for a request in flight are counted, and /ready says so."""
    if twice:
        monkeypatch.setattr("tests.support.router.envoy.bootstrap", asking_twice)
    with gateway(tmp_path, "ext_proc full") as served:
        assert set(post_all(served, threads=2)) == {200}
        assert served_requests(served, "again") == (REQUESTS if twice else 0)
        assert ("asks for a pick again" in str(ready_page(served)["picks_ignored"])) is twice


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


def busy_page(tokens: int) -> str:
    """Return the metrics page of an engine with queued requests that has computed this many tokens."""
    page = METRICS.replace('waiting{engine="0"} 0.0', 'waiting{engine="0"} 3.0')
    return f'{page}vllm:generation_tokens_total{{engine="0"}} {tokens}.0\n'


def test_a_stalled_pod_is_out_until_its_tokens_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod with queued requests and no new token is not ready while another computes, and says why."""
    monkeypatch.setattr("router.pods.pod_set.STALL_S", 0.5)
    with fake_pods(2) as (busy, idle):
        tokens = count()
        idle.metrics = busy_page(7)

        def computes() -> bool:
            busy.metrics = busy_page(next(tokens))
            return ready_pods(router) == {busy.address}

        pods_file = write_pods(tmp_path / "pods.yaml", [busy.address, idle.address])
        with running_router(pods_file) as router:
            wait_until(lambda: len(ready_pods(router)) == 2, "both pods")
            wait_until(computes, "the stalled pod's exclusion")
            assert router.pods.current[idle.address].why.startswith("stalled: ")
            metric = f'kvroute_router_pod_stalled{{pod="{idle.address}"}} 1.0'
            assert metric in get(router, "/metrics")[1].decode()
            assert f"pod not ready: pod={idle.address} reason=stalled: " in caplog.text
            idle.metrics = busy_page(8)
            wait_until(lambda: idle.address in ready_pods(router), "its return")


SLEEPING = METRICS + 'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'


@pytest.mark.parametrize("wakes", [True, False])
def test_one_sleeping_pod_is_woken_where_the_operator_allows_it(tmp_path: Path, wakes: bool) -> None:
    """With --wake-pods, requests whose candidates all sleep wake one pod, once; without it none."""
    with gateway(tmp_path, "check_grpc", wake_pods=wakes) as served:
        for pod in served.pods:
            pod.metrics = SLEEPING
        wait_until(lambda: len(ready_page(served)["pods_asleep"]) == 2, "sleep")  # type: ignore[arg-type]
        for _ in range(20):
            assert served.post(BODY).status == 200
        called = [path for pod in served.pods for path in pod.paths]
        if wakes:
            wait_until(lambda: "/wake_up" in {path for pod in served.pods for path in pod.paths}, "the call")
            called = [path for pod in served.pods for path in pod.paths]
        assert called.count("/wake_up") == wakes
