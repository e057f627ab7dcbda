"""`kvroute doctor` before real engines, routers and Envoys, each with a fault set up by hand."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvroute.cli import main
from tests.support.kvroute.faults import (
    RunningEngine,
    RunningRouter,
    drafting_metrics,
    longer_template,
    other_ids,
    running_engines,
    running_gateway,
    running_router_before,
)
from tests.support.kvroute.stack import wait_until
from tests.support.loopback import free_port

Doctor = Callable[..., tuple[int, list[dict[str, str]]]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningEngine]]:
    """Run two healthy engines, one that caches nothing, and one with odd blocks and no events."""
    faults = (), (), ("--no-enable-prefix-caching",), ("--block-size", "24", "--no-kv-events")
    with running_engines(tmp_path_factory.mktemp("engines"), *faults) as running:
        yield running


@pytest.fixture(scope="module")
def router(engines: list[RunningEngine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """Run a router before the healthy engines."""
    with running_router_before(tmp_path_factory.mktemp("router"), engines[:2]) as running:
        yield running


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Provide the command: returns its exit status and findings."""

    def run(*flags: str) -> tuple[int, list[dict[str, str]]]:
        status = main(["doctor", "--json", "--stream-s", "0.5", *flags])
        page = json.loads(capsys.readouterr().out)
        assert page["status"] == status
        return status, page["findings"]

    return run


def found(findings: list[dict[str, str]], check: str, status: str = "fail") -> dict[str, str]:
    """Return the first finding of a check with that status."""
    matching = [each for each in findings if (each["check"], each["status"]) == (check, status)]
    assert matching, findings
    return matching[0]


def test_a_healthy_stack_has_no_failure(
    doctor: Doctor, router: RunningRouter, engines: list[RunningEngine], tmp_path: Path
) -> None:
    """Without a fault every check passes, and the exit status is 0."""
    with running_gateway(tmp_path, router) as gateway:
        status, findings = doctor(*router.flags, *gateway)
    assert (status, [each for each in findings if each["status"] in ("fail", "warn")]) == (0, [])
    passed = {each["check"] for each in findings if each["status"] == "ok"}
    assert passed >= {"router", "grpc", "engine", "model", "block_size", "caching", "events", "replay"}
    assert passed >= {"drafter", "gateway", "picks", "tokens", "body", "stream", "envoy", "clock", "view"}


def test_wrong_block_size(doctor: Doctor, engines: list[RunningEngine]) -> None:
    """Engine blocks that are no multiple of the router's fail, with the flags of both."""
    status, findings = doctor("--engine", engines[3].flag)
    finding = found(findings, "block_size")
    assert status == 1
    assert "24 tokens are no multiple of the router's 16" in finding["what"]
    assert "--block-tokens 24, or vLLM with --block-size 16" in finding["remedy"]


def test_events_off(doctor: Doctor, engines: list[RunningEngine]) -> None:
    """An engine without KV events fails, with the flag that publishes them at the declared port."""
    status, findings = doctor("--engine", engines[3].flag)
    assert status == 1
    assert f'"endpoint": "tcp://*:{engines[3].events}"' in found(findings, "events")["remedy"]
    assert "--kv-events-config" in found(findings, "events")["remedy"]


def test_caching_off(doctor: Doctor, engines: list[RunningEngine]) -> None:
    """An engine without a prefix cache fails, with the flag that switches it on."""
    status, findings = doctor("--engine", engines[2].flag)
    assert status == 1
    assert "--enable-prefix-caching" in found(findings, "caching")["remedy"]


def test_unreachable_replay(doctor: Doctor, engines: list[RunningEngine]) -> None:
    """A replay port at which nothing listens fails, with the setting that opens one."""
    declared = f"{engines[0].address},events={engines[0].events},replay={free_port()}"
    status, findings = doctor("--engine", declared)
    assert status == 1
    assert "Connection refused" in found(findings, "replay")["what"]
    assert "replay_endpoint" in found(findings, "replay")["remedy"]


def test_asleep(doctor: Doctor, engines: list[RunningEngine]) -> None:
    """A sleeping engine fails, with the request that wakes it, and gets no request that would wait."""
    engines[2].post_admin("/sleep")
    try:
        status, findings = doctor("--engine", engines[2].flag)
    finally:
        engines[2].post_admin("/wake_up")
    assert status == 1
    assert "POST /wake_up" in found(findings, "asleep")["remedy"]
    assert "events" not in {each["check"] for each in findings}


def test_drafter(doctor: Doctor, engines: list[RunningEngine], tmp_path: Path) -> None:
    """A drafter that may cost a block of each hit is a warning, with the flags that lower the cost."""
    with drafting_metrics(engines[0]) as port:
        labels = {"kvroute.io/metrics-port": str(port)}
        with running_router_before(tmp_path / "router", engines[:1], labels=labels) as router:
            status, findings = doctor(*router.flags)
    assert status == 0
    finding = found(findings, "drafter", "warn")
    assert "drafter" in finding["what"]
    assert "--block-size" in finding["remedy"]
    assert "--speculative-config" in finding["remedy"]


def own_finding(findings: list[dict[str, str]]) -> bool:
    """Return whether the router's own finding of other tokens is among them, with its remedy."""
    return any(
        "token mismatch: pod=" in each["what"] and "--tokenizer" in each["remedy"] for each in findings
    )


@pytest.mark.parametrize(
    ("tokenizer", "sign"),
    [(other_ids, "the engine's events confirm"), (longer_template, "tokens for the router")],
)
def test_wrong_tokenizer(
    doctor: Doctor,
    engines: list[RunningEngine],
    tmp_path: Path,
    tokenizer: Callable[[Path], Path],
    sign: str,
) -> None:
    """Tokens that differ from the engine's, by number or by id alone, fail with the flag of the tokenizer."""
    flag = f"kvroute-tiny={tokenizer(tmp_path / 'tokenizer')}"
    with (
        running_router_before(tmp_path / "router", engines[:2], "--tokenizer", flag) as router,
        running_gateway(tmp_path / "envoy", router) as gateway,
    ):
        status, findings = doctor(*router.flags, *gateway)
        # The router finds it, too, once it has seen enough prompts and their blocks.
        wait_until("the router's own finding", lambda: own_finding(doctor(*router.flags, *gateway)[1]))
    assert status == 1
    assert sign in found(findings, "tokens")["what"]
    assert "--tokenizer kvroute-tiny=DIRECTORY" in found(findings, "tokens")["remedy"]


def test_hung_router(doctor: Doctor, router: RunningRouter) -> None:
    """A router that accepts connections and answers nothing fails on both ports, with what to keep of it."""
    os.kill(router.pid, signal.SIGSTOP)
    try:
        status, findings = doctor(*router.flags)
    finally:
        os.kill(router.pid, signal.SIGCONT)
    assert status == 1
    for check in ("router", "grpc"):
        assert "the process hangs" in found(findings, check)["remedy"]


def test_a_gateway_that_ignores_picks(
    doctor: Doctor, router: RunningRouter, engines: list[RunningEngine], tmp_path: Path
) -> None:
    """Requests served by another pod than the picked one fail, with the fields that make Envoy follow."""

    def ignore(config: dict[str, Any]) -> None:
        gateway = config["static_resources"]["listeners"][0]
        hosts = gateway["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        for route in hosts[0]["routes"]:
            if "route" in route:
                route["route"] = {"cluster": "round_robin", "timeout": "0s"}

    with running_gateway(tmp_path, router, ignore, elsewhere=engines[2]) as gateway:
        status, findings = doctor(*router.flags, *gateway)
    assert status == 1
    assert "6 of 6 requests" in found(findings, "picks")["what"]
    assert "use_http_header" in found(findings, "picks")["remedy"]
    assert "endpointOverride" in found(findings, "picks")["remedy"]


def test_a_body_limit(doctor: Doctor, router: RunningRouter, tmp_path: Path) -> None:
    """A gateway that refuses 2 MiB and takes 1 MiB fails, with Envoy's and Envoy Gateway's fields."""

    def limit(config: dict[str, Any]) -> None:
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"][0]["typed_config"]["with_request_body"]["max_request_bytes"] = 3 << 19

    with running_gateway(tmp_path, router, limit) as gateway:
        status, findings = doctor(*router.flags, *gateway)
    assert status == 1
    assert found(findings, "body", "ok")["what"] == "1 MiB pass"
    assert "2 MiB: the gateway answered 413" in found(findings, "body")["what"]
    assert "with_request_body.max_request_bytes" in found(findings, "body")["remedy"]
    assert "spec.connection.bufferLimit" in found(findings, "body")["remedy"]


def test_a_gateway_that_asks_for_a_key(doctor: Doctor, router: RunningRouter, tmp_path: Path) -> None:
    """Requests to the gateway, and to it alone, have the key; without it the finding names its flag."""
    key = tmp_path / "key"
    key.write_text("secret\n")

    def guard(config: dict[str, Any]) -> None:
        gateway = config["static_resources"]["listeners"][0]
        hosts = gateway["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        for route in hosts[0]["routes"]:
            wanted = {"name": "authorization", "string_match": {"exact": "Bearer secret"}}
            route["match"].setdefault("headers", []).append(wanted)

    with running_gateway(tmp_path, router, guard) as gateway:
        status, findings = doctor(*router.flags, *gateway)
        assert status == 1
        assert "--api-key-file" in found(findings, "gateway")["remedy"]
        status, findings = doctor(*router.flags, *gateway, "--api-key-file", str(key))
    assert (status, [each for each in findings if each["status"] == "fail"]) == (0, [])
