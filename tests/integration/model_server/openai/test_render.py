"""Render, tokenize and the router agree on the token ids of a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from router.prompts.request import RequestKind, api_request
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.model_server.http import MODEL, RunningServer, running_server

TALK = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "dark"}]},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHATS = [
    {"messages": TALK},
    {"messages": TALK, "tools": TOOLS},
    {"messages": TALK[:2], "add_generation_prompt": False},
    {"messages": TALK[:2], "truncate_prompt_tokens": 7},
    {"messages": TALK[:2], "truncate_prompt_tokens": -1, "max_tokens": 8},
    {"messages": TALK[:2], "add_special_tokens": True},
]
COMPLETIONS = [
    {"prompt": "The sky"},
    {"prompt": ["The sky", "is blue"]},
    {"prompt": [5, 6, 7]},
    {"prompt": [[5, 6], [7]]},
    {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2},
    {"prompt": "The sky is blue", "truncate_prompt_tokens": 2, "add_special_tokens": False},
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Provide one server for all tests of this module."""
    with running_server() as running:
        yield running


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [("/v1/chat/completions", RequestKind.CHAT, fields) for fields in CHATS]
    + [("/v1/completions", RequestKind.COMPLETIONS, fields) for fields in COMPLETIONS],
)
def test_router_and_server_have_the_same_ids(
    server: RunningServer, path: str, kind: RequestKind, fields: dict[str, Any]
) -> None:
    """For every form of prompt, the router's ids equal those that the server renders and counts."""
    body = {"model": MODEL, **fields}
    answer = server.post(f"{path}/render", body).json()
    rendered = [prompt["token_ids"] for prompt in (answer if isinstance(answer, list) else [answer])]
    request = api_request("id", kind, body, 0)
    context_tokens = server.get("/v1/models").json()["data"][0]["max_model_len"]
    registry = TokenizerRegistry({MODEL: server.tokenizer}, options=TokenizeOptions(deadline_s=60))
    tokens = registry.prompt_tokens(request, MODEL, context_tokens)
    registry.close()
    assert [ids.tolist() for ids in tokens.prompts] == rendered
    usage = server.post(path, {"max_tokens": 1, **body}).json()["usage"]
    assert usage["prompt_tokens"] == sum(map(len, rendered))


def test_invalid_render_requests_are_rejected(server: RunningServer) -> None:
    """A render request is rejected like the request itself."""
    answer = server.post("/v1/chat/completions/render", {"model": MODEL, "messages": "x"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "messages")
    answer = server.post("/v1/completions/render", {"model": "other", "prompt": "x"})
    assert answer.status == 404
