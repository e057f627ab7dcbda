"""Message cache: cached messages equal newly checked ones, and memory is limited."""

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
from tokenization.templates.chat_template import MessageCache

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
    """Return messages as JSON text."""
    return msgspec.Raw(json.dumps(messages).encode())


def outcome(messages: list[Any], memory: MessageCache | None, wants_parts: bool) -> object:
    """Return the checked messages, or the error."""
    try:
        if memory is None:
            return chat_messages(messages, wants_parts=wants_parts)
        return memory.checked(raw(messages))
    except PromptError as error:
        return type(error), str(error), error.param


# Shared by all examples, so that wrong entries of one would be found by the next.
REMEMBERING = {wants_parts: MessageCache(wants_parts=wants_parts) for wants_parts in (True, False)}


@settings(deadline=None)
@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.booleans())
def test_cached_messages_equal_newly_checked_ones(messages: list[Any], wants_parts: bool) -> None:
    """Messages and errors with a filled cache equal those with an empty one."""
    assert outcome(messages, REMEMBERING[wants_parts], wants_parts) == outcome(messages, None, wants_parts)


@pytest.mark.parametrize("text", [b"null", b"3", b'"a"', b"{}", b"[", b"[1,]", b"[" * 5000, b"[{]"])
def test_invalid_json_is_rejected(text: bytes) -> None:
    """Text that is not a JSON list raises PromptError."""
    with pytest.raises(PromptError, match="messages must be"):
        MessageCache(wants_parts=False).checked(msgspec.Raw(text))


def test_media_are_rejected_each_time() -> None:
    """A message with an image is not cached, so it is rejected again."""
    memory = MessageCache(wants_parts=True)
    for _ in range(2):
        with pytest.raises(MediaPromptError):
            memory.checked(raw([MESSAGES[6]]))


def test_items_of_cached_messages_count() -> None:
    """The limit of messages and parts applies to cached messages as to new ones."""
    memory = MessageCache(wants_parts=False)
    messages = raw([{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}] * 2)
    for _ in range(2):
        with pytest.raises(ManyItemsError):
            memory.checked(messages, 9)
        assert len(memory.checked(messages, 10)) == 2


def deep_bytes(value: Any) -> int:
    """Return the memory of decoded JSON in bytes."""
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
def test_messages_count_by_their_decoded_size(message: dict[str, Any]) -> None:
    """Cached messages count by the memory of their decoded form, not by their JSON text."""
    memory = MessageCache(wants_parts=True)
    checked = memory.checked(raw([message]))
    assert memory.used_bytes >= deep_bytes(checked[0])


def test_memory_is_bounded() -> None:
    """The cache never exceeds its memory limit."""
    memory = MessageCache(wants_parts=False, capacity_bytes=100_000)
    first = {"role": "user", "content": "kept"}
    (kept,) = memory.checked(raw([first]))
    assert memory.checked(raw([first]))[0] is kept
    for number in range(500):
        memory.checked(raw([first, {"role": "user", "content": f"{number} " * 100}]))
        assert memory.used_bytes <= 100_000
    assert memory.checked(raw([first]))[0] == kept
    memory.checked(raw([{"role": "user", "content": "a" * 200_000}]))
    assert memory.used_bytes <= 100_000
