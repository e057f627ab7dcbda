"""`kvroute explain` in front of real model servers: what it says equals the pick that follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

from kvroute.envoy_config import POD_HEADER
from tests.support.kvroute.stack import RunningStack, running_stack, wait_until

TEXT = "The cache of each server holds what it has computed. " * 30
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
}
SAME = (
    "pod",
    "prompt_tokens",
    "predicted_cached_tokens",
    "degraded",
    "tokens_by_cause",
    "best_cached_tokens",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Provide a stack of two model servers."""
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def explain(stack: RunningStack, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command against the stack's router."""
    run = "import sys; from kvroute.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "explain", "--router-url", stack.plan.router_debug_url]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
    )


def send(stack: RunningStack, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Send a request through Envoy; return its id and the pod that served it."""
    answer = urllib3.request("POST", stack.plan.gateway_url + path, json=body, timeout=60.0)
    assert answer.status == 200, answer.data
    return answer.headers["x-request-id"], answer.headers[POD_HEADER]


@pytest.mark.parametrize("path", APIS)
def test_the_explained_pick_is_the_next_one(stack: RunningStack, tmp_path: Path, path: str) -> None:
    """A repeated prompt is explained with the pod and the cached tokens of the pick that follows."""
    body = {"model": stack.plan.model_name, **APIS[path]}
    send(stack, path, body)
    wait_until("all events", lambda: stack.unread_batches() == 0)
    file = tmp_path / "body.json"
    file.write_text(json.dumps(body))
    before = stack.metric("kvroute_router_picks_total")
    found = [explain(stack, "--messages", str(file), "--path", path, "--json") for _ in range(2)]
    assert [one.returncode for one in found] == [0, 0], found[0].stderr
    explained = json.loads(found[0].stdout)
    assert stack.metric("kvroute_router_picks_total") == before
    assert stack.metric("kvroute_indexer_speculative_entries") == 0
    request_id, served = send(stack, path, body)
    picked = stack.decision(request_id)
    assert {name: explained[name] for name in SAME} == {name: picked[name] for name in SAME}
    assert served == explained["pod"]
    assert explained["predicted_cached_tokens"] > 0


def test_a_routed_request_is_explained_by_its_id(stack: RunningStack) -> None:
    """The text for a request id names pod, reason, delivered tokens and each candidate with its seconds."""
    request_id, served = send(stack, "/v1/completions", {"model": stack.plan.model_name, "prompt": TEXT})
    wait_until("its end", lambda: stack.decision(request_id)["delivered_cached_tokens"] is not None)
    told = explain(stack, "--request-id", request_id)
    assert told.returncode == 0, told.stderr
    assert ["pod", served] in [line.split()[:2] for line in told.stdout.splitlines()]
    assert f"delivered {stack.decision(request_id)['delivered_cached_tokens']}" in told.stdout.replace(
        ",", ""
    )
    for pod in stack.plan.pod_urls:
        assert any(line[2:].startswith(pod) for line in told.stdout.splitlines())
    assert "\x1b" not in told.stdout


def test_the_only_model_needs_no_name(stack: RunningStack) -> None:
    """A prompt without a model is explained for the router's only model."""
    told = explain(stack, "--prompt", "Hello", "--json")
    assert json.loads(told.stdout)["model"] == stack.plan.model_name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--request-id", "never\x1b[31m"], "no record of request never?[31m"),
        (["--prompt", "x", "--model", "other"], "does not exist"),
        (["--messages", "/no/such/file"], "/no/such/file"),
        (["--prompt", "x", "--router-url", "http://127.0.0.1:9"], "127.0.0.1:9"),
    ],
)
def test_an_error_is_one_line_that_names_the_problem(
    stack: RunningStack, arguments: list[str], told: str
) -> None:
    """What cannot be explained ends with status 1 and one line on standard error."""
    failed = explain(stack, *arguments)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert told in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
