"""Tenants of one router over real model servers: each hits its own cache, and never another tenant's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.app.server import RouterServer
from router.errors import ConfigError
from tests.support.model_server.http import MODEL, RunningServer, running_server
from tests.support.router.bench import long_text
from tests.support.router.doors import Stream, body, headers, set_headers, streamed_bytes, wait_until
from tests.support.router.server import get, ready_pods, running_router

TEXT = long_text(150)
DESTINATION = "x-gateway-destination-endpoint"


def write_pods(path: Path, servers: list[RunningServer], admins: Sequence[str] = ()) -> Path:
    """Write a pods file of model servers with their events and administration ports."""
    endpoints = []
    for number, server in enumerate(servers):
        ports = server.publisher.config.endpoint, server.publisher.config.replay_endpoint or ""
        events, replay = (port.rpartition(":")[2] for port in ports)
        labels = {"kvroute.io/kv-events-port": events, "kvroute.io/kv-replay-port": replay}
        if admins:
            labels["kvroute.io/admin-port"] = admins[number]
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        endpoints.append({"name": f"pod-{port}", "address": host, "port": port, "labels": labels})
    path.write_text(json.dumps({"endpoints": endpoints}), encoding="utf-8")
    return path


def ask(
    router: RouterServer, channel: grpc.Channel, servers: list[RunningServer], tenant: str, **fields: Any
) -> int:
    """Send one request as a gateway does; return the cached tokens and check them against the prediction."""
    stream = Stream(pb_grpc.ExternalProcessorStub(channel))
    told = {"model": MODEL, "prompt": TEXT, "max_tokens": 1, **fields}
    request_id = f"{tenant}-{len(router.decision_log.latest(1000))}"
    stream.send(
        headers(path="/v1/completions", x_tenant=tenant, x_request_id=request_id),
        body(json.dumps(told).encode()),
    )
    answer = stream.receive()
    destination = set_headers(answer)[DESTINATION]
    sent, _ = streamed_bytes([stream.receive()])
    stream.rest()
    assert "x" not in (json.loads(sent)["cache_salt"], json.loads(sent).get("extra_key"))
    server = next(one for one in servers if one.url.endswith(destination))
    usage = server.post("/v1/completions", sent).json()["usage"]
    cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    record = router.decision_log.find(request_id)
    assert record is not None
    assert record["predicted_cached_tokens"] == cached
    return cached


def test_a_tenant_hits_its_own_cache_and_never_anothers(tmp_path: Path) -> None:
    """A prompt hits only where the same tenant sent it, as predicted, whatever salt the client sends."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef\n")
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server()) for _ in range(2)]
        path = write_pods(tmp_path / "pods.yaml", servers)
        router = stack.enter_context(running_router(path, salt_from="x-tenant", salt_key_file=key))
        wait_until(lambda: len(ready_pods(router)) == 2 and get(router, "/ready")[0] == 200, "readiness")
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}"))
        assert ask(router, channel, servers, "victim") == 0
        assert ask(router, channel, servers, "victim", cache_salt="x") > 64
        assert ask(router, channel, servers, "spy") == 0
        known = ask(router, channel, servers, "spy", extra_key="x", vllm_xargs={"cache_salt": "x"})
        assert known > 64
        assert ask(router, channel, servers, "third", cache_salt="x") == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"salt_from": "x-tenant"}, "together"),
        ({"salt_from": "x-tenant", "salt_key_file": Path("/dev/null")}, "openssl"),
    ],
)
def test_a_router_without_a_good_key_does_not_start(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """A missing or short key is an error at start."""
    pods = write_pods(tmp_path / "pods.yaml", [])
    with pytest.raises(ConfigError, match=said), running_router(pods, **settings):
        pass
