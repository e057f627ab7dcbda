"""A model server that computes nothing: what is measured in front of it is the gateway alone.

`python -m benchmarks.fake_pod PORT`; speaks just enough HTTP/1.1 for Envoy and the router's probes.
"""

from __future__ import annotations

import asyncio
import json
import sys

_ANSWERS = {
    "/v1/models": {
        "object": "list",
        "data": [{"id": "kvroute-tiny", "object": "model", "max_model_len": 8192}],
    },
    "/v1/chat/completions": {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    },
}


async def main(port: int) -> None:
    """Serves until it is killed."""
    server = await asyncio.start_server(_serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            await _skip_body(head.lower(), reader)
            body = json.dumps(_ANSWERS.get(head.split(b" ", 2)[1].decode(), {})).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _skip_body(head: bytes, reader: asyncio.StreamReader) -> None:
    if b"transfer-encoding: chunked" in head:
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    elif b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
