"""Requests of very many small things: told of within the deadline, at a cost that grows with their number."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from router.prompts.request import RequestKind, RouteRequest
from router.prompts.tokenizers import TokenizeOptions, TokenizerRegistry
from tests.unit.router_support import TINY, completion
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.apis import responses as openai_responses
from tokenization.apis.chat import ITEMS_AT_ONCE_MAX, CallsInOrder, ManyItemsError, items_of
from tokenization.apis.responses import responses_as_chat
from tokenization.prompts import PromptLimits, chat_prompt

MANY = ITEMS_AT_ONCE_MAX + 1
LIMITS = PromptLimits(items_max=ITEMS_AT_ONCE_MAX)
SAID = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}


class WatchedTokenizer(PromptTokenizer):
    """Notes where it renders, and how many texts it encodes."""

    threads: set[str]
    texts: int

    def render_chat(self, *args: Any, **kwargs: Any) -> str:
        """Renders."""
        self.threads.add(threading.current_thread().name)
        return super().render_chat(*args, **kwargs)

    def token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """Encodes a text."""
        self.texts += 1
        return super().token_ids(*args, **kwargs)


def watched() -> tuple[WatchedTokenizer, TokenizerRegistry]:
    """A tokenizer, and a registry that waits for it however long it takes."""
    tokenizer = WatchedTokenizer.from_directory(TINY_DIRECTORY)
    tokenizer.threads, tokenizer.texts = set(), 0
    return tokenizer, TokenizerRegistry({TINY: tokenizer}, options=TokenizeOptions(deadline_s=60.0))


def parts(count: int) -> dict[str, Any]:
    """A message of so many parts."""
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
def test_many_messages_are_not_rendered_where_a_pick_waits(kind: RequestKind, fields: dict[str, Any]) -> None:
    """What takes a template long is rendered on a thread for which the pick waits up to its deadline."""
    tokenizer, registry = watched()
    tokens = registry.prompt_tokens(RouteRequest("r", kind, TINY, {"model": TINY, **fields}, 40_000), TINY)
    assert tokens.degraded is None
    assert len(tokens.prompts[0]) > MANY
    assert {name.partition("_")[0] for name in tokenizer.threads} == {"tokenize"}


def test_tools_among_the_templates_variables_are_not_rendered_where_a_pick_waits() -> None:
    """Tools are as slow to write out where a request names them among its template's variables."""
    tokenizer, registry = watched()
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 200_000}}]
    body = {"model": TINY, "messages": [SAID], "chat_template_kwargs": {"tools": tools}}
    registry.prompt_tokens(RouteRequest("r", RequestKind.CHAT, TINY, body, 200_100), TINY)
    assert {name.partition("_")[0] for name in tokenizer.threads} == {"tokenize"}


@pytest.mark.parametrize("prompt", [["a"] * 65, [[1]] * 65])
def test_none_of_too_many_prompts_is_tokenized(prompt: list[Any]) -> None:
    """A request for more prompts than are matched costs no look at any of them."""
    tokenizer, registry = watched()
    tokens = registry.prompt_tokens(completion("r", prompt), TINY)
    assert (tokens.prompts, tokens.degraded, tokenizer.texts) == ((), "too_many_prompts", 0)
    assert registry.prompt_tokens(completion("r", prompt[:64]), TINY).degraded is None


def test_many_messages_behind_known_ones_are_not_rendered_at_once() -> None:
    """Also behind messages that are known, many new ones are left to another thread."""
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


def test_calls_are_joined_at_a_cost_that_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that follow one another become one message without copying those in front for each."""
    copied = 0

    class Counted(CallsInOrder):
        def __init__(self, calls: Iterable[Any] = ()) -> None:
            nonlocal copied
            super().__init__(calls)
            copied += len(self)

    monkeypatch.setattr(openai_responses, "CallsInOrder", Counted)
    (message,) = responses_as_chat({"input": [CALL] * 1000})["messages"]
    assert len(message["tool_calls"]) == 1000
    assert copied <= 1000
    assert items_of([message]) == 1001


@pytest.mark.parametrize("messages", [None, 3, [3], [{"content": 3}], [{"content": [3, {"content": 3}]}]])
def test_what_is_no_list_of_messages_has_few_items(messages: object) -> None:
    """Counting fails at nothing that has not been checked yet."""
    assert items_of(messages) <= 3
