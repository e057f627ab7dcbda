"""Anthropic and Responses requests: the same token ids as the chat that vLLM derives from them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompts.request import RequestKind, RouteRequest
from router.prompts.tokenizers import TokenizerRegistry
from tokenization import TINY_DIRECTORY, PromptError, PromptTokenizer, UnsupportedPromptError
from tokenization.apis.anthropic import messages_as_chat
from tokenization.apis.responses import responses_as_chat

MODEL = "kvroute-tiny"
TINY = PromptTokenizer.from_directory(TINY_DIRECTORY)
REGISTRY = TokenizerRegistry({MODEL: TINY})
USER = {"role": "user", "content": "What is a block?"}
CALL = {
    "id": "t1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "blocks"}'},
}


FUNCTION = {"type": "function", "name": "look"}
TEXT_TOOL = {"type": "custom", "name": "write"}


def text(*blocks: str) -> list[dict[str, str]]:
    """Return text blocks."""
    return [{"type": "text", "text": block} for block in blocks]


def image(**source: object) -> dict[str, object]:
    """Return an image block."""
    return {"type": "image", "source": source}


def image_part(url: str) -> dict[str, object]:
    """Return the chat's image part of a URL."""
    return {"type": "image_url", "image_url": {"url": url}}


PNG = image(type="base64", media_type="image/png", data="QQ==")
LINK = image(type="url", url="http://x/y.png")
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
    # Images without a source, or in results without a URL, are dropped, as in vLLM 0.32.
    (
        {"messages": [{"role": "user", "content": [PNG, {"type": "image"}, LINK, *text("x")]}]},
        [
            {
                "role": "user",
                "content": [
                    image_part("data:image/png;base64,QQ=="),
                    image_part("http://x/y.png"),
                    *text("x"),
                ],
            }
        ],
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [
                                *text("r"),
                                image(data="QQ=="),
                                image(type="url"),
                            ],
                        },
                        *text("x"),
                    ],
                }
            ]
        },
        [
            {"role": "tool", "tool_call_id": "t", "content": "r"},
            {"role": "user", "content": [image_part("data:image/jpeg;base64,QQ==")]},
            {"role": "user", "content": "x"},
        ],
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
            {"role": "assistant", "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "t1", "content": "one"},
            {"role": "assistant", "content": "A block."},
            USER,
        ],
    ),
]


def ids(kind: RequestKind, body: dict[str, Any]) -> Any:
    """Return the router's prompt tokens of a request."""
    return REGISTRY.prompt_tokens(RouteRequest("r", kind, MODEL, body, body_bytes=100), MODEL)


def same(kind: RequestKind, body: dict[str, Any], messages: list[dict[str, Any]], **known: Any) -> None:
    """Return whether a body has the ids of a chat with these messages."""
    got, expected = ids(kind, body), ids(RequestKind.CHAT, {"messages": messages, **known})
    assert got.degraded is None
    assert [prompt.tolist() for prompt in got.prompts] == [prompt.tolist() for prompt in expected.prompts]


@pytest.mark.parametrize(("body", "messages"), MESSAGES)
def test_an_anthropic_request_has_its_chats_ids(body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """An Anthropic request has the ids of its chat: system first, blocks in order, results before texts."""
    assert messages_as_chat(body)["messages"] == messages
    same(RequestKind.MESSAGES, {"model": MODEL, "max_tokens": 5, **body}, messages)


@pytest.mark.parametrize(("body", "messages"), RESPONSES)
def test_a_responses_request_has_its_chats_ids(body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """A Responses request has the ids of its chat: instructions as system message, items as messages."""
    assert responses_as_chat(body)["messages"] == messages
    same(RequestKind.RESPONSES, {"model": MODEL, **body}, messages)


def test_anthropic_tools_have_the_chats_form() -> None:
    """Anthropic tools become a chat's tools; `tool_choice` does not change the prompt."""
    tool = {"name": "look", "description": "Looks.", "input_schema": {"properties": {"at": {}}}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": {"type": "any"}}
    parameters = {"properties": {"at": {}}, "type": "object"}
    function = {"name": "look", "description": "Looks.", "parameters": parameters}
    same(RequestKind.MESSAGES, body, [USER], tools=[{"type": "function", "function": function}])


def test_an_unfinished_answer_is_continued() -> None:
    """If the last item's status is unfinished, the prompt ends within that item."""
    answer = {"role": "assistant", "content": "A block"}
    body = {"input": [USER, {**answer, "type": "message", "status": "incomplete"}]}
    same(
        RequestKind.RESPONSES,
        body,
        [USER, answer],
        continue_final_message=True,
        add_generation_prompt=False,
    )


def test_the_prefix_before_an_image_is_known() -> None:
    """A prompt with an image of unknown size is known up to the image."""
    got = ids(RequestKind.MESSAGES, {"messages": [USER, {"role": "user", "content": [PNG, *text("?")]}]})
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
        (RequestKind.MESSAGES, {"messages": [{"role": "user", "content": [{**PNG, "source": "x"}]}]}),
        (RequestKind.MESSAGES, {"messages": [{"role": "user", "content": [image(type="url", url=5)]}]}),
        (RequestKind.MESSAGES, {"messages": [{"role": "robot", "content": "x"}]}),
        (RequestKind.MESSAGES, {"messages": "x"}),
        (RequestKind.RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (RequestKind.RESPONSES, {"input": "x", "conversation": "c"}),
        (RequestKind.RESPONSES, {"input": "x", "prompt": {"id": "p"}}),
        (RequestKind.RESPONSES, {"input": "x", "truncation": "auto"}),
        (RequestKind.RESPONSES, {"input": "x", "instructions": 5}),
        (RequestKind.RESPONSES, {"input": "x", "reasoning": "high"}),
        (RequestKind.RESPONSES, {"input": "x", "reasoning": {"effort": 5}}),
        (RequestKind.RESPONSES, {"input": "x", "chat_template_kwargs": 5}),
        (RequestKind.RESPONSES, {"input": "x", "chat_template_kwargs": {"enable_thinking": None}}),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{}]}),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{**FUNCTION, "parameters": "none"}]}),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "n"}]}),
        (RequestKind.RESPONSES, {"input": "x", "tools": [{**TEXT_TOOL, "format": {"type": "grammar"}}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "reasoning", "encrypted_content": "x"}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "reasoning", "summary": "x"}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "item_reference", "id": "i"}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        (RequestKind.RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        (RequestKind.RESPONSES, {"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}),
        (RequestKind.RESPONSES, {"input": [{"role": "assistant", "content": []}]}),
        (RequestKind.RESPONSES, {"input": [{"role": "developer", "content": "x", "tools": []}]}),
        (RequestKind.RESPONSES, {"input": [{"role": "tool", "content": "x"}]}),
        (RequestKind.RESPONSES, {"input": [{"content": "no role"}]}),
        (RequestKind.RESPONSES, {"input": 5}),
    ],
)
def test_ambiguous_requests_are_routed_by_load(kind: RequestKind, body: dict[str, Any]) -> None:
    """A request that releases convert differently has no ids but a reason, and is not rejected."""
    got = ids(kind, body)
    assert (got.prompts, got.degraded, got.total) == ((), "unsupported_prompt", 25)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_of_a_responses_request_have_the_chats_form(choice: str) -> None:
    """Functions of a Responses request are in the prompt for any tool choice; built-in tools are not."""
    tools = [{"type": "web_search"}, FUNCTION]
    shown = [{"type": "function", "function": {"name": "look"}}]
    body = {"input": "What is a block?", "tools": tools, "tool_choice": choice}
    same(RequestKind.RESPONSES, body, [USER], tools=shown)


KINDS = [
    "user",
    "assistant",
    "function",
    "custom",
    "namespace",
    "function_call",
    "reasoning",
    "custom_tool_call",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(KINDS),
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
                    "call_id",
                    "name",
                    "arguments",
                    "output",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["messages", "system", "tools", "input", "instructions", "reasoning", "truncation"]),
        JSON,
    )
)
def test_any_body_is_converted_or_rejected(body: dict[str, Any]) -> None:
    """Any body is converted to a chat or raises an error of this package."""
    for turned in (messages_as_chat, responses_as_chat):
        try:
            chat = turned(body)
        except (PromptError, UnsupportedPromptError):
            continue
        assert isinstance(chat["messages"], list)
