"""POST /debug/explain of a whole router: what it accepts, bounds and leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import urllib3
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc

from router.app.server import RouterServer
from tests.support.router.bench import TINY
from tests.support.router.doors import body, headers, set_headers, wait_until
from tests.support.router.server import fake_pods, get, ready_pods, running_router, write_pods

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello " * 40}]},
    "/v1/completions": {"prompt": "Hello " * 40},
    "/v1/responses": {"input": "Hello " * 40},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 9},
}
REWRITE = """\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: r}
spec: {rules: [{matches: [{model: {value: alias}}], targets: [{modelRewrite: kvroute-tiny}]}]}
"""


def post(router: RouterServer, data: bytes) -> tuple[int, dict[str, Any]]:
    """Post a body to the page."""
    url = f"http://127.0.0.1:{router.ports['metrics']}/debug/explain"
    response = urllib3.request("POST", url, body=data, retries=False)
    is_json = response.headers["content-type"] == "application/json"
    return response.status, json.loads(response.data) if is_json else {}


def explain(
    router: RouterServer, path: str, asked: dict[str, Any], **more: Any
) -> tuple[int, dict[str, Any]]:
    """Ask the page about a request."""
    return post(router, json.dumps({"path": path, "body": asked, **more}).encode())


def counted(router: RouterServer) -> list[str]:
    """Return the samples of the metrics that picks change."""
    lines = get(router, "/metrics")[1].decode().splitlines()
    of_picks = (
        "llm_d_epp_request",
        "llm_d_epp_scheduler",
        "llm_d_epp_kv_cache_index_lookup",
        "kvroute_router_p",
    )
    ours = (line for line in lines if line.startswith(of_picks))
    return [line for line in ours if "scrape_age" not in line]


@pytest.mark.parametrize("path", PATHS)
def test_each_api_is_explained_as_it_is_picked(tmp_path: Path, path: str) -> None:
    """The page parses a body as ext_proc does: same prompt tokens and pod, without a record or a count."""
    asked = {"model": TINY, **PATHS[path]}
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "p.yaml", [pod.address])) as router:
        wait_until(lambda: len(ready_pods(router)) == 1, "the pod")
        before = counted(router)
        status, record = explain(router, path, asked)
        assert status == 200
        assert counted(router) == before
        assert json.loads(get(router, "/debug/decisions")[1]) == {"decisions": []}
        with grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel:
            messages = [headers(path=path, x_request_id="real"), body(json.dumps(asked).encode())]
            first, *_ = pb_grpc.ExternalProcessorStub(channel).Process(iter(messages), timeout=300)
        (picked,) = json.loads(get(router, "/debug/decisions?request_id=real")[1])["decisions"]
        assert set_headers(first)["x-gateway-destination-endpoint"] == record["pod"] == pod.address
        for field in ("kind", "model", "pod", "prompt_tokens", "degraded", "tokens_by_cause", "reason"):
            assert record[field] == picked[field]


def test_a_degraded_pick_is_said(tmp_path: Path) -> None:
    """A path whose bodies are not read is explained by load alone, and the record says why."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "p.yaml", [pod.address])) as router:
        wait_until(lambda: len(ready_pods(router)) == 1, "the pod")
        status, record = explain(router, "/v1/embeddings", {"model": TINY, "input": "x"})
        assert (status, record["degraded"]) == (200, "passthrough")


def test_a_configured_rewrite_applies(tmp_path: Path) -> None:
    """A model that the configuration rewrites is explained under its new name."""
    (tmp_path / "rewrites.yaml").write_text(REWRITE)
    settings = {"compat": "answers", "resources_file": tmp_path / "rewrites.yaml"}
    with (
        fake_pods(1) as (pod,),
        running_router(write_pods(tmp_path / "p.yaml", [pod.address]), **settings) as router,
    ):
        wait_until(lambda: len(ready_pods(router)) == 1, "the pod")
        assert explain(router, "/v1/completions", {"model": "alias", "prompt": "x"})[1]["model"] == TINY


def test_bad_requests_have_an_error_that_names_the_problem(tmp_path: Path) -> None:
    """Broken JSON, missing fields, unknown models and pools, other methods and large bodies are rejected."""
    with fake_pods(1) as (pod,), running_router(write_pods(tmp_path / "p.yaml", [pod.address])) as router:
        wait_until(lambda: len(ready_pods(router)) == 1, "the pod")
        assert post(router, b"{")[0] == 400
        assert post(router, b"{}")[1]["error"].endswith("required field `body`")
        assert explain(router, "/v1/completions", {"prompt": "x"})[0] == 400
        assert explain(router, "/v1/completions", {"model": "other", "prompt": "x"})[0] == 404
        assert "pool" in explain(router, "/v1/completions", {"model": TINY}, pool="other")[1]["error"]
        assert get(router, "/debug/explain")[0] == 405
        assert post(router, b" " * (1 << 20 | 1))[0] == 413
        assert explain(router, "/v1/completions", {"model": TINY, "prompt": "x" * 900_000})[0] == 200
