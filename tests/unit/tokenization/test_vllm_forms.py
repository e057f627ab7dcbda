"""Unusual requests, compared with the recorded results of vLLM 0.32's own classes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.prompts.parsers import OWN_PARSERS
from router.prompts.tokenizers import TokenizerRegistry
from tests.support.tokenization.tokenizers import tokenizer_for
from tokenization import PromptError, UnsupportedPromptError
from tokenization.prompts import chat_prompt
from tokenization.templates.chat_template import ChatTemplate

BY_PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
SHOWN = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p | tojson }}{% endfor %}"
    "{% if m.tool_call_id is defined %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
    "{% if tools is not none %}tools {{ tools | length }}{% endif %}"
)
USER = {"role": "user", "content": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (BY_PARTS, True),
        (f"{{% set n = messages | length %}}{BY_PARTS}", True),
        (f"{{% set ns = namespace() %}}{{% set ns.n = messages | length %}}{BY_PARTS}", False),
        (f"{{% set ns = namespace() %}}{{% set ns.n = messages | length - 1 %}}{BY_PARTS}", True),
        (f"{{% for role, ms in messages | groupby('role') %}}{{% endfor %}}{BY_PARTS}", False),
        (
            "{% for m in messages %}{% for a, b in m.content | groupby('type') %}{% endfor %}{% endfor %}",
            False,
        ),
        (BY_PARTS + "{% for m in messages %}{% for a, b in m.content %}{% endfor %}{% endfor %}", True),
    ],
)
def test_a_template_with_an_unrecognized_loop_gets_text(source: str, takes_parts: bool) -> None:
    """A template whose message loop vLLM does not recognize gets content as text."""
    assert ChatTemplate(source, {}).wants_parts is takes_parts


def text_of(source: str, api: str, body: dict[str, Any]) -> str:
    """Render a request with a template that prints its variables."""
    tokenizer = tokenizer_for(source)
    request = OWN_PARSERS.parse("r", api, json.dumps({"model": "m", **body}).encode())[0]
    tokens = TokenizerRegistry({"m": tokenizer}).prompt_tokens(request, "m")
    assert tokens.degraded is None
    return tokenizer.decode(tokens.prompts[0].tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}],
            'user:{"type": "text", "text": "a", "cache_control": {"type": "x"}};',
        ),
        (
            [{"role": "user", "content": [{"text": "a", "x": 1, "type": "input_text", "uuid": "u"}]}],
            'user:{"type": "text", "text": "a", "x": 1};',
        ),
        ([{"role": "tool", "content": "", "tool_call_id": None}], "tool:;"),
        ([{"role": "tool", "content": "", "tool_call_id": "c"}], "tool:#c;"),
    ],
)
def test_a_message_is_rendered_with_vllms_fields(messages: list[dict[str, Any]], shown: str) -> None:
    """Unknown fields of a part are kept, and a tool result without a call has no name."""
    assert text_of(SHOWN, "/v1/chat/completions", {"messages": messages}) == shown


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "user:a;"),
        ({"tools": []}, "user:a;tools 0"),
        ({"tools": [], "chat_template_kwargs": {"tools": None}}, "user:a;tools 0"),
        ({"tools": [], "chat_template_kwargs": {"tools": [{}, {}]}}, "user:a;tools 2"),
    ],
)
def test_a_template_sees_an_anthropic_requests_empty_tools(fields: dict[str, Any], shown: str) -> None:
    """Unlike for chats, an empty list of tools differs from no tools."""
    source = SHOWN.replace("{% for p in m.content %}{{ p | tojson }}{% endfor %}", "{{ m.content }}")
    body = {"max_tokens": 1, "messages": [USER], **fields}
    assert text_of(source, "/v1/messages", body) == shown


def test_text_in_place_of_response_parts_is_treated_as_by_vllm() -> None:
    """Text where a response has parts is rendered without parts or rejected, as by vLLM."""
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    answer = {"type": "message", "role": "assistant", "id": "m1", "status": "completed", "content": ""}
    registry = TokenizerRegistry({"m": tokenizer_for(source)})
    body = json.dumps({"model": "m", "input": [USER, answer]}).encode()
    request = OWN_PARSERS.parse("r", "/v1/responses", body)[0]
    assert registry.prompt_tokens(request, "m").degraded == "unsupported_prompt"
    for name in ("type", "id", "status"):
        other = {field: value for field, value in answer.items() if field != name}
        assert text_of(source, "/v1/responses", {"input": [USER, other]}) == "user:a;assistant:;"


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_an_anthropic_request_may_begin_with_its_system_message(content: object) -> None:
    """A leading system message without a `system` field is accepted; elsewhere the request goes by load."""
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    system = {"role": "system", "content": content}
    body = {"max_tokens": 1, "messages": [system, USER]}
    assert text_of(source, "/v1/messages", body) == "system:Be brief.;user:a;"
    billing = {"role": "system", "content": "x-anthropic-billing-header: 1"}
    registry = TokenizerRegistry({"m": tokenizer_for(source)})
    for other in (
        {**body, "system": "And kind."},
        {**body, "messages": [USER, system]},
        {**body, "messages": [system, system, USER]},
        {**body, "messages": [billing, USER]},
    ):
        request = OWN_PARSERS.parse("r", "/v1/messages", json.dumps({"model": "m", **other}).encode())[0]
        assert registry.prompt_tokens(request, "m").degraded == "unsupported_prompt"


@pytest.mark.parametrize("value", [1, 0, 1.0, "yes", "FALSE", "off"])
@pytest.mark.parametrize("name", ["add_generation_prompt", "add_special_tokens", "continue_final_message"])
def test_a_flag_that_vllm_accepts_is_not_rejected(name: str, value: object) -> None:
    """Flag values that vLLM reads as a boolean go by load; only others are rejected."""
    with pytest.raises(UnsupportedPromptError):
        chat_prompt({"messages": [USER], name: value}, tokenizer_for(BY_PARTS))
    for wrong in (2, "maybe", [], {}):
        with pytest.raises(PromptError) as caught:
            chat_prompt({"messages": [USER], name: wrong}, tokenizer_for(BY_PARTS))
        assert not isinstance(caught.value, UnsupportedPromptError)


def test_arguments_with_a_lone_surrogate_are_not_rejected() -> None:
    """Lone surrogates in tool arguments go by load: engines reject them only if the template prints them."""
    message = {"role": "assistant", "content": "a", "tool_calls": [CALL]}
    with pytest.raises(UnsupportedPromptError):
        chat_prompt({"messages": [message]}, tokenizer_for(BY_PARTS))
