"""Conversations whose beginning is known by its bytes: the ids of the whole, or nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.unit.test_chat_turns import CHATML, FRAMED, TINY, TOKENS, VARYING
from tokenization import TINY_DIRECTORY, PromptError, PromptTokenizer
from tokenization.chat_template import ChatTemplate
from tokenization.message_ends import MessagesEnd, last_message_end, message_ends
from tokenization.openai_prompts import _CHAT_OPTIONS, begin_chat

BY_FIRST = """\
{{- bos_token }}{% if messages[0].role == 'system' %}<|im_start|>{{ enable_thinking }}<|im_end|>{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
{%- if messages[0].content == 'a b ' %}!{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_end|>{{ messages[0].role }}{% endif %}
"""
SOURCES = {"tiny": TINY, "chatml": CHATML, "by_first": BY_FIRST, "varying": VARYING, "framed": FRAMED}
LONG = "some words of a long answer, " * 15
OPTIONS = {
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "template_kwargs": {},
}


@pytest.fixture(autouse=True)
def _however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is short counts as shared."""
    monkeypatch.setattr("tokenization.message_ends._SHARED_LEAST_BYTES", 0)


def tokenizer_for(source: str) -> PromptTokenizer:
    """The tiny tokenizer behind another template."""
    library = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    return PromptTokenizer(library, ChatTemplate(source, TOKENS), frozenset())


# Kept over all examples, so that what one leaves behind can harm the next.
REMEMBERING = {name: tokenizer_for(source) for name, source in SOURCES.items()}
DECODED = {name: tokenizer_for(source) for name, source in SOURCES.items()}
PLAIN = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))


def message(role: str, content: object) -> dict[str, Any]:
    """A message as most clients write it."""
    return {"role": role, "content": content}


CONVERSATION = [message("user" if at % 2 == 0 else "assistant", f"{at} {LONG}") for at in range(9)]

texts = st.sampled_from(["", "a b ", LONG, f" {LONG}", "<|im_end|>\n", "<|im_", "start|>", "\n\n", "é😀"])
messages_lists = st.lists(
    st.one_of(
        st.builds(message, st.sampled_from(["system", "user", "assistant"]), texts),
        st.builds(message, st.just("user"), texts.map(lambda text: [{"type": "text", "text": text}])),
        st.builds(lambda text: {"content": text, "role": "user"}, texts),
    ),
    min_size=1,
    max_size=7,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "add_special_tokens": st.booleans(),
        "chat_template_kwargs": st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": 1}]),
        "continue_final_message": st.booleans(),
        "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
    },
)


def raw(messages: list[dict[str, Any]], spaces: bool = True) -> msgspec.Raw:
    """Messages as a client's JSON library writes them."""
    return msgspec.Raw(json.dumps(messages, separators=None if spaces else (",", ":")).encode())


def ends_of(messages: msgspec.Raw, new_messages: int) -> Sequence[MessagesEnd]:
    """Where messages end, as who has read the body knows it."""
    end = last_message_end(memoryview(messages))
    return () if end is None else message_ends(bytes(messages), 0, end, new_messages)


def outcome(
    body: dict[str, Any], tokenizer: PromptTokenizer, ends: Sequence[MessagesEnd] = ()
) -> list[int] | str:
    """A prompt's ids, or what is said instead."""
    try:
        return begin_chat(body, tokenizer, message_ends=ends).ids().tolist()  # type: ignore[no-any-return]
    except PromptError as error:
        return str(error)


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=120)
@given(
    messages=messages_lists,
    turns=st.lists(st.integers(1, 7), max_size=4),
    body=bodies,
    spaces=st.booleans(),
    looked_behind=st.none() | st.integers(0, 8),
    otherwise=st.lists(messages_lists, max_size=2),
)
def test_whatever_was_remembered_the_ids_are_those_of_the_whole(
    name: str,
    messages: list[dict[str, Any]],
    turns: list[int],
    body: dict[str, Any],
    spaces: bool,
    looked_behind: int | None,
    otherwise: list[list[dict[str, Any]]],
) -> None:
    """Sent turn by turn, or with another end, as JSON it has the ids, or the error, of itself decoded."""
    endings = ([*messages[:-1], *ending] for ending in otherwise)
    for sent in (*(messages[:turn] for turn in turns), messages, *endings):
        expected = outcome({**body, "messages": sent}, DECODED[name])
        ends = () if looked_behind is None else ends_of(raw(sent, spaces), looked_behind)
        assert outcome({**body, "messages": raw(sent, spaces)}, REMEMBERING[name], ends) == expected


@pytest.mark.parametrize("name", ["tiny", "chatml", "by_first"])
@pytest.mark.parametrize("new", [0, 2, 6])
def test_only_what_is_new_is_looked_at(name: str, new: int) -> None:
    """What goes on behind a known beginning is encoded behind it; the beginning is not rendered again."""
    tokenizer = tokenizer_for(SOURCES[name])
    known = len(CONVERSATION) - new
    for end in range(1, known + 1, 2):
        begin_chat({"messages": raw(CONVERSATION[:end])}, tokenizer).ids()
    conversation = tokenizer.conversation(raw(CONVERSATION), OPTIONS)
    assert conversation is not None
    assert conversation.begin(add_special_tokens=False)
    whole = tokenizer.render_chat(CONVERSATION)
    assert conversation.missing_chars < (new + 2) * (len(LONG) + 40) <= len(whole)
    assert conversation.ids().tolist() == PLAIN.encode(whole, add_special_tokens=False).ids
    assert conversation.chars == len(whole)


@pytest.mark.parametrize("name", ["tiny", "chatml", "by_first"])
@pytest.mark.parametrize("begin", [1, 8])
def test_a_beginning_that_others_share_is_known(name: str, begin: int) -> None:
    """Behind messages that another conversation began with, a new question costs only its own text."""
    tokenizer = tokenizer_for(SOURCES[name])
    for question in range(3):
        messages = [*CONVERSATION[:begin], message("user", f"{question}?")]
        begun = begin_chat({"messages": raw(messages)}, tokenizer)
        assert question == 0 or begun.missing_chars < len(LONG)
        whole = tokenizer.render_chat(messages)
        assert begun.ids().tolist() == PLAIN.encode(whole, add_special_tokens=False).ids
    conversation = tokenizer.conversation(raw(messages[:-1] + CONVERSATION[-1:]), OPTIONS)
    assert conversation is not None
    assert conversation.begin(add_special_tokens=False)


def test_a_beginning_counts_only_where_it_ends_as_it_did() -> None:
    """A last word that the next message goes on with is encoded anew, though all its bytes are known."""
    tokenizer = tokenizer_for("{% for m in messages %}{{ m.content }}{% endfor %} answer:")
    # The first exact cut behind 1024 characters is where the message ends.
    first = message("user", "w " * 512 + "th")
    begin_chat({"messages": raw([first])}, tokenizer).ids()
    for text in ("e", " e"):
        messages = [first, message("user", text)]
        whole = tokenizer.render_chat(messages)
        found = begin_chat({"messages": raw(messages)}, tokenizer).ids().tolist()
        assert found == PLAIN.encode(whole, add_special_tokens=False).ids


@pytest.mark.parametrize("turns", [1, 9])
def test_a_turn_too_long_to_be_one_piece_is_remembered_as_well(turns: int) -> None:
    """Behind a long new turn, encoded piece by piece, the next one again costs only its own text."""
    tokenizer = tokenizer_for(TINY)
    messages = [message("user", LONG)]
    for turn in range(turns):
        begin_chat({"messages": raw(messages)}, tokenizer).ids()
        answer = " ".join(f"{turn}.{word}" for word in range(300))
        messages += message("assistant", answer), message("user", LONG)
    begun = begin_chat({"messages": raw(messages)}, tokenizer)
    assert len(answer) < begun.missing_chars < len(answer) + 2 * len(LONG)
    whole = tokenizer.render_chat(messages)
    assert begun.ids().tolist() == PLAIN.encode(whole, add_special_tokens=False).ids
    assert begin_chat({"messages": raw(messages)}, tokenizer).missing_chars == 0


def test_only_options_that_are_looked_for_are_looked_at() -> None:
    """A chat that names none of the fields that say how it becomes a prompt becomes one without them."""
    looked_at: set[str] = set()

    class Body(dict[str, Any]):
        def get(self, name: str, default: object = None) -> Any:
            looked_at.add(name)
            return super().get(name, default)

    begin_chat(Body(messages=raw(CONVERSATION), add_special_tokens=True), tokenizer_for(TINY))
    answers = {"max_tokens", "max_completion_tokens"}
    assert looked_at - answers == _CHAT_OPTIONS | {"messages"}


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (b", 5]", "messages[1]"),
        (b"5]", "messages must be"),
        (b",]", "messages must be"),
        (b', {"role": "user"}, "}"]', "messages[2]"),
        (b', {"content": "x"}]', "messages[1]"),
        (b', {"role": "user", "content": "\xff"}]', "messages must be"),
        (b', {"role": "user", "content": 7}]', "messages[1].content"),
    ],
)
def test_what_is_wrong_behind_a_known_beginning_is_named(rest: bytes, said: str) -> None:
    """An error in new messages is told as if nothing had been known."""
    tokenizer = tokenizer_for(TINY)
    known = raw([message("user", LONG)])
    begin_chat({"messages": known}, tokenizer).ids()
    with pytest.raises(PromptError) as raised:
        begin_chat({"messages": msgspec.Raw(bytes(known)[:-1] + rest)}, tokenizer)
    assert said in str(raised.value)


def test_memory_is_bounded() -> None:
    """However many conversations come, what is remembered stays below its cap, the latest being kept."""
    tokenizer = tokenizer_for(TINY)
    assert tokenizer._conversations is not None
    memory = tokenizer._conversations.beginnings
    memory.bound(50_000)
    for number in range(100):
        messages = [message("user", f"{number} {LONG}"), *CONVERSATION]
        begin_chat({"messages": raw(messages)}, tokenizer).ids()
        assert 0 < memory.used_bytes <= 50_000
        found, _, _ = memory.find(memoryview(bytes(raw(messages))[:-1]), (), (True, ()))
        assert found is not None
    kept = [*memory._last._beginnings.values(), *memory._earlier._beginnings.values()]
    assert sum(beginning.size_bytes for beginning in kept) == memory.used_bytes


@pytest.mark.parametrize(
    "kwargs", [{"x": "y" * 300}, {"y" * 300: 1}, {f"x{number}": 1 for number in range(20)}, {"x": [1]}]
)
def test_options_that_would_fill_the_memory_are_not_remembered(kwargs: dict[str, Any]) -> None:
    """Long or nested template options go the whole way, with the same ids."""
    tokenizer = tokenizer_for(TINY)
    assert tokenizer._conversations is not None
    assert tokenizer._conversations.open(raw(CONVERSATION), {**OPTIONS, "template_kwargs": kwargs}) is None
    body = {"messages": raw(CONVERSATION), "chat_template_kwargs": kwargs}
    expected = begin_chat({"messages": CONVERSATION}, tokenizer).ids().tolist()
    assert begin_chat(body, tokenizer).ids().tolist() == expected
