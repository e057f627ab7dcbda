"""Ground truth: events that a real vLLM 0.32 published, and the cached tokens that it reported per request.

The capture is of a tiny Llama with blocks of 32 tokens and a pool of 64: a cold start, exact repeats, shared
prefixes, salts, generated blocks, a re-announced prefix, a reset, evictions, concurrent twins and preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.indexer.decoding import EventBatch, decode_batch
from tests.support.indexer.plain_view import apply_batch
from tests.support.indexer.views import OnePod, read_lines

ENGINE_BLOCK = 32
# Requests whose hit cannot be known when they arrive, see below.
UNKNOWABLE = ("r16 after reset", "r25 conc", "r27 conc")
FRAMES = read_lines("vllm_run1_frames.jsonl.gz")
# Text and chat prompts are left out: their token ids are not in the capture.
REQUESTS = [
    line
    for line in read_lines("vllm_run1_requests.jsonl.gz")
    if line["kind"] == "request" and isinstance((line["body"] or {}).get("prompt"), list)
]


def batches() -> Iterator[tuple[float, EventBatch]]:
    """Yield the batches with the time at which they were received."""
    for frame in FRAMES:
        decoded = decode_batch(bytes.fromhex(frame["frames"][2]), 1 << 24)
        assert not decoded.rejected
        yield frame["t"], decoded.batch


def predicted(pod: OnePod, body: dict[str, Any]) -> int:
    """Return the tokens that the engine would serve from its cache: whole blocks, not the last token."""
    prompt = body["prompt"]
    held = pod.cached(prompt, salt=body.get("cache_salt")) * pod.hasher.block_tokens
    return min(held, len(prompt) - 1) // ENGINE_BLOCK * ENGINE_BLOCK


def delivered(request: dict[str, Any]) -> int:
    """Return the tokens that the engine did serve from its cache."""
    return request["response"]["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("block_tokens", [32, 16, 8])
def test_predictions_equal_what_vllm_served(block_tokens: int) -> None:
    """The prediction at a request's arrival equals the cached tokens that the engine reports.

    Two cases cannot be known in advance. A reset is published only with the next request's events. Of
    concurrent twins one is computed first and the others hit its blocks; their prediction must match at some
    point between their start and end.
    """
    pod = OnePod(block_tokens=block_tokens)
    waiting = list(batches())
    exact = 0
    for request in REQUESTS:
        while waiting and waiting[0][0] < request["t0"]:
            assert not apply_batch(pod.view, waiting.pop(0)[1]).skipped
        if predicted(pod, request["body"]) == delivered(request):
            exact += 1
            continue
        assert request["label"].startswith(UNKNOWABLE), request["label"]
        assert delivered(request) in set(during(block_tokens, request))
    assert (exact, len(REQUESTS)) == (27, 30)


@pytest.mark.parametrize("block_tokens", [64, 128])
def test_predictions_in_longer_blocks_are_what_vllm_served_of_them(block_tokens: int) -> None:
    """With index blocks of 2 or 4 engine blocks, the prediction is what was served, in whole blocks."""
    pod = OnePod(block_tokens=block_tokens)
    waiting = list(batches())
    compared = 0
    for request in REQUESTS:
        while waiting and waiting[0][0] < request["t0"]:
            assert not apply_batch(pod.view, waiting.pop(0)[1]).skipped
        if request["label"].startswith(UNKNOWABLE):
            continue
        prompt = request["body"]["prompt"]
        held = pod.cached(prompt, salt=request["body"].get("cache_salt")) * block_tokens
        served = delivered(request) // block_tokens * block_tokens
        assert min(held, len(prompt) - 1) // block_tokens * block_tokens == served, request["label"]
        compared += 1
    assert compared == 27


def during(block_tokens: int, request: dict[str, Any]) -> Iterator[int]:
    """Yield the predictions after each event up to the request's end."""
    pod = OnePod(block_tokens=block_tokens)
    for received_s, batch in batches():
        for event in batch.events:
            if received_s > request["t1"]:
                return
            pod.apply(event)
            if received_s >= request["t0"]:
                yield predicted(pod, request["body"])


def test_the_index_ends_with_as_many_blocks_as_the_pool_can_hold() -> None:
    """After all evictions the index has exactly the engine's 63 usable blocks."""
    pod = OnePod(block_tokens=ENGINE_BLOCK)
    for _, batch in batches():
        assert not apply_batch(pod.view, batch).skipped
        assert pod.index.stats().blocks <= 63
    assert pod.index.stats().blocks == 62
    assert pod.view.orphans == 0


def test_the_captured_batches_are_the_captured_events() -> None:
    """Our decoding of each frame equals the events recorded beside it."""
    for frame, (_, batch) in zip(FRAMES, batches(), strict=True):
        ts, events, rank = frame["payload"]
        assert (batch.ts, batch.data_parallel_rank) == (ts, rank)
        for event, recorded in zip(batch.events, events, strict=True):
            assert type(event).__name__ == recorded["type"]
            for name in set(recorded) & set(event.__struct_fields__):
                assert getattr(event, name) == recorded[name]
