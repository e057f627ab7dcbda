"""The router's health port answers probes whatever the number of Watch streams."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.router.server import fake_pods, running_router, write_pods

_TIMEOUT_S = 30.0


def test_watch_streams_do_not_block_probes(tmp_path: Path) -> None:
    """With many Watch streams open, Check is answered, and each stream receives its state."""
    with fake_pods(1) as pods, ExitStack() as opened:
        pods_file = write_pods(tmp_path / "pods.yaml", [pods[0].address])
        router = opened.enter_context(running_router(pods_file))
        address = f"127.0.0.1:{router.ports['grpc-health']}"
        channel = opened.enter_context(grpc.insecure_channel(address))
        stub = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest(service="liveness")
        watches = [stub.Watch(ask, timeout=120) for _ in range(24)]
        assert {next(watch).status for watch in watches} == {health_pb2.HealthCheckResponse.SERVING}
        for _ in range(20):
            assert stub.Check(ask, timeout=_TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING
        for watch in watches:
            watch.cancel()
