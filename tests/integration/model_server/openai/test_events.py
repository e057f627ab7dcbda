"""Effects of requests on the engine's cache, observed by KV events: disconnects, turns, resets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from model_server.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from tests.support.model_server.http import (
    MODEL,
    RunningServer,
    running_server,
    subscription,
    wait_until,
)

BLOCK_TOKENS = 16
END = b"\xff" * 8


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server for all tests of this module."""
    with running_server() as running:
        yield running


def replayed(client: zmq.Socket[bytes], start: int = 0) -> list[KVEventBatch]:
    """Return all batches from a sequence number on."""
    client.send_multipart([b"", struct.pack(">Q", start)])
    batches = []
    while True:
        _, _, sequence, payload = client.recv_multipart()
        if sequence == END:
            return batches
        batches.append(msgspec.msgpack.decode(payload, type=KVEventBatch))


def resident(batches: list[KVEventBatch]) -> dict[tuple[int, ...], int]:
    """Return the copies of each block, keyed by all tokens up to its end, from the events."""
    chains: dict[Any, tuple[int, ...]] = {None: ()}
    copies: dict[tuple[int, ...], int] = {}
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, BlockStored):
            parent = event.parent_block_hash
            for at, block_hash in enumerate(event.block_hashes):
                tokens = event.token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
                chains[block_hash] = (*chains[parent], *tokens)
                copies[chains[block_hash]] = copies.get(chains[block_hash], 0) + 1
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                copies[chains[block_hash]] -= 1
        else:
            copies.clear()
    return copies


def cached_by_events(server: RunningServer, prompt: list[int]) -> int:
    """Return the prompt tokens in announced blocks; an engine always computes the last token."""
    with subscription(server) as client:
        held = resident(replayed(client))
    end = 0
    while end + BLOCK_TOKENS <= len(prompt) - 1 and held.get(tuple(prompt[: end + BLOCK_TOKENS]), 0) > 0:
        end += BLOCK_TOKENS
    return end


def test_cached_tokens_of_a_turn_match_the_events(server: RunningServer) -> None:
    """On each turn `cached_tokens` equals what earlier events announced, and grows."""
    messages: list[Any] = [{"role": "system", "content": "You route requests by what caches hold. " * 4}]
    cached = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Turn {turn}: tell me about blocks and prefixes."})
        expected = cached_by_events(server, server.chat_ids(messages))
        answer = server.openai().chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
        cached.append(expected)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert cached == sorted(set(cached))


def test_a_salt_separates_caches(server: RunningServer) -> None:
    """A prompt under another cache_salt hits nothing; under the same salt it hits."""
    prompt = [7] * 64

    def cached(salt: str | None) -> int:
        body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        usage = server.post("/v1/completions", body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) for salt in (None, "a", "a", "b", None)] == [0, 0, 48, 0, 48]


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: RunningServer) -> None:
    """Closing an OpenAI stream ends the request in the engine."""
    before = server.metric("vllm:generation_tokens_total")
    stream = server.openai().completions.create(
        model=MODEL, prompt="endless", max_tokens=8_000, stream=True, extra_body={"ignore_eos": True}
    )
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    wait_until(server.idle)
    assert server.metric("vllm:generation_tokens_total") - before < 8_000


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting_frees_its_blocks(server: RunningServer, stream: bool) -> None:
    """A connection closed before the first byte of the answer ends the request, streamed or not."""
    body = msgspec.json.encode(
        {"prompt": "endless", "max_tokens": 8_000, "ignore_eos": True, "n": 3, "stream": stream}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        wait_until(lambda: server.engine.stats().running == 3)
    wait_until(server.idle)


def test_an_incomplete_body_starts_no_request(server: RunningServer) -> None:
    """A client that disconnects within its body starts nothing, and others are served."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"prompt":'
        )
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status == 200
    wait_until(server.idle)


def test_a_reset_is_announced_at_once(server: RunningServer) -> None:
    """Resetting the cache of an idle engine publishes AllBlocksCleared at once."""
    body = {"prompt": [9] * 40, "max_tokens": 1}
    server.post("/v1/completions", body)
    assert server.admin("POST", "/reset_prefix_cache").json() == {"success": True}
    with subscription(server) as client:
        assert isinstance(replayed(client)[-1].events[-1], AllBlocksCleared)
    usage = server.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_reset_waits_for_nobody(server: RunningServer) -> None:
    """While a request has blocks, a reset is rejected and publishes nothing."""
    stream = server.openai().completions.create(
        model=MODEL, prompt="busy", max_tokens=8_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert server.admin("POST", "/reset_prefix_cache").json() == {"success": False}
    stream.close()
    wait_until(server.idle)
