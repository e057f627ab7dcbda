"""Anthropic and Responses requests: the chat that vLLM makes of them, and its very ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.request import RequestKind, RouteRequest
from router.tokens import TokenizerRegistry
from tokenization import TINY_DIRECTORY, PromptError, PromptTokenizer, UnsupportedPromptError
from tokenization.anthropic_messages import messages_as_chat
from tokenization.openai_responses import responses_as_chat

MODEL = "kvroute-tiny"
TINY = PromptTokenizer.from_directory(TINY_DIRECTORY)
REGISTRY = TokenizerRegistry({MODEL: TINY})
USER = {"role": "user", "content": "What is a block?"}
CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "blocks"}'},
}


def text(*blocks: str) -> list[dict[str, str]]:
    """Text blocks."""
    return [{"type": "text", "text": block} for block in blocks]


MESSAGES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": [USER]}, [USER]),
    ({"system": "Be brief.", "messages": [USER]}, [{"role": "system", "content": "Be brief."}, USER]),
    (
        {"system": text("x-anthropic-billing-header: 1", "Be ", "brief."), "messages": [USER]},
        [{"role": "system", "content": "Be brief."}, USER],
    ),
    ({"messages": [{"role": "user", "content": text("What is a block?")}]}, [USER]),
    (
        {"messages": [{"role": "user", "content": text("a", "", "b")}]},
        [{"role": "user", "content": text("a", "b")}],
    ),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "?"},
                        *text("I look."),
                        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "blocks"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": text("one", "two")},
                        *text("Go on."),
                    ],
                },
            ]
        },
        [
            USER,
            {"role": "assistant", "reasoning": "hm", "tool_calls": [CALL], "content": "I look."},
            {"role": "tool", "tool_call_id": "t1", "content": "one\ntwo"},
            {"role": "user", "content": "Go on."},
        ],
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}
            ]
        },
        [{"role": "tool", "tool_call_id": "t", "content": "x"}],
    ),
]
RESPONSES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"input": "What is a block?"}, [USER]),
    (
        {"instructions": "Be brief.", "input": [{"type": "message", **USER}]},
        [{"role": "system", "content": "Be brief."}, USER],
    ),
    (
        {
            "input": [
                USER,
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "t1", "name": "look", "arguments": '{"at": "blocks"}'},
                {"type": "function_call_output", "call_id": "t1", "output": "one"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "A block."}]},
                USER,
            ]
        },
        [
            USER,
            {"role": "assistant", "reasoning": "hm"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "t1", "content": "one"},
            {"role": "assistant", "content": "A block."},
            USER,
        ],
    ),
]


def ids(kind: RequestKind, body: dict[str, Any]) -> Any:
    """What the router knows of a request's prompt."""
    return REGISTRY.prompt_tokens(RouteRequest("r", kind, MODEL, body, body_bytes=100), MODEL)


def same(kind: RequestKind, body: dict[str, Any], messages: list[dict[str, Any]], **known: Any) -> None:
    """Both bodies have the same ids."""
    got, expected = ids(kind, body), ids(RequestKind.CHAT, {"messages": messages, **known})
    assert got.degraded is None
    assert [prompt.tolist() for prompt in got.prompts] == [prompt.tolist() for prompt in expected.prompts]


@pytest.mark.parametrize(("body", "messages"), MESSAGES)
def test_an_anthropic_request_has_its_chats_ids(body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """System first, blocks in order, results before the user's words, thoughts and calls on their turn."""
    assert messages_as_chat(body)["messages"] == messages
    same(RequestKind.MESSAGES, {"model": MODEL, "max_tokens": 5, **body}, messages)


@pytest.mark.parametrize(("body", "messages"), RESPONSES)
def test_a_responses_request_has_its_chats_ids(body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Instructions are the system's, items become turns one by one."""
    assert responses_as_chat(body)["messages"] == messages
    same(RequestKind.RESPONSES, {"model": MODEL, **body}, messages)


def test_anthropic_tools_have_the_chats_form() -> None:
    """Schemas without a type are objects'; the choice of a tool does not change the prompt."""
    tool = {"name": "look", "description": "Looks.", "input_schema": {"properties": {"at": {}}}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}}
    parameters = {"properties": {"at": {}}, "type": "object"}
    function = {"name": "look", "description": "Looks.", "parameters": parameters}
    same(RequestKind.MESSAGES, body, [USER], tools=[{"type": "function", "function": function}])


def test_an_unfinished_answer_is_continued() -> None:
    """The last item's status says so; the prompt then ends within it."""
    answer = {"role": "assistant", "content": "A block"}
    body = {"input": [USER, {**answer, "type": "message", "status": "incomplete"}]}
    same(
        RequestKind.RESPONSES,
        body,
        [USER, answer],
        continue_final_message=True,
        add_generation_prompt=False,
    )


def test_what_stands_before_an_image_is_known() -> None:
    """An image's tokens are the engine's own affair; the text in front of it is not."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}
    got = ids(RequestKind.MESSAGES, {"messages": [USER, {"role": "user", "content": [image, *text("?")]}]})
    assert got.partial == "media"
    whole = ids(RequestKind.CHAT, {"messages": [USER], "add_generation_prompt": False}).prompts[0].tolist()
    known = got.prompts[0].tolist()
    assert known[: len(whole)] == whole


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (RequestKind.MESSAGES, {"messages": [USER, {"role": "system", "content": "x"}]}),
        (RequestKind.MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        (RequestKind.MESSAGES, {"messages": [USER], "tools": [{"type": "web_search"}]}),
        (RequestKind.MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}),
        (RequestKind.MESSAGES, {"messages": "x"}),
        (RequestKind.RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (RequestKind.RESPONSES, {"input": "x", "conversation": "c"}),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}),
        (RequestKind.RESPONSES, {"input": [{"content": "no role"}]}),
        (RequestKind.RESPONSES, {"input": 5}),
    ],
)
def test_what_is_not_known_for_sure_goes_by_load(kind: RequestKind, body: dict[str, Any]) -> None:
    """No ids rather than wrong ones, and no refusal: the engine answers for its API; the reason is told."""
    got = ids(kind, body)
    assert (got.prompts, got.degraded, got.total) == ((), "unsupported_prompt", 25)


def test_tools_that_may_not_be_called_are_not_in_the_prompt() -> None:
    """With a choice of none the engine leaves them out, so the prompt is known."""
    same(RequestKind.RESPONSES, {"input": "What is a block?", "tools": [{}], "tool_choice": "none"}, [USER])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "type",
                    "text",
                    "messages",
                    "input",
                    "system",
                    "tools",
                    "status",
                    "summary",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "system", "tools", "input", "instructions"]), JSON))
def test_no_body_does_more_than_being_refused(body: dict[str, Any]) -> None:
    """Whatever a client sends: a chat, or an error of this package."""
    for turned in (messages_as_chat, responses_as_chat):
        try:
            chat = turned(body)
        except (PromptError, UnsupportedPromptError):
            continue
        assert isinstance(chat["messages"], list)
