"""Model servers that compute nothing, so that only the gateway is measured.

`python -m benchmarks.fake_pod FIRST_PORT COUNT [HOST...]`: one process on COUNT ports of each host (default:
127.0.0.1), with just enough HTTP/1.1 for Envoy, other routers and probes. A streamed chat gets `max_tokens`
events, one per write; the stream's duration does not depend on their number.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import uvloop

CHUNKS, CHUNKS_FEW = 32, 2
"""Number of events of a long and of a short stream."""
MODEL = "bench-model"
MAX_MODEL_LEN = 1_048_576


def model_directory(bodies: Path) -> Path:
    """Return the folder of the tokenizer next to a file of bodies, named like the served model."""
    return bodies.with_name(MODEL)


_CHAT = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_EVENT = {"id": "chatcmpl-0", "model": MODEL, "choices": [{"index": 0, "delta": {"content": "yes "}}]}
_METRICS = b"""vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_running{engine="0"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.1
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000000"} 1.0
"""


def _answer(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, content_type, len(body)) + body


def _json(value: object) -> bytes:
    return _answer(json.dumps(value).encode())


_PAGES = {
    b"/v1/models": _json(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": MAX_MODEL_LEN}]}
    ),
    b"/v1/chat/completions": _json(_CHAT),
    b"/metrics": _answer(_METRICS, b"text/plain"),
    b"/health": _json({}),
    b"/get_server_info": _json({"model_path": MODEL, "tp_size": 1, "dp_size": 1}),
    b"/get_model_info": _json({"model_path": MODEL, "is_generation": True}),
}
_NOT_FOUND = _answer(b"{}", status=b"404 Not Found")
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TICK_S = 0.001
# Fields of a body, with the clients' whitespace and with that of pickers that rewrite bodies.
_STREAMED = (b'"stream": true', b'"stream":true')
_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_LAST_CHUNK = b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_STREAM_EVENT = _chunk(b"data: " + json.dumps(_EVENT).encode() + b"\n\n")
_STREAM_DONE = _chunk(b"data: [DONE]\n\n")


class _Pod(asyncio.Protocol):
    """One connection; requests are answered in order."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := _request_end(self._received)) > 0:
            request = bytes(self._received[:end])
            del self._received[:end]
            self._serve(request)

    def _serve(self, request: bytes) -> None:
        path = request.split(b" ", 2)[1].partition(b"?")[0]
        if path.endswith(b"/completions") and any(sign in request for sign in _STREAMED):
            self._transport.write(_STREAM_HEAD)
            asked = _MAX_TOKENS.search(request)
            self._stream(CHUNKS, max(1, CHUNKS // int(asked[1])) if asked else 1)
        else:
            self._transport.write(_PAGES.get(path, _NOT_FOUND))

    def _stream(self, left: int, ticks: int) -> None:
        # One event every few iterations of the loop, so that the gateway receives them one by one.
        if left:
            if left % ticks == 0:
                self._transport.write(_STREAM_EVENT)
            asyncio.get_running_loop().call_later(_TICK_S, self._stream, left - 1, ticks)
        else:
            self._transport.write(_STREAM_DONE + _LAST_CHUNK)


def _request_end(received: bytearray) -> int:
    """Return the offset at which the first request ends; 0 while it is incomplete."""
    head_end = received.find(b"\r\n\r\n") + 4
    if head_end < 4:
        return 0
    head = bytes(received[:head_end]).lower()
    _, found, rest = head.partition(b"\r\ncontent-length: ")
    if found:
        end = head_end + int(rest.split(b"\r\n", 1)[0])
        return end if len(received) >= end else 0
    if b"\r\ntransfer-encoding: chunked" in head:
        # No body here contains the bytes of a last chunk.
        return received.find(_LAST_CHUNK, head_end - 2) + 5 if received.endswith(_LAST_CHUNK) else 0
    return head_end


async def main(first_port: int, count: int, hosts: Sequence[str]) -> None:
    """Serve until the process is killed."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(_Pod, host, port)
        for host in hosts
        for port in range(first_port, first_port + count)
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or ("127.0.0.1",)))
