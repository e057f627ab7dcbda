"""Conversations whose templates look around: the ids of the whole, at the cost of what is new."""

from __future__ import annotations

import json
import logging
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from router.tokenizer_metrics import TokenizerCollector
from tests.unit.looking_templates import ASKED, FRONTED, LATEST, LOOKING
from tests.unit.test_chat_turns import TOKENS
from tests.unit.test_loop_run import TOOL, Message, calls, one, result, says, system, user
from tokenization import TINY_DIRECTORY, PromptError, PromptTokenizer, resumed
from tokenization.chat_template import ChatTemplate
from tokenization.openai_prompts import begin_chat
from tokenization.resumed import ResumedConversation

LONG = "some words of a long answer, " * 15
PLAIN = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))


COUNTING = """\
{%- set ns = namespace(n=0) %}{% for m in messages %}{{ m.content }}{% set ns.n = 1 %}
{%- if m.name %}{{ x }}{% endif %}{% endfor %}"""


def tokenizer_for(source: str, tools: str | None = None) -> PromptTokenizer:
    """The tiny tokenizer behind other templates."""
    library = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    tool_template = None if tools is None else ChatTemplate(tools, TOKENS)
    return PromptTokenizer(library, ChatTemplate(source, TOKENS), frozenset(), tool_template)


def raw(messages: list[Message]) -> msgspec.Raw:
    """Messages as a client's JSON library writes them; arguments are JSON text."""
    carried = json.loads(json.dumps(messages))
    for message in carried:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return msgspec.Raw(json.dumps(carried).encode())


def outcome(tokenizer: PromptTokenizer, body: dict[str, Any]) -> list[int] | str:
    """A prompt's ids, or what is said instead."""
    try:
        return begin_chat(body, tokenizer).ids().tolist()  # type: ignore[no-any-return]
    except PromptError as error:
        return str(error)


def conversation(turns: int) -> list[Message]:
    """A long talk with tools, in turns."""
    messages = [system(LONG)]
    for turn in range(turns):
        messages += user(f"{turn} {LONG}"), calls(), result(LONG), says(f"{turn} {LONG}")
    return [*messages, user(LONG)]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short conversations are taken up again as well, and no check helps."""
    monkeypatch.setattr(resumed, "_LEAST_BYTES", 0)
    monkeypatch.setattr(resumed, "_SHARED_LEAST_CHARS", 0)
    monkeypatch.setattr("tokenization.message_ends._SHARED_LEAST_BYTES", 0)
    monkeypatch.setattr(resumed, "_CHECKS_FIRST", 0)
    monkeypatch.setattr(resumed, "_CHECK_EVERY", 1 << 60)


# Kept over all examples, so that what one leaves behind can harm the next.
REMEMBERING = {name: tokenizer_for(source) for name, source in LOOKING.items()}
DECODED = {name: tokenizer_for(source) for name, source in LOOKING.items()}
bodies = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "add_special_tokens": st.booleans(),
        "chat_template_kwargs": st.sampled_from(
            [{"enable_thinking": False}, {"date_string": LONG}, {"ns": [1]}]
        ),
        "tools": st.sampled_from([[TOOL], [TOOL, TOOL]]),
        "truncate_prompt_tokens": st.just(5),
    },
)
longer = st.sampled_from(
    [
        user(LONG),
        says(LONG),
        says(f"{LONG}</think>{LONG}"),
        result(LONG),
        user("<|im_start|>"),
        says("<|im_end|>"),
    ]
)
odd = st.sampled_from(
    [
        {"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "text", "text": "b"}]},
        {"content": "a", "role": "user"},
        {"role": "developer", "content": LONG},
        {"role": "user", "content": 7},
        {"role": "user"},
    ]
)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", LOOKING)
@settings(deadline=None, max_examples=100)
@given(
    messages=st.lists(st.one_of(longer, longer, one, one, one, odd), min_size=1, max_size=9),
    turns=st.lists(st.tuples(st.integers(1, 9), bodies), max_size=5),
    body=bodies,
    otherwise=st.lists(st.lists(st.one_of(longer, one, odd), max_size=2), max_size=2),
)
def test_whatever_was_remembered_the_ids_are_those_of_the_whole(
    name: str,
    messages: list[Message],
    turns: list[tuple[int, dict[str, Any]]],
    body: dict[str, Any],
    otherwise: list[list[Message]],
) -> None:
    """Sent turn by turn, or with another end, as JSON it has the ids, or the error, of itself decoded."""
    growing = [(messages[:turn], given_body) for turn, given_body in turns]
    endings = [([*messages[:-1], *ending], body) for ending in otherwise]
    for sent, given_body in (*growing, (messages, body), *endings):
        expected = outcome(DECODED[name], {**given_body, "messages": json.loads(bytes(raw(sent)))})
        assert outcome(REMEMBERING[name], {**given_body, "messages": raw(sent)}) == expected


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["asked", "fronted", "stateful", "parts"])
def test_only_what_is_new_is_looked_at(name: str) -> None:
    """The next turn of a long conversation is encoded behind the known ones, with the whole's ids."""
    tokenizer, messages = tokenizer_for(LOOKING[name]), conversation(6)
    for _ in range(4):
        whole = tokenizer.render_chat(messages)
        begun = begin_chat({"messages": raw(messages)}, tokenizer)
        assert begun.ids().tolist() == PLAIN.encode(whole, add_special_tokens=False).ids
        messages = [*messages, says(LONG), user(f"and {LONG}")]
    assert tokenizer.resumed == (3, 0)
    assert begun.missing_chars < 3 * (len(LONG) + 60) < len(whole) / 3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["asked", "fronted", "stateful", "parts"])
@pytest.mark.parametrize("turns", [0, 3])
def test_a_beginning_that_others_share_is_known(name: str, turns: int) -> None:
    """Behind messages that another conversation began with, a new question costs only its own text."""
    tokenizer, messages = tokenizer_for(LOOKING[name]), conversation(turns)[:-1]
    for question in range(3):
        asked = [*messages, user(f"{question}?")]
        begun = begin_chat({"messages": raw(asked)}, tokenizer)
        whole = tokenizer.render_chat(asked)
        assert begun.ids().tolist() == PLAIN.encode(whole, add_special_tokens=False).ids
    assert tokenizer.resumed == (2, 0)
    assert begun.missing_chars < len(LONG)


@pytest.mark.parametrize(("source", "known"), [(LATEST, 0), (FRONTED, 2)])
def test_a_beginning_that_shows_little_is_not_remembered(source: str, known: int) -> None:
    """What others share is remembered where it is long, wherever the template shows it."""
    tokenizer = tokenizer_for(source)
    asked = {"messages": raw([system(12 * LONG), user(LONG)])}
    begin_chat(asked, tokenizer).ids()
    (conversations,) = tokenizer._resumed.values()
    memory = conversations.beginnings
    assert len(memory._last._beginnings) + len(memory._earlier._beginnings) == known


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["places", "latest"])
def test_what_was_shown_by_the_next_message_is_not_shared(name: str) -> None:
    """A round that has looked at the last message is shown anew where that is another."""
    tokenizer = tokenizer_for(LOOKING[name])
    for last in (result(LONG), user(LONG), says(LONG), result("again")):
        messages = [user(LONG), says(LONG), last]
        whole = outcome(tokenizer, {"messages": json.loads(bytes(raw(messages)))})
        assert outcome(tokenizer, {"messages": raw(messages)}) == whole


@pytest.mark.usefixtures("unchecked")
def test_a_chain_of_calls_goes_on_though_its_end_looks_ahead() -> None:
    """Of messages whose last one is shown otherwise at the end, the ones before it are known next time."""
    tokenizer, messages = tokenizer_for(ASKED), conversation(3)
    for turn in range(4):
        messages = [*messages, calls(f"{turn} {LONG}"), result(f"{turn} {LONG}")]
        whole = PLAIN.encode(tokenizer.render_chat(messages), add_special_tokens=False).ids
        assert outcome(tokenizer, {"messages": raw(messages)}) == whole
    assert tokenizer.resumed == (3, 0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("longer_token", ["<|a_token_longer_than_all_others|>", "<|im_start|>opens with it"])
def test_an_answer_may_begin_otherwise_than_it_was_opened(longer_token: str) -> None:
    """A special token behind known messages proves their end, unless it may become a longer one."""
    library = Tokenizer.from_file(str(TINY_DIRECTORY / "tokenizer.json"))
    library.add_special_tokens([longer_token])
    source = f"{ASKED}{{{{ 'thinks of it: ' }}}}".replace(
        "'<|im_start|>says ' }}{% if", "'<|im_start|>' }}{% if"
    )
    tokenizer = PromptTokenizer(library, ChatTemplate(source, TOKENS), frozenset())
    messages = conversation(3)
    for answer in ("so", "opens with it", "so"):
        whole = library.encode(tokenizer.render_chat(messages), add_special_tokens=False).ids
        assert outcome(tokenizer, {"messages": raw(messages)}) == whole
        messages = [*messages, says(answer), user(LONG)]
    assert (tokenizer.resumed[0] == 2) == ("others" in longer_token)


@pytest.mark.usefixtures("unchecked")
def test_tools_may_have_a_template_of_their_own() -> None:
    """What one template showed is not taken for what the other shows."""
    tokenizer, decoded = (tokenizer_for(FRONTED, tools=ASKED) for _ in range(2))
    messages = [user(LONG), says(LONG), user(LONG)]
    for turn in range(4):
        for given_body in ({}, {"tools": [TOOL]}):
            expected = outcome(decoded, {**given_body, "messages": messages})
            assert outcome(tokenizer, {**given_body, "messages": raw(messages)}) == expected
        messages = [*messages, says(f"{turn} {LONG}"), user(LONG)]
    assert tokenizer.resumed == (6, 0)


@pytest.mark.usefixtures("unchecked")
def test_a_beginning_counts_only_where_it_ends_as_it_did() -> None:
    """A last word that the next message goes on with is encoded anew, though all its bytes are known."""
    tokenizer = tokenizer_for(f"{COUNTING} answer:")
    # The first exact cut behind 1024 characters is where the message ends.
    first = user("w " * 512 + "th")
    begin_chat({"messages": raw([first, user("")])}, tokenizer).ids()
    for text in ("e", " e"):
        messages = [first, user(""), user(text)]
        whole = PLAIN.encode(tokenizer.render_chat(messages), add_special_tokens=False).ids
        assert outcome(tokenizer, {"messages": raw(messages)}) == whole


@pytest.mark.usefixtures("unchecked")
def test_an_option_that_would_fill_the_memory_is_not_remembered() -> None:
    """What rounds may read of a client's options counts as memory."""
    tokenizer = tokenizer_for(COUNTING)
    (conversations,) = tokenizer._resumed.values()
    conversations.beginnings.bound(50_000)
    for text, uses in (("x" * 100_000, 0), ("x" * 1000, 1)):
        for turns in (3, 4):
            body = {"messages": raw(conversation(turns)[:-1]), "chat_template_kwargs": {"x": text}}
            begin_chat(body, tokenizer).ids()
        assert tokenizer.resumed == (uses, 0)


def test_short_conversations_are_not_remembered() -> None:
    """What is rendered in less time than it takes to look for it is rendered."""
    tokenizer = tokenizer_for(ASKED)
    for messages in ([user()], [user(), says(), user()]):
        begin_chat({"messages": raw(messages)}, tokenizer).ids()
    assert tokenizer.resumed == (0, 0)


def test_a_wrong_rendering_is_found_told_and_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where known messages go on wrongly, the whole is shown from then on; a metric and a line say so."""
    tokenizer, messages = tokenizer_for(ASKED), conversation(3)
    begin_chat({"messages": raw(messages)}, tokenizer).ids()
    resume = ChatTemplate.resume

    def wrong(self: ChatTemplate, *arguments: Any) -> Any:
        shown = resume(self, *arguments)
        return shown if shown is None or arguments[1] is None else shown._replace(behind=f"{shown.behind}!")

    monkeypatch.setattr(ChatTemplate, "resume", wrong)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            messages = [*messages, says(LONG), user(LONG)]
            whole = PLAIN.encode(tokenizer.render_chat(messages), add_special_tokens=False).ids
            assert outcome(tokenizer, {"messages": raw(messages)}) == whole
    assert len(caplog.records) == 1
    assert "rendered wrongly" in caplog.text
    registry = CollectorRegistry()
    registry.register(TokenizerCollector({"m": tokenizer}))
    assert registry.get_sample_value("kvroute_router_resumed_renderings_total", {"model": "m"}) == 1.0
    assert registry.get_sample_value("kvroute_router_resumed_renderings_wrong_total", {"model": "m"}) == 1.0


def test_the_first_uses_are_checked_and_then_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks cost a whole rendering each, so they become rare."""
    monkeypatch.setattr(resumed, "_CHECKS_FIRST", 2)
    monkeypatch.setattr(resumed, "_CHECK_EVERY", 5)
    tokenizer, messages = tokenizer_for(ASKED), conversation(3)
    begin_chat({"messages": raw(messages)}, tokenizer).ids()
    render = ChatTemplate.render
    checked = Mock(side_effect=lambda template, messages, **given: render(template, messages, **given))
    monkeypatch.setattr(ChatTemplate, "render", lambda *arguments, **given: checked(*arguments, **given))
    seen = []
    for _ in range(10):
        messages = [*messages, says(LONG), user(LONG)]
        begin_chat({"messages": raw(messages)}, tokenizer).ids()
        seen.append(checked.call_count)
    assert seen == [1, 2, 2, 2, 3, 3, 3, 3, 3, 4]


def test_templates_that_never_can_are_seldom_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template all of whose rounds look at the loop's end is rendered as it is, but for a few tries."""
    render = ResumedConversation.render
    asked = Mock(side_effect=lambda conversation, messages: render(conversation, messages))
    monkeypatch.setattr(ResumedConversation, "render", lambda *arguments: asked(*arguments))
    tokenizer = tokenizer_for("{% for m in messages %}{{ m.content ~ loop.length }}{% endfor %}")
    for number in range(100):
        messages = [user(f"{number} {LONG}"), *conversation(3)]
        whole = PLAIN.encode(tokenizer.render_chat(messages), add_special_tokens=False).ids
        assert outcome(tokenizer, {"messages": raw(messages)}) == whole
    assert 32 <= asked.call_count <= 36


def test_memory_is_bounded() -> None:
    """However many conversations come, what is remembered stays below its cap, the latest being kept."""
    tokenizer = tokenizer_for(ASKED)
    (memory,) = [conversations.beginnings for conversations in tokenizer._resumed.values()]
    memory.bound(100_000)
    for number in range(60):
        messages = [user(f"{number} {LONG}"), *conversation(3)]
        kwargs = {"enable_thinking": "x" * 1000}
        begin_chat({"messages": raw(messages), "chat_template_kwargs": kwargs}, tokenizer).ids()
        assert 0 < memory.used_bytes <= 100_000
        assert begin_chat({"messages": raw(messages)}, tokenizer).missing_chars == 0
    kept = [*memory._last._beginnings.values(), *memory._earlier._beginnings.values()]
    assert sum(known.size_bytes for known in kept) == memory.used_bytes


@pytest.mark.usefixtures("unchecked")
def test_zero_is_told_apart_from_zero_below() -> None:
    """Equal numbers that a template shows in two ways are not the same to rounds that are left out."""
    tokenizer = tokenizer_for(
        "{% for m in messages %}<|im_start|>{{ m.content }}{{ x }}{% endfor %}<|im_start|>"
    )
    messages = [user(LONG), says(LONG), user(LONG), says(LONG), user(LONG)]
    for count, zero in ((1, "0.0"), (3, "0.0"), (5, "-0.0")):
        body = {"messages": raw(messages[:count]), "chat_template_kwargs": {"x": float(zero)}}
        ids = begin_chat(body, tokenizer).ids().tolist()
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert shown == f"<|im_start|>{LONG}{zero}" * count + "<|im_start|>"
    assert tokenizer.resumed == (1, 0)
