"""Ten thousand idle streams against a router process: bounded memory, clear errors, other requests served."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.feedback.change_log import FOLLOWERS_MAX
from tests.integration.router.test_process import FREE_PORTS, grpc_port, process
from tests.support.router.bench import TINY
from tests.support.router.doors import body, headers, set_headers
from tests.support.router.server import fake_pods, write_pods

IDLE = 10_000
PLACES = 64
# Other services have so many on the same port: access logs and other routers.
OTHER_PLACES = 64 + FOLLOWERS_MAX
MEMORY_MIB = 100
DESTINATION = "x-gateway-destination-endpoint"
GOOD = json.dumps({"model": TINY, "prompt": "hello"}).encode()


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def picked(stub: Any) -> bool:
    """Return whether a plain request gets a pod."""
    call = stub.Process(timeout=300)
    try:
        await call.write(headers(path="/v1/completions"))
        await call.write(body(GOOD))
        await call.done_writing()
        return DESTINATION in set_headers(await call.read())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return False


async def until_picked(stub: Any) -> None:
    """Wait until a request gets a pod."""
    for _ in range(6000):
        if await picked(stub):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("no request was picked for within 300 s")


async def open_idle(stub: Any) -> list[Any]:
    """Open streams and send nothing; return once each is accepted or rejected."""
    calls: list[Any] = []
    while len(calls) < IDLE:
        calls += [stub.Process() for _ in range(200)]
        await asyncio.sleep(0.02)
    for _ in range(6000):
        if sum(not call.done() for call in calls) <= PLACES + OTHER_PLACES:
            return calls
        await asyncio.sleep(0.05)
    raise AssertionError("not refused within 300 s")


async def flood(port: int, pid: int) -> tuple[Counter[grpc.StatusCode | None], float]:
    """Open idle streams while plain requests are served; return the streams' status codes."""
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as attacker,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as client,
    ):
        stub = pb_grpc.ExternalProcessorStub(client)
        await until_picked(stub)
        before_mib = resident_mib(pid)
        calls = await open_idle(pb_grpc.ExternalProcessorStub(attacker))
        await until_picked(stub)
        grown_mib = resident_mib(pid) - before_mib
        codes = Counter([await call.code() if call.done() else None for call in calls])
        for call in calls:
            call.cancel()
        await until_picked(stub)
    return codes, grown_mib


def test_idle_streams_cost_neither_memory_nor_other_requests(tmp_path: Path) -> None:
    """Idle streams up to the limit stay open or are ended for others; those above get RESOURCE_EXHAUSTED."""
    with fake_pods(1) as (pod,):
        pods_file = write_pods(tmp_path / "pods.yaml", [pod.address])
        argv = ["--pods-file", str(pods_file), *FREE_PORTS, "--refresh-metrics-interval", "100ms"]
        argv += ["--responses", "full", "--max-streams", str(PLACES)]
        with process(*argv) as started:
            codes, grown_mib = asyncio.run(flood(grpc_port(started), started.pid))
            assert started.poll() is None
        still_open, refused = codes.pop(None, 0), codes.pop(grpc.StatusCode.RESOURCE_EXHAUSTED)
        cut_off = codes.pop(grpc.StatusCode.CANCELLED, 0)
        assert not codes
        assert still_open + refused + cut_off == IDLE
        assert still_open <= PLACES + OTHER_PLACES
        assert grown_mib < MEMORY_MIB
