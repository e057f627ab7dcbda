"""The host tier behind Envoy: blocks that left a pod's device memory are predicted, priced and served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from kvroute.envoy_config import POD_HEADER
from kvroute.stack import await_events
from tests.support.kvroute.stack import RunningStack, running_stack

GPU_BLOCKS, CPU_BLOCKS, BLOCK_TOKENS = 64, 256, 16


SCORER = {
    "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
    "kind": "EndpointPickerConfig",
    "plugins": [
        {
            "type": "precise-prefix-cache-producer",
            "parameters": {"indexerConfig": {"kvCacheBackendConfigs": [{"name": "cpu", "weight": 0.5}]}},
        },
        {"type": "prefix-cache-scorer"},
    ],
    "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "prefix-cache-scorer"}]}],
}


@contextmanager
def stack(directory: Path, *router_flags: str) -> Iterator[RunningStack]:
    """Run two model servers with 1,024 tokens on the device and four times as many on the host."""
    sizes = {"gpu_blocks": GPU_BLOCKS, "cpu_blocks": CPU_BLOCKS}
    with running_stack(directory, *router_flags, **sizes) as running:
        yield running


def complete(client: OpenAI, prompt: str) -> tuple[str, str, int, int]:
    """Send a prompt; return its request id, pod, and prompt and cached tokens."""
    raw = client.completions.with_raw_response.create(
        model="kvroute-tiny", prompt=prompt, max_tokens=1, temperature=0
    )
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return raw.headers["x-request-id"], raw.headers[POD_HEADER], usage.prompt_tokens, cached


def host_hit(stack: RunningStack) -> dict[str, Any]:
    """Send a prompt, evict it from its pod's device memory, send it again; return the decision about it."""
    client = stack.openai()
    prompt = "All that was told of the harbour. " * 14
    _, pod, length, cached = complete(client, prompt)
    assert cached == 0
    pods: list[str] = []
    while pods.count(pod) * length < GPU_BLOCKS * BLOCK_TOKENS:
        pods.append(complete(client, f"Story {len(pods)} of another coast. " * 16)[1])
    await_events(stack.plan)
    request_id, again, _, cached = complete(client, prompt)
    decision = stack.decision(request_id)
    assert again == decision["pod"] == pod
    assert cached == decision["predicted_cached_tokens"] == decision["best_cached_tokens"] > 0
    assert decision["candidates"][0]["cached_tokens_by_tier"] == {"cpu": cached}
    assert stack.metric("vllm:external_prefix_cache_hits_total", stack.plan.pod_urls[pod]) == cached
    return decision


def test_cost_of_a_host_hit(tmp_path: Path) -> None:
    """A prompt evicted to the host goes to its pod, with the copy in its cost, and is served as predicted."""
    with stack(tmp_path) as running:
        decision = host_hit(running)
    best, other = decision["candidates"]
    assert best["host_tokens"] == best["cached_tokens"] > 0
    assert 0 < best["copy_s"] < other["own_prefill_s"]
    assert other["copy_s"] == other["host_tokens"] == 0


def test_score_of_a_host_hit(tmp_path: Path) -> None:
    """The prefix scorer multiplies blocks on the host by the weight of their tier."""
    config = tmp_path / "scorer.json"
    config.write_text(json.dumps(SCORER))
    with stack(tmp_path, "--config-file", str(config)) as running:
        decision = host_hit(running)
    best, other = decision["candidates"]
    matched = best["cached_tokens"] / (decision["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS)
    assert best["score"] == pytest.approx(0.5 * matched)
    assert other["score"] == 0
