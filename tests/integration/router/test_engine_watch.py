"""A whole router compares its pods' metrics pages with their views, and waits for views before ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indexer import IndexerConfig
from tests.support.indexer.engine_publisher import EnginePublisher
from tests.support.router.doors import wait_until
from tests.support.router.server import METRICS, FakePod, fake_pods, get, running_router

FOUND = 'kvroute_indexer_findings_total{finding="process_changed"} 1.0'


def pods_file(path: Path, pod: FakePod, **labels: str) -> Path:
    """Write a pods file of one pod with labels that begin with "kvroute.io/"."""
    names = {f"kvroute.io/{name.replace('_', '-')}": value for name, value in labels.items()}
    endpoint = {"name": "a", "address": "127.0.0.1", "port": str(pod.port), "labels": names}
    path.write_text(json.dumps({"endpoints": [endpoint]}), encoding="utf-8")
    return path


def restarted(pod: FakePod, started_s: int) -> None:
    """Set the pod's page to a process that started at this time."""
    pod.metrics = f"process_start_time_seconds {started_s}.0\n{METRICS}"


@pytest.mark.parametrize(("ranks", "found"), [("1", True), ("2", False)])
def test_another_process_is_found_by_its_page(tmp_path: Path, ranks: str, found: bool) -> None:
    """A pod's new start time is a finding, except where several engines may be behind the page."""
    with fake_pods(1) as (pod,):
        path = pods_file(tmp_path / "pods.yaml", pod, model="kvroute-tiny", kv_ranks=ranks)
        restarted(pod, 1_000)
        with running_router(path) as router:
            wait_until(lambda: router.pods.current[pod.address].ready, "the pod is ready")
            pages = pod.pages
            wait_until(lambda: pod.pages > pages + 1, "its page was read")
            restarted(pod, 2_000)
            if found:
                wait_until(lambda: FOUND in get(router, "/metrics")[1].decode(), "the finding")
            else:
                pages = pod.pages
                wait_until(lambda: pod.pages > pages + 2, "its new page was read")
                assert FOUND not in get(router, "/metrics")[1].decode()


def test_a_router_waits_for_the_views_of_the_pods_it_may_pick(tmp_path: Path) -> None:
    """A router waits for the view of a healthy pod whose publisher is silent, but not of a dead pod."""
    patient = IndexerConfig(bootstrap_s=600.0)
    with fake_pods(1) as (pod,), EnginePublisher() as engine:
        pod.healthy = False
        labels = {"kv_events_port": str(engine.events_port), "kv_replay_port": "1"}
        path = pods_file(tmp_path / "pods.yaml", pod, model="kvroute-tiny", **labels)
        with running_router(path, index=patient, sync_timeout_s=600.0) as router:
            wait_until(lambda: get(router, "/ready")[0] == 200, "ready without it")
        pod.healthy = True
        with running_router(path, index=patient, sync_timeout_s=600.0) as router:
            wait_until(lambda: router.pods.current[pod.address].ready, "the pod is ready")
            status, page = get(router, "/ready")
            assert (status, json.loads(page)["views_pending"]) == (503, [pod.address])
        labels["kv_replay_port"] = str(engine.replay_port)
        path = pods_file(tmp_path / "pods.yaml", pod, model="kvroute-tiny", **labels)
        with running_router(path, index=patient, sync_timeout_s=600.0) as router:
            wait_until(lambda: get(router, "/ready")[0] == 200, "ready with its view")
            assert json.loads(get(router, "/ready")[1])["views_pending"] == []
