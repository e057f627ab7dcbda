"""Sessions, priorities, explain and metrics of pods that go, in a whole router over fake pods."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.app.server import RouterServer
from router.errors import SaturatedError
from router.prompts.request import RequestKind, RouteRequest
from tests.integration.router_server_support import fake_pods, get, ready_pods, running_router, write_pods
from tests.unit.router_support import completion
from tests.wire.router_wire_support import wait_until

BATCH = {"x-llm-d-inference-objective": "batch"}


def all_ready(router: RouterServer, count: int) -> None:
    """Waits until so many pods are ready."""
    wait_until(lambda: len(ready_pods(router)) == count, "readiness")


def test_a_session_without_tokens_stays_at_its_pod(tmp_path: Path) -> None:
    """Requests of an unknown API, whose cache nobody knows, follow their session's header."""
    with fake_pods(4) as pods:
        path = write_pods(tmp_path / "pods.yaml", [pod.address for pod in pods])
        with running_router(path) as router:
            all_ready(router, 4)
            headers = {"x-session-id": "s"}
            asked = (RouteRequest(f"r{n}", RequestKind.PASSTHROUGH, headers=headers) for n in range(12))
            assert len({router.router.route(request, 0.0).primary.pod for request in asked}) == 1


def test_a_sheddable_request_is_refused_when_its_pods_are_full(tmp_path: Path) -> None:
    """With room in the KV cache it passes; once the pod tells that it is full, it is answered 429."""
    with fake_pods(1) as (pod,):
        path = write_pods(tmp_path / "pods.yaml", [pod.address])
        with running_router(path, priorities=(("batch", -1),)) as router:
            all_ready(router, 1)
            request = replace(completion("r", "hello"), headers=BATCH)
            assert router.router.route(request, _now_s(router)).priority == -1
            plain = pod.page
            full = b"vllm:kv_cache_usage_perc 1.0\nvllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
            pod.page = lambda page: (200, full) if page == "/metrics" else plain(page)  # type: ignore[method-assign]
            wait_until(lambda: _kv_usage(router) == 1.0, "the new load")
            with pytest.raises(SaturatedError):
                router.router.route(request, _now_s(router))


def test_a_decision_shows_the_age_of_the_load_it_was_made_by(tmp_path: Path) -> None:
    """A candidate whose metrics were scraped has a load age on the page of decisions."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        all_ready(router, 1)
        router.router.route(completion("r", "hello " * 40), _now_s(router))
        (decision,) = json.loads(get(router, "/debug/decisions?request_id=r")[1])["decisions"]
        assert decision["candidates"][0]["pod"] == pod.address
        assert decision["candidates"][0]["load_age_s"] >= 0.0


def test_a_pods_series_go_with_it(tmp_path: Path) -> None:
    """When a pod is declared no more, nothing on the metrics page names it."""
    with fake_pods(2) as (one, two):
        path = write_pods(tmp_path / "pods.yaml", [one.address, two.address])
        with running_router(path) as router:
            all_ready(router, 2)
            for pod in (one, two):
                only = frozenset({pod.address})
                router.router.route(replace(completion(pod.address, "hello"), candidates=only), 0.0)
                assert pod.address in get(router, "/metrics")[1].decode()
            write_pods(path, [two.address])
            wait_until(
                lambda: one.address not in get(router, "/metrics")[1].decode(), "the end of its series"
            )
            assert f'endpoint_name="{two.address}"' in get(router, "/metrics")[1].decode()


def test_a_new_life_at_an_address_is_learnt_anew(tmp_path: Path) -> None:
    """Another pod at the address of one that was slow is believed as fast as any."""
    with fake_pods(2) as pods:
        path = write_pods(tmp_path / "pods.yaml", [pod.address for pod in pods])
        with running_router(path) as router:
            all_ready(router, 2)
            slow = pods[0].address
            for _ in range(20):
                router.rates.observe(slow, 1_000.0, 10.0, time.monotonic())
            assert router.rates.board.prefill_tokens_per_s(slow) < 1_000.0
            path.write_text(path.read_text().replace("pod-0", "another"))
            wait_until(lambda: router.pods.snapshot()[slow].name == "another", "the new pod")
            prior = router.config.prefill_tokens_per_s
            wait_until(lambda: router.rates.board.prefill_tokens_per_s(slow) == prior, "its own rate")


def test_a_pod_whose_load_cannot_be_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is ready; a warning comes once and a gauge lasts until its label says where the page is."""
    with fake_pods(1) as (pod,):
        pod.metrics_path = "/prometheus/metrics"
        path = write_pods(tmp_path / "pods.yaml", [pod.address])
        with caplog.at_level(logging.WARNING, "router.pods.watch"), running_router(path) as router:
            hidden = f'kvroute_router_pod_hides_load{{pod="{pod.address}"}}'
            wait_until(lambda: f"{hidden} 1.0" in get(router, "/metrics")[1].decode(), "the gauge")
            assert router.pods.snapshot()[pod.address].ready
            wait_until(lambda: router.pods.snapshot()[pod.address].loadless > 5, "further probes")
            declared = json.loads(path.read_text())
            declared["endpoints"][0]["labels"] = {"llm-d.ai/engine-type": "trtllm-serve"}
            path.write_text(json.dumps(declared))
            wait_until(lambda: _kv_usage(router) == 0.5, "its load")
            wait_until(lambda: f"{hidden} 0.0" in get(router, "/metrics")[1].decode(), "the gauge's end")
    (warning,) = (message for message in caplog.messages if "pod load unknown" in message)
    assert f"http://{pod.address}/metrics answered 404" in warning


def test_a_senseless_gauge_is_told_of_and_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The pod's state shows which figure is missing, as long as it is; it is logged when it goes missing."""
    with fake_pods(1) as (pod,):
        sound = pod.metrics
        path = write_pods(tmp_path / "pods.yaml", [pod.address])
        with caplog.at_level(logging.WARNING, "router.pods.watch"), running_router(path) as router:
            wait_until(lambda: _kv_usage(router) == 0.5, "its load")
            pod.metrics = sound.replace(" 0.5", " NaN").replace('waiting{engine="0"} 0.0', "waiting 3.0")
            missing = f'kvroute_router_pod_load_untold{{figure="kv_usage",pod="{pod.address}"}} 1.0'
            wait_until(lambda: missing in get(router, "/metrics")[1].decode(), "the gauge")
            (shown,) = json.loads(get(router, "/debug/pods")[1])["pods"]
            scraped = {name: shown["scraped"][name] for name in ("waiting", "running", "kv_usage")}
            assert scraped == {"waiting": 3, "running": 0, "kv_usage": None}
            pod.metrics = sound
            wait_until(lambda: missing not in get(router, "/metrics")[1].decode(), "the gauge's end")
    (warning,) = (message for message in caplog.messages if "metrics incomplete" in message)
    assert f"pod={pod.address} missing=kv_usage" in warning


def _kv_usage(router: RouterServer) -> float | None:
    (pod,) = router.pods.snapshot().values()
    return pod.load.kv_usage if pod.load is not None else None


def _now_s(router: RouterServer) -> float:
    """A moment of the router's clock at which its accounts are fresh."""
    (pod,) = router.pods.snapshot().values()
    assert pod.load is not None
    return pod.load.scraped_s
