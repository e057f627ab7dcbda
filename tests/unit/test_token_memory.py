"""What is remembered of texts and conversations takes no more memory than counts, whatever clients send."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from router.prompt_media import MediaFeatures, Place, known_part
from tests.unit.looking_templates import ASKED, PARTS
from tests.unit.test_chat_turns import CHATML
from tests.unit.test_conversations import BY_FIRST
from tests.unit.test_resumed import tokenizer_for
from tokenization import TINY_DIRECTORY, PromptTokenizer
from tokenization.openai_prompts import begin_chat
from tokenization.turns import Turns

# Nowhere to be cut, so that it is one piece.
UNCUT = "世界" * 10_000
SYSTEM = "some words of a system's prompt, " * 100


def held_bytes(ids: np.ndarray) -> int:
    """Memory that an array keeps, also where it is a part of another."""
    base: Any = ids
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return memoryview(base).nbytes


def raw(*messages: dict[str, Any]) -> dict[str, Any]:
    """A body with messages as JSON text."""
    return {"messages": msgspec.Raw(json.dumps(messages).encode())}


def deep_bytes(value: Any, seen: set[int]) -> int:
    """Memory of decoded JSON, each object once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inner = (*value, *value.values()) if isinstance(value, dict) else value if type(value) is list else ()
    return sys.getsizeof(value) + sum(deep_bytes(item, seen) for item in inner)


def test_a_remembered_beginning_does_not_keep_what_is_behind_it() -> None:
    """The ids of a long text's beginning are kept without the others, and the place that it has counts."""
    tokenizer = PromptTokenizer.from_directory(TINY_DIRECTORY)
    for number in range(5):
        tokenizer.begin(f"{number} {SYSTEM}<|im_end|>{UNCUT}{number}").ids()
    prefixes = tokenizer._segments._prefixes
    held = 0
    for key, shelf in prefixes._shelves.items():
        held += sys.getsizeof(key)
        for prefix in shelf:
            assert held_bytes(prefix.ids) <= 1.2 * prefix.ids.nbytes
            held += sys.getsizeof(prefix.text) + held_bytes(prefix.ids)
    assert 5 * len(SYSTEM) < held <= prefixes.used_bytes


@pytest.mark.parametrize("source", [CHATML, ASKED])
def test_what_conversations_share_does_not_keep_their_last_messages(source: str) -> None:
    """A system prompt's ids are remembered for others without those of the first conversation with it."""
    tokenizer = tokenizer_for(source)
    for number in range(3):
        system = {"role": "system", "content": f"{number} {SYSTEM}"}
        begin_chat(raw(system, {"role": "user", "content": UNCUT}), tokenizer).ids()
    memories = [tokenizer._conversations, *tokenizer._resumed.values()]
    shared = [
        known
        for memory in memories
        if memory is not None
        for known in memory.beginnings._earlier._beginnings.values()
    ]
    assert len(shared) == 3
    assert all(held_bytes(known.ids) <= 1.2 * known.ids.nbytes for known in shared)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [[]] * 3000})}}
KEYS = {"name": "f", "arguments": json.dumps({f"key {at}": at for at in range(900)})}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (PARTS, {"role": "user", "content": ["a"] * 3000}),
        (PARTS, {"role": "user", "content": [""] * 3000}),
        (ASKED, {"role": "assistant", "content": "a", "tool_calls": [CALL]}),
        (ASKED, {"role": "assistant", "content": "a", "tool_calls": [{**CALL, "function": KEYS}]}),
        (ASKED, {"role": "user", "content": "a" * 9000 + "\U0001f600"}),
    ],
)
def test_messages_that_grow_when_they_are_decoded_count_as_what_they_take(
    source: str, message: dict[str, Any]
) -> None:
    """Decoded messages that are kept for the next turn count by their own memory, not by their JSON text."""
    tokenizer = tokenizer_for(source)
    (resumed,) = tokenizer._resumed.values()
    question, answer = {"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b" * 100}
    for messages in ([question, message, question], [question, message, question, answer, question]):
        begin_chat(raw(*messages), tokenizer).ids()
        entries = resumed.beginnings._last._beginnings.values()
        assert len(entries) == 1
        for known in entries:
            assert known.size_bytes >= deep_bytes(list(known.messages), set()) + held_bytes(known.ids)


def test_roles_that_clients_make_up_count() -> None:
    """A role takes memory like any other text: of remembered turns, and of a conversation's first message."""
    source = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}<|im_start|>"
    tokenizer = tokenizer_for(source)
    assert tokenizer.chat_template is not None
    turns, conversations = tokenizer.chat_template._turns, tokenizer._conversations
    assert turns is not None
    assert conversations is not None
    role = "r" * 100_000
    begin_chat(raw({"role": role, "content": "a"}, {"role": role, "content": "b"}), tokenizer).ids()
    assert turns._memory._used_bytes > len(role)
    assert conversations.beginnings.used_bytes > len(role)


def test_a_long_first_message_is_not_kept_to_tell_settings_apart() -> None:
    """Where turns depend on the first message a digest tells it apart, and turns of others stay theirs."""
    tokenizer = tokenizer_for(BY_FIRST)
    assert tokenizer.chat_template is not None
    turns = tokenizer.chat_template._turns
    assert isinstance(turns, Turns)
    for number in (1, 2, 1):
        body = raw({"role": "system", "content": f"{number} {SYSTEM}"}, {"role": "user", "content": "a"})
        whole = tokenizer.render_chat(msgspec.json.decode(body["messages"]))
        assert begin_chat(body, tokenizer).ids().tolist() == tokenizer.encode(whole, add_special_tokens=False)
    assert len(turns._settings) == 2
    assert max(map(deep_key_bytes, turns._settings)) < 1000


def deep_key_bytes(key: Any) -> int:
    """Memory of nested tuples."""
    return sys.getsizeof(key) + (sum(map(deep_key_bytes, key)) if isinstance(key, tuple) else 0)


def test_a_rendered_beginning_does_not_keep_what_is_behind_it() -> None:
    """What a renderer tells of a prompt up to its first image without a hash is kept without the rest."""
    ids = np.arange(100_000, dtype=np.uint32)
    known, media = known_part(ids, MediaFeatures(None, {"image": [Place(5, 9)]}))
    assert (known.tolist(), media) == ([0, 1, 2, 3, 4], ())
    assert held_bytes(known) == known.nbytes
