"""A streaming chat client as OpenAI's API asks for: a conversation in, one timed answer out.

Only what the demonstration needs, on urllib3; users bring their own OpenAI client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import urllib3

from router.local.envoy_routes import POD_HEADER
from router.local.errors import DemoError

_TIMEOUT = urllib3.Timeout(connect=5.0, read=60.0)
_EVENT_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answered request.

    Attributes:
        request_id: Envoy's id, by which the router explains its pick.
        pod: "ip:port" of the pod that answered.
        cached_tokens: As delivered, from `usage.prompt_tokens_details`.
        ttft_s: From sending the request to the first token's arrival.
    """

    request_id: str
    pod: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


class ChatClient:
    """Sends chats to one gateway; safe to share between threads."""

    def __init__(self, base_url: str, model: str, *, connections: int = 32) -> None:
        self._base_url = base_url
        self._model = model
        self._pool = urllib3.PoolManager(maxsize=connections, block=True, timeout=_TIMEOUT, retries=False)

    def chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> ChatAnswer:
        """Sends one streaming request (greedy, no early end) and reads it to its end.

        Raises:
            DemoError: The request failed; the message holds the status and the body.
        """
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s = time.monotonic()
        url = f"{self._base_url}/v1/chat/completions"
        try:
            response = self._pool.request("POST", url, json=body, preload_content=False)
            if response.status != 200:
                raise DemoError(
                    f"{url} answered {response.status}: {response.read(500).decode(errors='replace')}"
                )
            return self._read(response, started_s)
        except urllib3.exceptions.HTTPError as error:
            raise DemoError(f"{url}: {error}") from error

    def _read(self, response: urllib3.BaseHTTPResponse, started_s: float) -> ChatAnswer:
        ttft_s, pieces, usage = None, [], None
        for event in _server_sent(response):
            choices = event.get("choices") or []
            piece = choices[0].get("delta", {}).get("content") if choices else None
            if piece:
                ttft_s = ttft_s or time.monotonic() - started_s
                pieces.append(piece)
            usage = event.get("usage") or usage
        response.release_conn()
        if ttft_s is None or usage is None:
            raise DemoError("the answer's stream ended before its first token or without usage")
        return ChatAnswer(
            request_id=response.headers.get("x-request-id", ""),
            pod=response.headers.get(POD_HEADER, "?"),
            text="".join(pieces),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            ttft_s=ttft_s,
        )


def _server_sent(response: urllib3.BaseHTTPResponse) -> Iterator[dict]:  # type: ignore[type-arg]
    """Yields the JSON of each `data:` line as soon as it arrives."""
    buffered = b""
    while chunk := response.read1():
        *lines, buffered = (buffered + chunk).split(b"\n")
        if len(buffered) > _EVENT_BYTES_MAX:
            raise DemoError("an event of the answer's stream is larger than 1 MiB")
        for line in lines:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])
