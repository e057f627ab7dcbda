"""Checked messages that come again: as if they were checked anew, within bounds."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenization import MediaPromptError, PromptError
from tokenization.apis.chat import ManyItemsError, chat_messages
from tokenization.templates.chat_template import MessageMemory

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
KEYS = {"name": "f", "arguments": json.dumps({f"key {at}": at for at in range(900)})}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "1"},
    {"role": "user", "content": "x" * 50},
    {"role": "user", "content": 3},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
    {"content": "nobody"},
    3,
    None,
]


def raw(messages: object) -> msgspec.Raw:
    """Messages as JSON text."""
    return msgspec.Raw(json.dumps(messages).encode())


def outcome(messages: list[Any], memory: MessageMemory | None, wants_parts: bool) -> object:
    """The messages, or what is said instead."""
    try:
        if memory is None:
            return chat_messages(messages, wants_parts=wants_parts)
        return memory.checked(raw(messages))
    except PromptError as error:
        return type(error), str(error), error.param


# Kept over all examples, so that what one leaves behind can harm the next.
REMEMBERING = {wants_parts: MessageMemory(wants_parts=wants_parts) for wants_parts in (True, False)}


@settings(deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.booleans())
def test_known_messages_are_as_if_checked_anew(messages: list[Any], wants_parts: bool) -> None:
    """Whatever was seen before, messages and errors, which name the place, are those of an empty memory."""
    assert outcome(messages, REMEMBERING[wants_parts], wants_parts) == outcome(messages, None, wants_parts)


@pytest.mark.parametrize("text", [b"null", b"3", b'"a"', b"{}", b"[", b"[1,]", b"[" * 5000, b"[{]"])
def test_what_is_no_list_of_messages_is_said_to_be_none(text: bytes) -> None:
    """Text that is no JSON, or no list, is the request's fault."""
    with pytest.raises(PromptError, match="messages must be"):
        MessageMemory(wants_parts=False).checked(msgspec.Raw(text))


def test_media_are_refused_each_time() -> None:
    """A message with an image is not remembered as one that may be shown."""
    memory = MessageMemory(wants_parts=True)
    for _ in range(2):
        with pytest.raises(MediaPromptError):
            memory.checked(raw([MESSAGES[6]]))


def test_items_count_whether_messages_are_known_or_not() -> None:
    """A limit of messages and parts holds for known messages as for new ones."""
    memory = MessageMemory(wants_parts=False)
    messages = raw([{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}] * 2)
    for _ in range(2):
        with pytest.raises(ManyItemsError):
            memory.checked(messages, 9)
        assert len(memory.checked(messages, 10)) == 2


def deep_bytes(value: Any) -> int:
    """Memory of decoded JSON."""
    inner = (*value, *value.values()) if isinstance(value, dict) else value if type(value) is list else ()
    return sys.getsizeof(value) + sum(map(deep_bytes, inner))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ["a"] * 3000},
        {"role": "assistant", "content": "a", "tool_calls": [{**CALL, "function": KEYS}]},
        {"role": "user", "content": "a" * 9000 + "\U0001f600"},
        {"role": "r" * 9000, "content": ""},
    ],
)
def test_messages_count_as_what_they_take_when_they_are_decoded(message: dict[str, Any]) -> None:
    """Decoded messages count by their own memory, not by their JSON text."""
    memory = MessageMemory(wants_parts=True)
    checked = memory.checked(raw([message]))
    assert memory.used_bytes >= deep_bytes(checked[0])


def test_memory_is_bounded() -> None:
    """However many messages come, no more memory is used than is allowed."""
    memory = MessageMemory(wants_parts=False, capacity_bytes=100_000)
    first = {"role": "user", "content": "kept"}
    (kept,) = memory.checked(raw([first]))
    assert memory.checked(raw([first]))[0] is kept
    for number in range(500):
        memory.checked(raw([first, {"role": "user", "content": f"{number} " * 100}]))
        assert memory.used_bytes <= 100_000
    assert memory.checked(raw([first]))[0] == kept
    memory.checked(raw([{"role": "user", "content": "a" * 200_000}]))
    assert memory.used_bytes <= 100_000
