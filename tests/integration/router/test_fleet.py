"""Tests of two complete routers with the same fake pods as peers: they share their load."""

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
from router.app.server import RouterServer
from router.app.tls import TlsOptions
from router.feedback.outcomes import ACCESS_LOG
from router.prompts.request import RequestKind, RouteRequest
from tests.support.loopback import HERE, free_port
from tests.support.redis_server import running_redis
from tests.support.router.bench import completion, ended, long_text
from tests.support.router.doors import wait_until
from tests.support.router.server import (
    METRICS,
    fake_pods,
    get,
    ready_pods,
    running_router,
    write_pods,
)
from tests.support.stubs import picker_stub

SEED = 7
# Engines with so many requests: the lost-end detection removes none of a test's, however long it takes.
BUSY = METRICS.replace('running{engine="0"} 0.0', 'running{engine="0"} 100.0')
# Settings of `IndexerConfig`; all others are of `RouterConfig`.
INDEX_SETTINGS = ("backend", "redis_url", "peer_ca")


@contextmanager
def two_pods(directory: Path) -> Iterator[Path]:
    """Run two fake pods; yield the pods file."""
    with fake_pods(2) as pods:
        for pod in pods:
            pod.metrics = BUSY
        yield write_pods(directory / "pods.yaml", [pod.address for pod in pods])


@contextmanager
def router(
    pods_file: Path, port: int, *peers: int, host: str = HERE, **settings: Any
) -> Iterator[RouterServer]:
    """Run a router on this port with peers on the ports `peers`."""
    index_settings = {name: settings.pop(name) for name in INDEX_SETTINGS if name in settings}
    index = IndexerConfig(
        bootstrap_s=0.5, hash_seed=SEED, peers=tuple(f"{host}:{peer}" for peer in peers), **index_settings
    )

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
    """Return the states of a router's peers."""
    return [peer["state"] for peer in peers_of(one)]


def peers_of(one: RouterServer) -> list[dict[str, Any]]:
    """Return a router's peers as its `/ready` page shows them."""
    _, page = get(one, "/ready")
    routers: list[dict[str, Any]] = json.loads(page)["routers"]
    return [peer for peer in routers if not peer["address"].startswith("[")]


def awaiting(one: RouterServer) -> int:
    """Return the requests awaiting a first token in this router's load table."""
    load_table = one.pods.load_table
    return sum(load_table.work(pod).awaiting for pod in one.pods.current)


def await_work(one: RouterServer, requests: int) -> None:
    """Wait until this many requests await a first token in a router's load table."""
    wait_until(lambda: awaiting(one) == requests, f"{requests} that wait")


def pick(one: RouterServer, request_id: str, prompt: str) -> str:
    """Return the pod that a router picks once both pods are ready."""
    wait_until(lambda: len(ready_pods(one)) == 2, "both pods")
    return one.router.route(completion(request_id, prompt), time.monotonic()).primary.pod


def test_each_router_counts_the_load_of_both(tmp_path: Path) -> None:
    """Long prompts that reach two routers in turn spread over both pods, as through one router."""
    with fleet(tmp_path) as (first, second):
        for number in range(3):
            here = pick(first, f"a{number}", long_text(400, number))
            await_work(second, 2 * number + 1)
            there = pick(second, f"b{number}", long_text(400, 100 + number))
            assert there != here
            await_work(first, 2 * number + 2)
        assert [peer["requests"] for peer in (*peers_of(first), *peers_of(second))] == [3, 3]
        assert len(first.lifecycle.ledger) == len(second.lifecycle.ledger) == 3


def test_a_peer_knows_where_responses_are_stored(tmp_path: Path) -> None:
    """A router learns from its peers which pod keeps a response, also what they knew before it joined."""
    ports = free_port(), free_port()
    with two_pods(tmp_path) as pods_file, router(pods_file, ports[0], *ports) as first:
        home, *_ = sorted(ready_pods(first))
        first.lifecycle.keeps_state("resp_early", home)
        with router(pods_file, ports[1], *ports) as second:
            wait_until(lambda: states(first) == states(second) == ["followed"], "each other")
            first.lifecycle.keeps_state("resp_late", home)
            known = second.lifecycle.states
            assert known is not None
            wait_until(lambda: len(known) == 2, "both responses")
            for state_id in ("resp_early", "resp_late"):
                body = {"input": "x", "previous_response_id": state_id}
                request = RouteRequest("r", RequestKind.RESPONSES, "kvroute-tiny", body, body_bytes=100)
                assert second.router.route(request, time.monotonic()).primary.pod == home


@pytest.mark.parametrize("is_shared", [False, True])
def test_burst_goes_to_one_pod_through_both_routers(tmp_path: Path, is_shared: bool) -> None:
    """A router predicts cache hits for a prompt that another router has just sent to a pod.

    This includes routers whose views are in Redis, which has no speculative entries.
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


def test_access_log_entry_is_forwarded_to_the_requests_router(tmp_path: Path) -> None:
    """An access log entry that reaches the other router ends the request at the router that has it."""
    with fleet(tmp_path) as (first, second):
        pod = pick(first, "a", "hello")
        await_work(second, 1)
        ended(second.lifecycle, "a", ACCESS_LOG, time.monotonic(), pod=pod)
        wait_until(lambda: len(first.lifecycle.ledger) == 0, "the end")
        await_work(second, 0)


def test_outcome_reported_to_the_other_router_counts(tmp_path: Path) -> None:
    """A gateway may report an outcome to any router; the reply says that the request is known."""
    with fleet(tmp_path) as (first, second):
        pod = pick(first, "a", "hello")
        await_work(second, 1)
        with grpc.insecure_channel(f"{HERE}:{second.ports['grpc']}") as channel:
            report = picker_stub(channel).ReportOutcome
            outcome = pb.ReportOutcomeRequest
            for event in (outcome.OUTCOME_FIRST_TOKEN, outcome.OUTCOME_DONE):
                reply = report(outcome(request_id="a", address=pod, outcome=event), timeout=60)
                assert reply.known
        wait_until(lambda: len(first.lifecycle.ledger) == 0, "the end")
        # The end is recorded shortly after the request has left the ledger.
        wait_until(lambda: (first.decision_log.find("a") or {}).get("end"), "the record of the end")
        record = first.decision_log.find("a")
        assert record is not None
        assert (record["prefill_end"]["source"], record["end"]["source"]) == ("report", "report")


def test_lost_router_is_reported_and_followed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lost router's requests no longer count; log, page and metrics show it; it is followed again later."""
    ports = free_port(), free_port()
    with two_pods(tmp_path) as pods_file, router(pods_file, ports[0], *ports) as first:
        with router(pods_file, ports[1], *ports) as second:
            wait_until(lambda: states(first) == ["followed"], "the second")
            pick(second, "a", "hello")
            await_work(first, 1)
            caplog.set_level(logging.WARNING)
        wait_until(lambda: states(first) == ["lost"], "its loss")
        assert awaiting(first) == 0
        assert "peer lost, its requests no longer count" in caplog.text
        assert "requests=1" in caplog.text
        _, page = get(first, "/metrics")
        assert b'kvroute_router_ledger_peers{state="lost"} 1.0' in page
        with router(pods_file, ports[1], *ports):
            wait_until(lambda: states(first) == ["followed"], "its return")


def test_router_without_peers_has_none(tmp_path: Path) -> None:
    """A router without `--peer` shows no peers."""
    with two_pods(tmp_path) as pods_file, router(pods_file, 0) as alone:
        pick(alone, "a", "hello")
        _, page = get(alone, "/metrics")
        assert peers_of(alone) == []
        assert b'kvroute_router_ledger_peers{state="followed"} 0.0' in page


def test_peers_connect_over_tls(tmp_path: Path) -> None:
    """Peers verify each other's certificate of a common authority on the gRPC port."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    ca = tmp_path / "ca.crt"
    authority.cert_pem.write_to_path(ca)
    issued.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    issued.private_key_pem.write_to_path(tmp_path / "tls.key")
    with fleet(tmp_path, host="localhost", peer_ca=ca, tls=TlsOptions(cert_dir=tmp_path)) as (first, second):
        pick(first, "a", "hello")
        await_work(second, 1)
