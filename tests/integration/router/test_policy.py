"""Sessions, priorities, decisions and metrics of removed pods, in a whole router over fake pods."""

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
from tests.support.router.bench import completion
from tests.support.router.doors import wait_until
from tests.support.router.server import fake_pods, get, ready_pods, running_router, write_pods

BATCH = {"x-llm-d-inference-objective": "batch"}


def all_ready(router: RouterServer, count: int) -> None:
    """Wait until this number of pods is ready."""
    wait_until(lambda: len(ready_pods(router)) == count, "readiness")


def test_a_session_without_tokens_stays_at_its_pod(tmp_path: Path) -> None:
    """Requests of an unknown API, which have no tokens, follow their session's header."""
    with fake_pods(4) as pods:
        path = write_pods(tmp_path / "pods.yaml", [pod.address for pod in pods])
        with running_router(path) as router:
            all_ready(router, 4)
            headers = {"x-session-id": "s"}
            asked = (RouteRequest(f"r{n}", RequestKind.PASSTHROUGH, headers=headers) for n in range(12))
            assert len({router.router.route(request, 0.0).primary.pod for request in asked}) == 1


def test_a_sheddable_request_is_refused_when_its_pods_are_full(tmp_path: Path) -> None:
    """A request below priority 0 passes until its pod reports a full KV cache; then it gets 429."""
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


def test_a_decision_records_the_age_of_load_metrics(tmp_path: Path) -> None:
    """A candidate with scraped load metrics has their age in the decision log."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "pods.yaml", [pod.address])) as router:
        all_ready(router, 1)
        router.router.route(completion("r", "hello " * 40), _now_s(router))
        (decision,) = json.loads(get(router, "/debug/decisions?request_id=r")[1])["decisions"]
        assert decision["candidates"][0]["pod"] == pod.address
        assert decision["candidates"][0]["load_age_s"] >= 0.0


def test_a_removed_pod_has_no_series(tmp_path: Path) -> None:
    """After a pod is removed, no series on the metrics page names it."""
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


def test_a_new_pod_at_an_address_has_the_default_rate(tmp_path: Path) -> None:
    """A new pod at the address of a slow one starts with the default prefill rate."""
    with fake_pods(2) as pods:
        path = write_pods(tmp_path / "pods.yaml", [pod.address for pod in pods])
        with running_router(path) as router:
            all_ready(router, 2)
            slow = pods[0].address
            for _ in range(20):
                router.rates.observe(slow, 1_000.0, 10.0, time.monotonic())
            assert router.rates.load_table.prefill_tokens_per_s(slow) < 1_000.0
            path.write_text(path.read_text().replace("pod-0", "another"))
            wait_until(lambda: router.pods.current[slow].name == "another", "the new pod")
            prior = router.config.prefill_tokens_per_s
            wait_until(lambda: router.rates.load_table.prefill_tokens_per_s(slow) == prior, "its own rate")


def test_a_pod_without_load_metrics_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pod without load metrics is ready; a warning and a gauge say so until its label is corrected."""
    with fake_pods(1) as (pod,):
        pod.metrics_path = "/prometheus/metrics"
        path = write_pods(tmp_path / "pods.yaml", [pod.address])
        with caplog.at_level(logging.WARNING, "router.pods.watch"), running_router(path) as router:
            hidden = f'kvroute_router_pod_hides_load{{pod="{pod.address}"}}'
            wait_until(lambda: f"{hidden} 1.0" in get(router, "/metrics")[1].decode(), "the gauge")
            assert router.pods.current[pod.address].ready
            wait_until(lambda: router.pods.current[pod.address].probes_without_load > 5, "further probes")
            declared = json.loads(path.read_text())
            declared["endpoints"][0]["labels"] = {"llm-d.ai/engine-type": "trtllm-serve"}
            path.write_text(json.dumps(declared))
            wait_until(lambda: _kv_usage(router) == 0.5, "its load")
            wait_until(lambda: f"{hidden} 0.0" in get(router, "/metrics")[1].decode(), "the gauge's end")
    (warning,) = (message for message in caplog.messages if "pod load unknown" in message)
    assert f"http://{pod.address}/metrics answered 404" in warning


def test_an_invalid_metric_is_reported_and_others_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An invalid metric is logged once and shown on the pod's page, and the pod's other metrics are used."""
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
    (pod,) = router.pods.current.values()
    return pod.load.kv_usage if pod.load is not None else None


def _now_s(router: RouterServer) -> float:
    """Return the current time of the router's clock."""
    (pod,) = router.pods.current.values()
    assert pod.load is not None
    return pod.load.scraped_s
