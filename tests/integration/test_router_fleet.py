"""Two whole routers over the same fake pods, each the other's peer, share the load in flight."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from indexer import IndexerConfig
from router._pb import endpoint_picker_pb2 as pb
from router._pb import endpoint_picker_pb2_grpc as pb_grpc
from router.app.server import RouterServer
from router.app.tls import TlsOptions
from router.feedback.lifecycle import ACCESS_LOG
from tests.contract.redis_server import running_redis
from tests.integration.router_server_support import (
    METRICS,
    fake_pods,
    get,
    ready_pods,
    running_router,
    write_pods,
)
from tests.loopback import HERE, free_port
from tests.unit.router_support import completion, long_text
from tests.wire.router_wire_support import wait_until

SEED = 7
# Reported request counts high enough that the engines' counts end none of ours.
BUSY = METRICS.replace('running{engine="0"} 0.0', 'running{engine="0"} 100.0')
# Settings of the index.
OF_INDEX = ("backend", "redis_url", "peer_ca")


@contextmanager
def two_pods(directory: Path) -> Iterator[Path]:
    """Run two fake pods; yield a pods file of them."""
    with fake_pods(2) as pods:
        for pod in pods:
            pod.metrics = BUSY
        yield write_pods(directory / "pods.yaml", [pod.address for pod in pods])


@contextmanager
def router(
    pods_file: Path, port: int, *peers: int, host: str = HERE, **settings: Any
) -> Iterator[RouterServer]:
    """Run a router on this port with peers on those ports."""
    of_index = {name: settings.pop(name) for name in OF_INDEX if name in settings}
    index = IndexerConfig(
        bootstrap_s=0.5, hash_seed=SEED, peers=tuple(f"{host}:{peer}" for peer in peers), **of_index
    )
    # Slow enough that no clock ends a prefill during a test, with load metrics that do not expire.
    slow = {"prefill_tokens_per_s": 1.0, "load_age_max_s": 3600.0}
    with running_router(pods_file, grpc_port=port, index=index, **slow, **settings) as running:
        wait_until(lambda: len(ready_pods(running)) == 2, "the pods")
        yield running


@contextmanager
def fleet(directory: Path, **settings: Any) -> Iterator[tuple[RouterServer, RouterServer]]:
    """Run two routers that follow each other."""
    ports = free_port(), free_port()
    with two_pods(directory) as pods_file, ExitStack() as running:
        first, second = (running.enter_context(router(pods_file, port, *ports, **settings)) for port in ports)
        wait_until(lambda: states(first) == states(second) == ["followed"], "each other")
        yield first, second


def states(one: RouterServer) -> list[str]:
    """Return the state of each peer as the router reports it."""
    return [peer["state"] for peer in shown(one)]


def shown(one: RouterServer) -> list[dict[str, Any]]:
    """Return a sample of the peers on the router's metrics page."""
    _, page = get(one, "/ready")
    routers: list[dict[str, Any]] = json.loads(page)["routers"]
    return [peer for peer in routers if not peer["address"].startswith("[")]


def awaiting(one: RouterServer) -> int:
    """Return the number of requests that await a first token in the router's load table."""
    board = one.pods.board
    return sum(board.work(pod).awaiting for pod in one.pods.snapshot())


def await_work(one: RouterServer, requests: int) -> None:
    """Wait until this many requests await their first token in a router's load table."""
    wait_until(lambda: awaiting(one) == requests, f"{requests} that wait")


def pick(one: RouterServer, request_id: str, prompt: str) -> str:
    """Return the pod that a router picks of two, however late a busy machine has probed them."""
    wait_until(lambda: len(ready_pods(one)) == 2, "both pods")
    return one.router.route(completion(request_id, prompt), time.monotonic()).primary.pod


def test_each_router_prices_with_the_work_of_both(tmp_path: Path) -> None:
    """Long prompts sent alternately to two routers are spread over both pods, as by one router."""
    with fleet(tmp_path) as (first, second):
        for number in range(3):
            here = pick(first, f"a{number}", long_text(400, number))
            await_work(second, 2 * number + 1)
            there = pick(second, f"b{number}", long_text(400, 100 + number))
            assert there != here
            await_work(first, 2 * number + 2)
        assert [peer["requests"] for peer in (*shown(first), *shown(second))] == [3, 3]
        assert first.requests_in_flight == second.requests_in_flight == 3


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_burst_sticks_to_one_pod_through_both(tmp_path: Path, is_shared: bool) -> None:
    """A prompt dispatched by one router counts as cached at its pod for the other router too.

    This holds for views in Redis as well, which store only reported blocks.
    """
    with ExitStack() as running:
        shared = {}
        if is_shared:
            shared = {"backend": "redis", "redis_url": running.enter_context(running_redis()).url}
        first, second = running.enter_context(fleet(tmp_path, **shared))
        prompt = long_text(400)
        here = pick(first, "a", prompt)
        await_work(second, 1)
        decision = second.router.route(completion("b", prompt + " more"), time.monotonic())
        cached = {candidate.pod: candidate.cached_tokens for candidate in decision.ranked}
        assert cached.pop(here) > 300
        assert set(cached.values()) == {0}


def test_an_access_log_that_reaches_the_other_router_ends_the_request(tmp_path: Path) -> None:
    """An access log entry that reaches only the other router ends the request."""
    with fleet(tmp_path) as (first, second):
        pod = pick(first, "a", "hello")
        await_work(second, 1)
        second.outcomes.ended("a", ACCESS_LOG, time.monotonic(), pod=pod)
        wait_until(lambda: first.requests_in_flight == 0, "the end")
        await_work(second, 0)


def test_an_outcome_that_is_reported_to_the_other_router_counts(tmp_path: Path) -> None:
    """An outcome may be reported to any router, which says that it knows the request."""
    with fleet(tmp_path) as (first, second):
        pod = pick(first, "a", "hello")
        await_work(second, 1)
        with grpc.insecure_channel(f"{HERE}:{second.ports['grpc']}") as channel:
            report = pb_grpc.EndpointPickerStub(channel).ReportOutcome
            outcome = pb.ReportOutcomeRequest
            for event in (outcome.OUTCOME_FIRST_TOKEN, outcome.OUTCOME_DONE):
                said = report(outcome(request_id="a", address=pod, outcome=event), timeout=60)
                assert said.known
        wait_until(lambda: first.requests_in_flight == 0, "the end")
        # The end is recorded a moment after the ledger's entry is removed.
        wait_until(lambda: (first.explain.one("a") or {}).get("end"), "the record of it")
        record = first.explain.one("a")
        assert record is not None
        assert (record["prefill_end"]["source"], record["end"]["source"]) == ("report", "report")


def test_a_stopped_routers_requests_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stopped peer has its requests removed and is reported as down; once back, it is followed again."""
    ports = free_port(), free_port()
    with two_pods(tmp_path) as pods_file, router(pods_file, ports[0], *ports) as first:
        with router(pods_file, ports[1], *ports) as second:
            wait_until(lambda: states(first) == ["followed"], "the second")
            pick(second, "a", "hello")
            await_work(first, 1)
            caplog.set_level(logging.WARNING)
        wait_until(lambda: states(first) == ["lost"], "its loss")
        assert awaiting(first) == 0
        assert "its 1 requests in flight count no longer" in caplog.text
        _, page = get(first, "/metrics")
        assert b'kvroute_router_ledger_peers{state="lost"} 1.0' in page
        with router(pods_file, ports[1], *ports):
            wait_until(lambda: states(first) == ["followed"], "its return")


def test_a_router_without_peers_follows_none(tmp_path: Path) -> None:
    """A router without peers follows none."""
    with two_pods(tmp_path) as pods_file, router(pods_file, 0) as alone:
        pick(alone, "a", "hello")
        _, page = get(alone, "/metrics")
        assert shown(alone) == []
        assert b'kvroute_router_ledger_peers{state="followed"} 0.0' in page


def test_peers_authenticate_by_tls(tmp_path: Path) -> None:
    """Peers authenticate by certificates of one authority, on the gateways' port."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    ca = tmp_path / "ca.crt"
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    with fleet(tmp_path, host="localhost", peer_ca=ca, tls=TlsOptions(cert_dir=tmp_path)) as (first, second):
        pick(first, "a", "hello")
        await_work(second, 1)
