"""Debug pages and metrics: profiles, plugins' states, streams, health of any service, message sizes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.app.profiler import profile_pages
from router.app.server import RouterServer
from tests.support.router.bench import TINY
from tests.support.router.doors import Stream, body, headers, wait_until
from tests.support.router.server import fake_pods, get, ready_pods, running_router, write_pods


@contextmanager
def router_of_one(directory: Path, **settings: Any) -> Iterator[RouterServer]:
    """Run a router with one pod."""
    with (
        fake_pods(1) as pods,
        running_router(write_pods(directory / "pods.yaml", [pods[0].address]), **settings) as router,
    ):
        wait_until(lambda: len(ready_pods(router)) == 1, "the pod")
        yield router


def test_a_profile_shows_where_threads_are(tmp_path: Path) -> None:
    """A profile has collapsed stacks with counts by thread, unless profiling is disabled."""
    with router_of_one(tmp_path) as router:
        status, text = get(router, "/debug/pprof/profile?seconds=0.2")
        assert status == 200
        stack, _, count = text.decode().splitlines()[0].rpartition(" ")
        assert int(count) > 0
        assert ";" in stack
        assert any(line.startswith("housekeeping;") for line in text.decode().splitlines())
        assert b"thread housekeeping:" in get(router, "/debug/pprof/goroutine")[1]
        assert get(router, "/debug/pprof/")[0] == 200
        for seconds in ("0", "-1", "nan", "inf", "1000", "x"):
            assert get(router, f"/debug/pprof/profile?seconds={seconds}")[0] == 400
    with router_of_one(tmp_path, profiling=False) as router:
        assert get(router, "/debug/pprof/profile?seconds=0.1")[0] == 404


def test_one_profile_at_a_time() -> None:
    """A second profile is rejected while the first is in progress, and accepted after it."""
    take = profile_pages()["/debug/pprof/profile"]
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(take({"seconds": "1"})[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 503 in statuses
    assert 200 in statuses
    assert take({"seconds": "0.01"})[0] == 200


def test_plugins_states_are_shown(tmp_path: Path) -> None:
    """A router without a configuration file reports no plugin states."""
    with router_of_one(tmp_path) as router:
        status, text = get(router, "/debug/plugins/state")
        assert (status, json.loads(text)) == (200, {"plugins": {}})


def test_streams_are_counted_by_how_they_end(tmp_path: Path) -> None:
    """Streams are counted as open, by duration and by status code, if the flag is set."""

    def sample(router: RouterServer, name: str) -> float:
        lines = get(router, "/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    prefix = "llm_d_epp_extproc_stream"
    with router_of_one(tmp_path, stream_metrics=True, responses_full=True) as router:
        with grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel:
            done, cancelled = (Stream(pb_grpc.ExternalProcessorStub(channel)) for _ in range(2))
            for stream in (done, cancelled):
                stream.send(headers(path="/v1/completions"))
            wait_until(lambda: sample(router, f"{prefix}s_inflight") == 2, "two open streams")
            done.send(body(json.dumps({"model": TINY, "prompt": "x"}).encode()))
            done.receive()
            done.rest()
            cancelled.cancel()
            wait_until(lambda: sample(router, f"{prefix}s_inflight") == 0, "their ends")
        assert sample(router, f'{prefix}s_total{{code="OK"}}') == 1
        assert sample(router, f'{prefix}s_total{{code="Canceled"}}') == 1
        assert sample(router, f"{prefix}_duration_seconds_count") == 2
    with router_of_one(tmp_path) as router:
        assert prefix not in get(router, "/metrics")[1].decode()


@pytest.mark.parametrize("name", ["", "readiness", "liveness", "inference-extension", "whatever"])
def test_unknown_service_names_have_the_health_of_readiness(tmp_path: Path, name: str) -> None:
    """The health of unknown service names follows readiness; liveness does not."""
    with (
        router_of_one(tmp_path) as router,
        grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc-health']}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        def status() -> int:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=300).status)

        serving = health_pb2.HealthCheckResponse.SERVING
        wait_until(lambda: status() == serving, "readiness")
        router.drain()
        assert (status() == serving) == (name == "liveness")


def test_messages_above_the_limit_are_rejected(tmp_path: Path) -> None:
    """A message above the size limit is rejected before it is read; the next call succeeds."""
    with (
        router_of_one(tmp_path, receive_bytes_max=50_000) as router,
        grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel,
    ):
        stub = pb_grpc.ExternalProcessorStub(channel)
        small, large = (
            json.dumps({"model": TINY, "prompt": "x" * size}).encode() for size in (10_000, 60_000)
        )
        messages = [headers(path="/v1/completions"), body(large)]
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Process(iter(messages), timeout=300))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answers = list(stub.Process(iter([headers(path="/v1/completions"), body(small)]), timeout=300))
        assert answers[0].WhichOneof("response") == "request_headers"
