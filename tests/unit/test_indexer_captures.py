"""Ground truth: what a real vLLM 0.32 published and, for each request, what it then served from its cache.

The capture is of a tiny Llama with blocks of 32 tokens and a pool of 64: a cold start, exact repeats, shared
prefixes, salts, generated blocks, a re-announced prefix, a reset, evictions, concurrent twins and preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from indexer.decode import decode_batch
from indexer.events import EventBatch
from indexer.tiers import TierWeights
from tests.unit.indexer_support import OnePod, read_json, read_lines

ENGINE_BLOCK = 32
FRAMES = read_lines("vllm_run1_frames.jsonl.gz")
# Text and chat prompts are left out: their token ids are not in the capture.
REQUESTS = [
    line
    for line in read_lines("vllm_run1_requests.jsonl.gz")
    if line["kind"] == "request" and isinstance((line["body"] or {}).get("prompt"), list)
]


def batches() -> Iterator[tuple[float, EventBatch]]:
    """The batches with the time when they were received."""
    for frame in FRAMES:
        decoded = decode_batch(bytes.fromhex(frame["frames"][2]), 1 << 24)
        assert not decoded.rejected
        yield frame["t"], decoded.batch


def predicted(pod: OnePod, body: dict[str, Any]) -> int:
    """Tokens that the engine would serve from its cache: whole engine blocks, never the last token."""
    prompt = body["prompt"]
    held = pod.cached(prompt, salt=body.get("cache_salt")) * pod.hasher.block_tokens
    return min(held, len(prompt) - 1) // ENGINE_BLOCK * ENGINE_BLOCK


def delivered(request: dict[str, Any]) -> int:
    """Tokens that the engine did serve from its cache."""
    return request["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("block_tokens", [32, 16, 8])
def test_predictions_equal_what_vllm_served(block_tokens: int) -> None:
    """For each request, the prediction when it arrived is what the engine reports as cached tokens.

    Two cases are not to be known in advance. A reset is announced only with the next request's own events. Of
    concurrent twins one is computed first and the others hit its blocks: their truth lies at a moment between
    their start and end, and is looked for between all events of that time.
    """
    pod = OnePod(block_tokens=block_tokens)
    waiting = list(batches())
    exact = 0
    for request in REQUESTS:
        while waiting and waiting[0][0] < request["t0"]:
            assert not pod.view.apply(waiting.pop(0)[1]).skipped
        if predicted(pod, request["body"]) == delivered(request):
            exact += 1
            continue
        assert request["label"].startswith(("r16 after reset", "r25 conc", "r27 conc")), request["label"]
        assert delivered(request) in set(during(block_tokens, request))
    assert (exact, len(REQUESTS)) == (27, 30)


def during(block_tokens: int, request: dict[str, Any]) -> Iterator[int]:
    """The predictions after each event up to the request's end."""
    pod = OnePod(block_tokens=block_tokens)
    for received_s, batch in batches():
        for event in batch.events:
            if received_s > request["t1"]:
                return
            pod.apply(event)
            if received_s >= request["t0"]:
                yield predicted(pod, request["body"])


def test_the_index_ends_with_as_many_blocks_as_the_pool_can_hold() -> None:
    """After all evictions the index holds no more than the engine's 63 usable blocks, each once."""
    pod = OnePod(block_tokens=ENGINE_BLOCK)
    for _, batch in batches():
        assert not pod.view.apply(batch).skipped
        assert pod.index.stats().blocks <= 63
    assert pod.index.stats().blocks == 62
    assert pod.view.orphans == 0


def test_the_captured_batches_are_the_captured_events() -> None:
    """Our decoding of each frame agrees with the one that was recorded beside it."""
    for frame, (_, batch) in zip(FRAMES, batches(), strict=True):
        ts, events, rank = frame["payload"]
        assert (batch.ts, batch.data_parallel_rank) == (ts, rank)
        for event, recorded in zip(batch.events, events, strict=True):
            assert type(event).__name__ == recorded["type"]
            for name in set(recorded) & set(event.__struct_fields__):
                assert getattr(event, name) == recorded[name]


# Weighted blocks that each vector of llm-d's own behaviour must give here; where llm-d itself differs, why.
LLMD_SCORES = {
    "vllm-stored-min-5-fields": 2,
    "vllm-stored-bytes-hash-32B": 2,
    "vllm-parent-missing-dropped": 0,
    "vllm-dp-rank-ignored": 1,
    "cpu-offload-then-gpu-remove": 1.6,
    "cpu-offload-unknown-engine-key": 0,
    "remove-default-tier-gpu": 0.8,
    "clear-pod-all-tiers": 0,
    "extra-trailing-fields-ignored": 1,
    "batch-ts-int": 1,
    "batch-dp-rank-nil": 1,
    "sglang-stored-5-fields": 2,
    "vllm-lora-name": 1,
    # llm-d: none, for it drops the whole batch.
    "one-bad-event-drops-whole-batch": 1,
    "batch-two-fields-no-dp-rank": 1,
    # llm-d: none, for it takes the adapter's name for an image.
    "vllm-lora-name-plus-extra-key-string": 1,
    # llm-d: 1, for an unknown tier outranks host memory.
    "tier-arbitrary-string-lowercased": 0.8,
    "sglang-stored-medium": 0.8,
    # llm-d: 1, a false hit of the base model on an adapter's blocks.
    "sglang-stored-lora-id-only": 0,
    "vllm-cache-salt-in-extra-keys": 0,
}


@pytest.mark.parametrize("name", LLMD_SCORES)
def test_llmds_vectors_score_as_they_should(name: str) -> None:
    """The recorded cases of llm-d give its scores, except where its own are known to be wrong."""
    vector = next(vector for vector in read_json("llmd_event_vectors.json.gz") if vector["id"] == name)
    pod = OnePod(block_tokens=vector["block_size"])
    for message in vector["messages"]:
        pod.view.apply(decode_batch(bytes.fromhex(message["payload_hex"]), 1 << 20).batch)
    lora = vector["query_model"] if "lora-name" in name else None
    tiers = pod.tiers(vector["query_tokens"], lora=lora)
    assert TierWeights({"gpu": 1.0, "cpu": 0.8}).sum(tiers) == pytest.approx(LLMD_SCORES[name])
