"""The most common messages read straight from JSON text: as all messages are read, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from tokenization import PromptError
from tokenization.chat_messages import chat_messages, decoded, plain_messages

BILLING = "x-anthropic-billing-header: b\nrest"
texts = st.sampled_from(["", "a", BILLING, "é😀", "\ud800"]) | st.text(max_size=9)
roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", ""])
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=2)
values = texts | st.none() | st.integers() | parts
messages = st.one_of(
    st.fixed_dictionaries({"role": roles, "content": texts}),
    st.fixed_dictionaries({"content": texts, "role": roles}),
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), values),
    values,
)


def outcome(text: bytes) -> list[dict[str, Any]] | None:
    """What all messages are read by makes of them; None where it refuses them."""
    try:
        return chat_messages(decoded(Raw(text)), wants_parts=False)
    except PromptError:
        return None


@given(st.lists(messages, min_size=1, max_size=4), st.booleans())
def test_plain_messages_are_those_that_all_would_be(talk: list[Any], spaces: bool) -> None:
    """Where each message is a role and a text they are read so, with what the template would be given."""
    text = json.dumps(talk, separators=None if spaces else (",", ":")).encode()
    plain = plain_messages(text)
    if plain is not None:
        assert [{"role": message.role, "content": message.content} for message in plain] == outcome(text)


@pytest.mark.parametrize(
    "text",
    [
        b'[{"role":"user","content":"a","name":"b"}]',
        b'[{"role":"developer","content":"a"}]',
        b'[{"role":"system","content":"x-anthropic-billing-header: a"}]',
        b'[{"role":"user","content":null}]',
        b'[{"role":"user"}]',
        b'[{"role":"user","content":"\\ud800"}]',
        b'[{"role":"user","content":"\xff"}]',
        b'[{"role":"user","content":"a"},]',
        b"[" * 100_000,
    ],
)
def test_what_is_not_plain_is_left_to_others(text: bytes) -> None:
    """A message with more or less than that, or one that is shown otherwise, is not taken for plain."""
    assert plain_messages(text) is None


def test_the_last_of_equal_names_counts() -> None:
    """A name that comes twice in a message means what it means where all messages are read."""
    text = b'[{"role":"user","content":"a","content":"b","role":"assistant"}]'
    plain = plain_messages(text)
    assert plain is not None
    assert [{"role": message.role, "content": message.content} for message in plain] == outcome(text)
