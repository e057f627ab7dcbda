"""Tests of `--peer` of `kvroute router` and `kvroute indexer` as processes: views are copied at the start."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from router._pb import endpoint_picker_pb2 as pb
from tests.integration.router.test_engine_watch import pods_file
from tests.integration.router.test_process import FREE_PORTS, process, run
from tests.support.indexer.engine_publisher import EnginePublisher, stored, wait_until
from tests.support.router.server import FakePod, fake_pods
from tests.support.stubs import picker_stub

MODEL = "kvroute-tiny"
BLOCKS = 5
TOKENS = list(range(16 * BLOCKS + 1))
SEED = ("--hash-seed", "7")


@dataclass(frozen=True)
class Ports:
    """Ports of a process."""

    grpc: int
    metrics: int

    @property
    def peer(self) -> str:
        """Return the address for `--peer`."""
        return f"127.0.0.1:{self.grpc}"

    def metric(self, name: str) -> float:
        """Return a sample of the metrics page by name and labels; 0 if missing."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=300) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.rpartition(" ")[2])
        return 0.0


@contextmanager
def router(path: Path, *argv: str) -> Iterator[Ports]:
    """Run a router with the common seed."""
    options = ("--pods-file", str(path), *FREE_PORTS, "--refresh-metrics-interval", "100ms", *SEED)
    with process(*options, *argv) as started:
        yield ports(started)


@contextmanager
def indexer(path: Path, *argv: str) -> Iterator[Ports]:
    """Run a stand-alone indexer with the common seed."""
    command = [sys.executable, "-m", "indexer", "--pods-file", str(path), "--host", "127.0.0.1"]
    command += ["--grpc-port", "0", "--metrics-port", "0", *SEED, *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield ports(started)
        finally:
            started.kill()


def ports(started: subprocess.Popen[str]) -> Ports:
    """Return the ports from the process's "listening" log line."""
    assert started.stderr is not None
    for line in started.stderr:
        if found := re.search(r"listening: grpc (\d+).*metrics (\d+)", line):
            return Ports(int(found[1]), int(found[2]))
    raise AssertionError("the process exited without listening")


def cached_tokens(at: Ports) -> int:
    """Return the cached tokens that a router predicts for TOKENS; -1 while it cannot pick."""
    request = pb.PickEndpointRequest(model=MODEL, token_ids=pb.TokenIds(ids=TOKENS))
    with grpc.insecure_channel(at.peer) as channel:
        try:
            response = picker_stub(channel).PickEndpoint(request, timeout=300)
        except grpc.RpcError:
            return -1
    (endpoint,) = response.endpoints
    return int(endpoint.cached_tokens) if endpoint.view == "EXACT" else -1


def followed(path: Path, pod: FakePod, engine: EnginePublisher) -> Path:
    """Write a pods file with the pod and its engine's event ports; return its path."""
    labels = {"kv_events_port": str(engine.events_port), "kv_replay_port": str(engine.replay_port)}
    return pods_file(path, pod, model=MODEL, **labels)


def publish(engine: EnginePublisher) -> None:
    """Publish more batches than the engine's replay history holds."""
    engine.wait_for_subscriber()
    for number in range(BLOCKS):
        tokens = TOKENS[16 * number : 16 * (number + 1)]
        engine.publish(stored([number + 1], tokens, parent=number or None, block_size=16))


BUILT = 'kvroute_indexer_bootstraps_total{source="%s"}'


@pytest.mark.parametrize("late", [router, indexer])
def test_late_starter_copies_a_routers_view(
    tmp_path: Path, late: Callable[..., AbstractContextManager[Ports]]
) -> None:
    """A later router or indexer copies a router's view that the engine can no longer replay."""
    with fake_pods(1) as (pod,), EnginePublisher(history=2) as engine:
        path = followed(tmp_path / "pods.yaml", pod, engine)
        with router(path) as first:
            wait_until("the first view", lambda: first.metric(BUILT % "replay") == 1)
            publish(engine)
            wait_until("the first predicts", lambda: cached_tokens(first) == 16 * BLOCKS)
            with late(path, "--peer", first.peer) as second:
                wait_until("the second view", lambda: second.metric(BUILT % "peer") == 1)
                assert second.metric("kvroute_indexer_holdings") == BLOCKS
                sent = 'kvroute_indexer_told_snapshots_total{outcome="completed"}'
                wait_until("the end of the transfer", lambda: first.metric(sent) == 1)
                if late is router:
                    wait_until("the second predicts", lambda: cached_tokens(second) == 16 * BLOCKS)


def test_peer_without_hash_seed_is_rejected(tmp_path: Path) -> None:
    """`--peer` without `--hash-seed` stops the start with one line that names the flag."""
    path = tmp_path / "pods.yaml"
    path.write_text("endpoints: []\n")
    code, output = run("--pods-file", str(path), *FREE_PORTS, "--peer", "router:9002")
    assert (code, output.count("\n")) == (2, 1)
    assert "--hash-seed" in output


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--peer", "router"), "HOST:PORT"),
        (("--peer", "router:0"), "HOST:PORT"),
        (("--peer", "router:9002", "--peer-cert", "tls.crt"), "peer_key"),
        (("--peer", "router:9002", "--peer-ca", "missing.crt"), "missing.crt"),
    ],
)
def test_invalid_peer_setting_is_rejected(tmp_path: Path, argv: tuple[str, ...], named: str) -> None:
    """An invalid peer setting stops the start with exit code 2 and a line that names it."""
    path = tmp_path / "pods.yaml"
    path.write_text("endpoints: []\n")
    code, output = run("--pods-file", str(path), *FREE_PORTS, *SEED, *argv)
    assert (code, output.count("\n")) == (2, 1)
    assert named in output
