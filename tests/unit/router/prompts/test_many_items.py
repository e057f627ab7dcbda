"""Requests with very many items: rendered in the background, at a cost linear in their number."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from router.prompts.request import RequestKind, RouteRequest
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.support.router.bench import TINY, completion
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.apis import responses as openai_responses
from tokenization.apis.chat import ITEMS_AT_ONCE_MAX, ManyItemsError, OrderedCalls, count_items
from tokenization.apis.responses import responses_as_chat
from tokenization.prompts import PromptLimits, chat_prompt

MANY = ITEMS_AT_ONCE_MAX + 1
LIMITS = PromptLimits(items_max=ITEMS_AT_ONCE_MAX)
SAID = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}


class WatchedTokenizer(PromptTokenizer):
    """Tokenizer that records the rendering threads and counts encoded texts."""

    threads: set[str]
    texts: int

    def render_chat(self, *args: Any, **kwargs: Any) -> str:
        """Render and record the thread."""
        self.threads.add(threading.current_thread().name)
        return super().render_chat(*args, **kwargs)

    def token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """Encode and count a text."""
        self.texts += 1
        return super().token_ids(*args, **kwargs)


def watched() -> tuple[WatchedTokenizer, TokenizerRegistry]:
    """Return a watched tokenizer and a registry without a deadline."""
    tokenizer = WatchedTokenizer.from_directory(TINY_DIRECTORY)
    tokenizer.threads, tokenizer.texts = set(), 0
    return tokenizer, TokenizerRegistry({TINY: tokenizer}, options=TokenizeOptions(deadline_s=60.0))


def parts(count: int) -> dict[str, Any]:
    """Return a message of `count` parts."""
    return {"role": "user", "content": [{"type": "text", "text": "a"}] * count}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (RequestKind.CHAT, {"messages": msgspec.Raw(msgspec.json.encode([SAID] * MANY))}),
        (RequestKind.CHAT, {"messages": [parts(MANY)]}),
        (RequestKind.MESSAGES, {"messages": [SAID] * MANY}),
        (RequestKind.MESSAGES, {"messages": [parts(MANY)]}),
        (RequestKind.RESPONSES, {"input": [CALL] * MANY}),
    ],
)
def test_many_messages_are_rendered_in_the_background(kind: RequestKind, fields: dict[str, Any]) -> None:
    """A request with many items is rendered on another thread; the pick waits up to its deadline."""
    tokenizer, registry = watched()
    tokens = registry.prompt_tokens(RouteRequest("r", kind, TINY, {"model": TINY, **fields}, 40_000), TINY)
    assert tokens.degraded is None
    assert len(tokens.prompts[0]) > MANY
    assert {name.partition("_")[0] for name in tokenizer.threads} == {"tokenize"}


def test_many_tools_in_template_variables_are_rendered_in_the_background() -> None:
    """Many tools in `chat_template_kwargs` are rendered on another thread as well."""
    tokenizer, registry = watched()
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 200_000}}]
    body = {"model": TINY, "messages": [SAID], "chat_template_kwargs": {"tools": tools}}
    registry.prompt_tokens(RouteRequest("r", RequestKind.CHAT, TINY, body, 200_100), TINY)
    assert {name.partition("_")[0] for name in tokenizer.threads} == {"tokenize"}


@pytest.mark.parametrize("prompt", [["a"] * 65, [[1]] * 65])
def test_too_many_prompts_are_not_tokenized(prompt: list[Any]) -> None:
    """A request with more prompts than are matched tokenizes none of them."""
    tokenizer, registry = watched()
    tokens = registry.prompt_tokens(completion("r", prompt), TINY)
    assert (tokens.prompts, tokens.degraded, tokenizer.texts) == ((), "too_many_prompts", 0)
    assert registry.prompt_tokens(completion("r", prompt[:64]), TINY).degraded is None


def test_many_new_messages_after_cached_ones_are_rendered_in_the_background() -> None:
    """Many new messages after cached ones are rendered on another thread."""
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    first = json.dumps([{"role": "user", "content": f"{at} some words " * 40} for at in range(9)])
    chat_prompt({"messages": msgspec.Raw(first.encode())}, tokenizer, LIMITS)
    for count, is_much in ((2, False), (MANY, True)):
        new = json.dumps([{"content": ["a"], "role": "user"}] * count)
        body = {"messages": msgspec.Raw(f"{first[:-1]},{new[1:]}".encode())}
        if is_much:
            with pytest.raises(ManyItemsError):
                chat_prompt(body, tokenizer, LIMITS)
        decoded = {"messages": msgspec.json.decode(body["messages"])}
        assert chat_prompt(body, tokenizer).tolist() == chat_prompt(decoded, tokenizer).tolist()


def test_merging_calls_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consecutive calls are merged into one message without copying earlier calls for each."""
    copied = 0

    class Counted(OrderedCalls):
        def __init__(self, calls: Iterable[Any] = ()) -> None:
            nonlocal copied
            super().__init__(calls)
            copied += len(self)

    monkeypatch.setattr(openai_responses, "OrderedCalls", Counted)
    (message,) = responses_as_chat({"input": [CALL] * 1000})["messages"]
    assert len(message["tool_calls"]) == 1000
    assert copied <= 1000
    assert count_items([message]) == 1001


@pytest.mark.parametrize("messages", [None, 3, [3], [{"content": 3}], [{"content": [3, {"content": 3}]}]])
def test_counting_items_accepts_unchecked_messages(messages: object) -> None:
    """Counting items of unchecked, invalid messages does not fail."""
    assert count_items(messages) <= 3
