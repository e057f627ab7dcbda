"""Clients that read streamed chats: `python -m benchmarks.stream_client PORT STREAMS TOKENS`.

Runs in a process of its own, so that the clients' CPU is not counted as the server's. Fails unless every
stream is complete and its tokens arrive one by one.
"""

from __future__ import annotations

import http.client
import json
import sys
from concurrent.futures import ThreadPoolExecutor


def main() -> int:
    """Read all streams concurrently."""
    port, streams, tokens = map(int, sys.argv[1:])
    with ThreadPoolExecutor(streams) as threads:
        list(threads.map(lambda _: _read_stream(port, tokens), range(streams)))
    return 0


def _read_stream(port: int, tokens: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": tokens, "stream": True}
    options = {"ignore_eos": True, "temperature": 0}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, **options}), headers)
    answer = connection.getresponse().read()
    connection.close()
    assert answer.endswith(b"data: [DONE]\n\n"), answer[-200:]
    # A token that is only a part of a character arrives with the next one.
    assert answer.count(b'"content":"') > 0.9 * tokens, "the tokens did not come one by one"


if __name__ == "__main__":
    raise SystemExit(main())
