"""Streams on the wire: slow readers, reused connections, pipelined requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from model_server.openai.http_server import ModelServerProtocol
from tests.support.model_server.http import DEADLINE_S, RunningServer, running_server, wait_until

CHAT = "/v1/chat/completions"
LONG_TOKENS = 600
SMALL_BYTES = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server for all tests of this module."""
    with running_server() as running:
        yield running


def body(tokens: int, **fields: object) -> bytes:
    """Return a streamed chat request with this many tokens."""
    asked = {"messages": [{"role": "user", "content": "go"}], "max_tokens": tokens, "temperature": 0}
    return msgspec.json.encode({**asked, "ignore_eos": True, "stream": True, **fields})


def head(raw: bytes) -> bytes:
    """Return the request head of this body."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(raw)
    )


def connect(server: RunningServer, receive_bytes: int | None = None) -> socket.socket:
    """Return a raw connection, optionally with a small receive window."""
    connection = socket.socket()
    connection.settimeout(DEADLINE_S)
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    return connection


def answer(connection: socket.socket) -> bytes:
    """Return the body of the next response."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    return response.read()


def chunks(events: bytes) -> list[Any]:
    """Return the events of a whole stream."""
    *pieces, done, rest = events.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]


def said(events: bytes) -> str:
    """Return the text of a whole stream."""
    choices = [choice for chunk in chunks(events) for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[ModelServerProtocol]:
    """Return a list of the connections whose writes paused; kernel buffers are small."""
    paused = []

    def connection_made(protocol: ModelServerProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
        made(protocol, transport)

    def pause_writing(protocol: ModelServerProtocol) -> None:
        paused.append(protocol)
        pause(protocol)

    made, pause = ModelServerProtocol.connection_made, ModelServerProtocol.pause_writing
    monkeypatch.setattr(ModelServerProtocol, "connection_made", connection_made)
    monkeypatch.setattr(ModelServerProtocol, "pause_writing", pause_writing)
    return paused


def test_a_client_that_reads_late_gets_every_token(
    server: RunningServer, pauses: list[ModelServerProtocol]
) -> None:
    """While nobody reads, the engine finishes; then all buffered events arrive in order, once."""
    raw = body(LONG_TOKENS, logprobs=True)
    with connect(server, SMALL_BYTES) as connection:
        connection.sendall(head(raw) + raw)
        wait_until(lambda: bool(pauses))
        wait_until(server.idle)
        late = answer(connection)
    with connect(server) as connection:
        raw = body(LONG_TOKENS)
        connection.sendall(head(raw) + raw)
        prompt = answer(connection)
    choices = [chunk["choices"][0] for chunk in chunks(late)]
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == LONG_TOKENS
    assert said(late) == said(prompt)


def test_a_slow_reader_can_leave(server: RunningServer, pauses: list[ModelServerProtocol]) -> None:
    """A client that closes an unread stream ends its request."""
    before = server.engine.stats().generated_tokens
    raw = body(8_000)
    with connect(server, SMALL_BYTES) as connection:
        connection.sendall(head(raw) + raw)
        wait_until(lambda: bool(pauses))
    wait_until(server.idle)
    assert server.engine.stats().generated_tokens - before < 8_000


def test_a_connection_carries_one_stream_after_the_other(server: RunningServer) -> None:
    """After the end of a stream, the connection serves the next request."""
    with connect(server) as connection:
        texts = []
        for _ in range(3):
            raw = body(12)
            connection.sendall(head(raw) + raw)
            texts.append(said(answer(connection)))
    assert texts[0]
    assert len(set(texts)) == 1


def test_pipelined_streams_are_answered_in_turn(server: RunningServer) -> None:
    """Pipelined requests get whole streams in order."""
    lengths = [30, 3, 12]
    raws = [body(tokens, stream_options={"include_usage": True}) for tokens in lengths]
    received = b""
    with connect(server) as connection:
        connection.sendall(b"".join(head(raw) + raw for raw in raws))
        while received.count(b"data: [DONE]") < len(lengths):
            received += connection.recv(1 << 16)
    assert received.startswith(b"HTTP/1.1 200")
    assert list(map(int, re.findall(rb'"completion_tokens":(\d+)', received))) == lengths


def test_head_is_rejected_on_a_stream_route(server: RunningServer) -> None:
    """HEAD is rejected on a POST route, and the connection stays usable."""
    port = int(server.url.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("HEAD", CHAT)
        response = connection.getresponse()
        assert (response.status, response.read()) == (405, b"")
        connection.request("POST", CHAT, body(3))
        assert len(chunks(connection.getresponse().read())) > 1
    finally:
        connection.close()
