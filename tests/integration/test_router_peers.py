"""`kvroute router --peer` and `kvroute indexer --peer` as processes: what one knows, the next begins with."""

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
from router._pb import endpoint_picker_pb2_grpc as pb_grpc
from tests.integration.router_server_support import FakePod, fake_pods
from tests.integration.test_router_engine_watch import pods_file
from tests.integration.test_router_process import FREE_PORTS, process, run
from tests.wire.engine_publisher import EnginePublisher, stored, wait_until

MODEL = "kvroute-tiny"
BLOCKS = 5
TOKENS = list(range(16 * BLOCKS + 1))
SEED = ("--hash-seed", "7")


@dataclass(frozen=True)
class Ports:
    """Where a process listens."""

    grpc: int
    metrics: int

    @property
    def peer(self) -> str:
        """What others name it by."""
        return f"127.0.0.1:{self.grpc}"

    def metric(self, name: str) -> float:
        """A sample of its metrics page, with its labels; 0 where there is none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=300) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.rpartition(" ")[2])
        return 0.0


@contextmanager
def router(path: Path, *argv: str) -> Iterator[Ports]:
    """A running router with block length and seed in common."""
    options = ("--pods-file", str(path), *FREE_PORTS, "--refresh-metrics-interval", "100ms", *SEED)
    with process(*options, *argv) as started:
        yield ports(started)


@contextmanager
def indexer(path: Path, *argv: str) -> Iterator[Ports]:
    """A running stand-alone indexer with the same seed."""
    command = [sys.executable, "-m", "indexer", "--pods-file", str(path), "--host", "127.0.0.1"]
    command += ["--grpc-port", "0", "--metrics-port", "0", *SEED, *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield ports(started)
        finally:
            started.kill()


def ports(started: subprocess.Popen[str]) -> Ports:
    """Waits for the line that tells the ports; what is said later is read and passed over."""
    assert started.stderr is not None
    for line in started.stderr:
        if found := re.search(r"listening: grpc (\d+).*metrics (\d+)", line):
            return Ports(int(found[1]), int(found[2]))
    raise AssertionError("it ended without listening")


def cached_tokens(at: Ports) -> int:
    """What a router predicts for TOKENS; -1 while it cannot pick."""
    request = pb.PickEndpointRequest(model=MODEL, token_ids=pb.TokenIds(ids=TOKENS))
    with grpc.insecure_channel(at.peer) as channel:
        try:
            response = pb_grpc.EndpointPickerStub(channel).PickEndpoint(request, timeout=300)
        except grpc.RpcError:
            return -1
    (endpoint,) = response.endpoints
    return int(endpoint.cached_tokens) if endpoint.view == "EXACT" else -1


def followed(path: Path, pod: FakePod, engine: EnginePublisher) -> Path:
    """A pods file with the engine behind the pod."""
    labels = {"kv_events_port": str(engine.events_port), "kv_replay_port": str(engine.replay_port)}
    return pods_file(path, pod, model=MODEL, **labels)


def publish(engine: EnginePublisher) -> None:
    """More batches than the engine remembers."""
    engine.wait_for_subscriber()
    for number in range(BLOCKS):
        tokens = TOKENS[16 * number : 16 * (number + 1)]
        engine.publish(stored([number + 1], tokens, parent=number or None, block_size=16))


BUILT = 'kvroute_indexer_bootstraps_total{source="%s"}'


@pytest.mark.parametrize("late", [router, indexer])
def test_whoever_starts_late_begins_with_what_a_router_knows(
    tmp_path: Path, late: Callable[..., AbstractContextManager[Ports]]
) -> None:
    """A second router predicts what the first does, an indexer holds it, though the engine has forgotten."""
    with fake_pods(1) as (pod,), EnginePublisher(history=2) as engine:
        path = followed(tmp_path / "pods.yaml", pod, engine)
        with router(path) as first:
            wait_until("the first follows", lambda: first.metric(BUILT % "replay") == 1)
            publish(engine)
            wait_until("the first predicts", lambda: cached_tokens(first) == 16 * BLOCKS)
            with late(path, "--peer", first.peer) as second:
                wait_until("it has a view", lambda: second.metric(BUILT % "peer") == 1)
                assert second.metric("kvroute_indexer_holdings") == BLOCKS
                told = 'kvroute_indexer_told_snapshots_total{outcome="completed"}'
                wait_until("the first has told all", lambda: first.metric(told) == 1)
                if late is router:
                    wait_until("the second predicts", lambda: cached_tokens(second) == 16 * BLOCKS)


def test_peers_without_a_common_seed_do_not_start(tmp_path: Path) -> None:
    """Random seeds have nothing in common: that is said at the start, in one line, with the flag to give."""
    path = tmp_path / "pods.yaml"
    path.write_text("endpoints: []\n")
    code, said = run("--pods-file", str(path), *FREE_PORTS, "--peer", "router:9002")
    assert (code, said.count("\n")) == (2, 1)
    assert "--hash-seed" in said


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--peer", "router"), "HOST:PORT"),
        (("--peer", "router:0"), "HOST:PORT"),
        (("--peer", "router:9002", "--peer-cert", "tls.crt"), "peer_key"),
        (("--peer", "router:9002", "--peer-ca", "missing.crt"), "missing.crt"),
    ],
)
def test_what_peers_cannot_be_is_said(tmp_path: Path, argv: tuple[str, ...], complaint: str) -> None:
    """Each wrong setting stops the start with exit code 2 and a line that names it."""
    path = tmp_path / "pods.yaml"
    path.write_text("endpoints: []\n")
    code, said = run("--pods-file", str(path), *FREE_PORTS, *SEED, *argv)
    assert (code, said.count("\n")) == (2, 1)
    assert complaint in said
