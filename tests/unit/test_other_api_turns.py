"""Anthropic's and Responses conversations that go on: the ids of the whole, at the cost of what is new."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt_tokens import as_chat, begin
from router.request import RequestKind, RouteRequest, http_request
from tests.unit.looking_templates import ASKED
from tests.unit.test_chat_turns import TINY
from tests.unit.test_conversations import raw, tokenizer_for
from tokenization import PromptError, PromptTokenizer
from tokenization.anthropic_messages import messages_as_chat
from tokenization.openai_prompts import NO_LIMITS, chat_prompt
from tokenization.openai_responses import responses_as_chat

LONG = "some words of a long answer, " * 15
# Shows the order of a call's fields.
SHOWN = "{% for m in messages %}{{ '<|im_start|>' + (m | tojson) + '<|im_end|>' }}{% endfor %}"
SOURCES = {"tiny": TINY, "asked": ASKED, "shown": SHOWN}
PATHS = {"messages": "/v1/messages", "input": "/v1/responses"}

Item = dict[str, Any]


# Kept over all examples, so that what one leaves behind can harm the next.
REMEMBERING = {name: tokenizer_for(source) for name, source in SOURCES.items()}
DECODED = {name: tokenizer_for(source) for name, source in SOURCES.items()}


def sent(name: str, items: list[Item]) -> RouteRequest:
    """A request as it comes from a client."""
    return http_request("r", PATHS[name], json.dumps({"model": "m", name: items}).encode())


def ids(request: RouteRequest, tokenizer: PromptTokenizer) -> list[int] | str:
    """What the router makes of it."""
    try:
        prompt = begin(as_chat(request, tokenizer.chat_template), tokenizer, NO_LIMITS)
        return prompt.tokens().prompts[0].tolist()  # type: ignore[no-any-return]
    except PromptError as error:
        return str(error)


def decoded_ids(name: str, items: list[Item], tokenizer: PromptTokenizer) -> list[int] | str:
    """The same of decoded messages, of which nothing can be known."""
    try:
        turned = messages_as_chat if name == "messages" else responses_as_chat
        return chat_prompt(turned({"model": "m", name: items}), tokenizer).tolist()  # type: ignore[no-any-return]
    except PromptError as error:
        return str(error)


def asks(text: str) -> Item:
    """A question in Anthropic's form, up to which the client's cache is to reach."""
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    return {"role": "user", "content": [block]}


def unmarked(message: Item) -> Item:
    """The same in later requests."""
    if isinstance(message["content"], str):
        return message
    blocks = [
        {name: value for name, value in block.items() if name != "cache_control"}
        for block in message["content"]
    ]
    return {**message, "content": blocks}


texts = st.sampled_from(["", "a", LONG, "<|im_end|>", "x</think>y"])
blocks = st.one_of(
    texts.map(lambda text: {"type": "text", "text": text}),
    texts.map(lambda text: {"type": "thinking", "thinking": text}),
    st.just({"type": "tool_use", "id": "1", "name": "look", "input": {"at": [1, None]}}),
    texts.map(lambda text: {"type": "tool_result", "tool_use_id": "1", "content": text}),
    st.sampled_from([{"type": "text", "text": 5}, {"type": "text"}, {"type": "odd"}]),
)
messages = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "user", "assistant", "assistant", "system"]),
    st.one_of(texts, texts.map(lambda text: [{"type": "text", "text": text}]), st.lists(blocks, max_size=3)),
)
call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"at": 1}'}
items = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "system", "developer"]),
        texts | texts.map(lambda text: [{"type": "output_text", "text": text}]),
    ),
    texts.map(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}),
    st.just(call),
    texts.map(lambda text: {"type": "function_call_output", "call_id": "1", "output": text}),
    st.sampled_from([{"role": "user"}, {"type": "odd"}, {**call, "name": 5}]),
)


@pytest.fixture(autouse=True)
def _however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short conversations are remembered as well, and no check helps."""
    monkeypatch.setattr("tokenization.message_ends._SHARED_LEAST_BYTES", 0)
    monkeypatch.setattr("tokenization.resumed._LEAST_BYTES", 0)
    monkeypatch.setattr("tokenization.resumed._SHARED_LEAST_CHARS", 0)
    monkeypatch.setattr("tokenization.resumed._CHECKS_FIRST", 0)
    monkeypatch.setattr("tokenization.resumed._CHECK_EVERY", 1 << 60)


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=60)
@given(st.lists(messages, min_size=1, max_size=7), st.lists(st.integers(1, 7), max_size=3))
def test_anthropic_turns_have_the_ids_of_the_whole(name: str, talk: list[Item], turns: list[int]) -> None:
    """A conversation sent turn by turn has the ids, or the error, of the same one sent to a newcomer."""
    for turn in (*turns, len(talk)):
        expected = decoded_ids("messages", talk[:turn], DECODED[name])
        assert ids(sent("messages", talk[:turn]), REMEMBERING[name]) == expected


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=60)
@given(st.lists(items, min_size=1, max_size=7), st.lists(st.integers(1, 7), max_size=3))
def test_responses_have_the_ids_of_the_whole(name: str, talk: list[Item], turns: list[int]) -> None:
    """The same for items, also where the very messages that they become are sent as a chat."""
    for turn in (*turns, len(talk)):
        expected = decoded_ids("input", talk[:turn], DECODED[name])
        assert ids(sent("input", talk[:turn]), REMEMBERING[name]) == expected
        if isinstance(expected, list):
            turned = responses_as_chat({"input": talk[:turn]})
            chat = {"messages": turned["messages"], "add_special_tokens": True}
            plain = json.loads(json.dumps(chat))
            request = RouteRequest("r", RequestKind.CHAT, "m", {**chat, "messages": raw(plain["messages"])})
            assert ids(request, REMEMBERING[name]) == chat_prompt(plain, DECODED[name]).tolist()


@pytest.mark.parametrize("source", [TINY, ASKED])
@pytest.mark.parametrize("name", PATHS)
def test_a_further_turn_costs_only_its_new_text(source: str, name: str) -> None:
    """Calls, results and where the client marks its cache's end do not make a conversation another one."""
    tokenizer = tokenizer_for(source)
    talk: list[Item] = [asks(f"begin {LONG}") if name == "messages" else {"role": "user", "content": LONG}]
    for turn in range(5):
        request = as_chat(sent(name, talk), tokenizer.chat_template)
        begun = begin(request, tokenizer, NO_LIMITS)
        assert begun.tokens().prompts[0].tolist() == decoded_ids(name, talk, tokenizer)
        assert turn == 0 or begun.missing_chars < 3 * len(LONG)
        if name == "messages":
            use = {"type": "tool_use", "id": f"{turn}", "name": "look", "input": {"at": turn}}
            result = {"type": "tool_result", "tool_use_id": f"{turn}", "content": f"{turn} {LONG}"}
            talk = [
                *map(unmarked, talk),
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result, *asks(f"and {turn} {LONG}")["content"]]},
            ]
        else:
            result = {"type": "function_call_output", "call_id": "1", "output": f"{turn} {LONG}"}
            talk = [*talk, call, result, {"role": "user", "content": f"and {turn} {LONG}"}]


def test_images_are_not_written_out_again() -> None:
    """Messages that show images stay decoded: they are megabytes of which nothing is known."""
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    shown = {"type": "input_image", "image_url": "http://x/y.png"}
    for name, part in (("messages", image), ("input", shown)):
        talk: list[Item] = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
        assert isinstance(as_chat(sent(name, talk), DECODED["tiny"].chat_template).body["messages"], list)
        plain: list[Item] = [{"role": "user", "content": "What is it?"}]
        turned = as_chat(sent(name, plain), DECODED["tiny"].chat_template)
        assert isinstance(turned.body["messages"], msgspec.Raw)
