"""Where a session's prompt leaves its last one, and why."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from router.analysis.breaks import Break, PrefixBreaks, Prompt
from router.analysis.parts import read_parts
from router.prompts.request import RequestKind, RouteRequest, api_request, read_fields
from tests.support.depth import examples

BLOCK = 16
KEY = b"k" * 16
Message = dict[str, Any]


def chat(messages: list[Message], headers: dict[str, str] | None = None, **fields: Any) -> RouteRequest:
    """Return a chat as a door reads it."""
    body = msgspec.json.encode({"model": "m", "messages": messages, **fields})
    parsed = read_fields(RequestKind.CHAT, body)
    return api_request("r", RequestKind.CHAT, parsed, len(body), headers=headers or {})


def ids(messages: list[Message], tools: object = None) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return token ids of a template: a token per character, a mark before each message, one at the end."""
    text = json.dumps(tools) + "".join(f"\x01{each['role']}\x02{each['content']}" for each in messages)
    return np.array([ord(letter) for letter in text + "\x01assistant\x02"], np.uint32)


class Watch:
    """Sessions of chats, one after the other."""

    def __init__(self, **settings: Any) -> None:
        self.breaks, self.ids = PrefixBreaks(BLOCK, KEY, **settings), count()

    def turn(
        self,
        messages: list[Message],
        *,
        session: str | None = None,
        tools: object = None,
        cached: int = 0,
        tokens: np.ndarray[Any, np.dtype[np.uint32]] | None = None,
        scope: int = 1,
    ) -> Break | None:
        """Return the break of a chat."""
        request = chat(
            messages, {"x-session-id": session} if session else {}, **({"tools": tools} if tools else {})
        )
        tokens = ids(messages, tools) if tokens is None else tokens
        parts = read_parts(request)
        return self.breaks.observe(
            Prompt(str(next(self.ids)), 5.0, "m", scope, parts, tokens, cached, 100.0)
        )[2]


def talk(*contents: str, system: str = "Be brief. " * 20) -> list[Message]:
    """Return a system prompt, then messages of user and assistant in turns."""
    roles = ["user", "assistant"]
    said = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *said]


LONG = [f"{at} was said at length. " * 10 for at in range(12)]


def test_a_prompt_that_continues_the_last_one_is_no_break() -> None:
    """A turn that appends messages to its last prompt breaks nothing."""
    watch = Watch()
    assert [watch.turn(talk(*LONG[: 2 * turn + 1])) for turn in range(5)] == [None] * 5
    (session,) = watch.breaks.page()["sessions"]
    assert (session["turns"], session["breaks"], session["lost_tokens"]) == (5, 0, 0)


def test_a_changed_system_prompt_is_named_with_its_token() -> None:
    """Another system prompt is found by the first user message alone, with offset, cost and message."""
    watch = Watch()
    watch.turn(talk(*LONG[:3], system="Rules. " * 40))
    found = watch.turn(talk(*LONG[:5], system="Rules. " * 20 + "X" + "Rules. " * 19))
    assert found is not None
    before, after = ids(talk(system="Rules. " * 40)), ids(talk(system="Rules. " * 20 + "X"))
    first = next(at for at in range(len(before)) if before[at] != after[at])
    assert (found.part, found.message, found.offset_tokens) == ("system", 0, first)
    whole = len(ids(talk(*LONG[:3], system="Rules. " * 40)))
    assert found.lost_tokens == whole // BLOCK * BLOCK - first // BLOCK * BLOCK
    assert found.lost_s == found.lost_tokens / 100.0


def test_a_moving_nonce_is_diagnosed_from_its_second_change_on() -> None:
    """Breaks of a session at one place, turn after turn, are a nonce."""
    watch = Watch()
    turns = [
        talk(*LONG[: 2 * turn + 1], system=f"id={turn * 7919:06} " + "Be kind. " * 40) for turn in range(4)
    ]
    parts = [found and found.part for found in map(watch.turn, turns)]
    assert parts == [None, "system", "nonce", "nonce"]


def test_tools_history_and_template_are_told_apart() -> None:
    """Each cause has its name, and the number of the first message that differs."""

    def second(first: list[Message], then: list[Message], **changes: Any) -> tuple[str, int | None] | None:
        watch = Watch()
        watch.turn(first, session="s", tools=["a" * 100])
        found = watch.turn(then, session="s", **{"tools": ["a" * 100], **changes})
        return None if found is None else (found.part, found.message)

    six, eight = talk(*LONG[:6]), talk(*LONG[:8])
    edited = [{**each, "content": "No. " * 20} if at == 3 else each for at, each in enumerate(eight)]
    last = [{**each, "content": "No. " * 20} if at == 6 else each for at, each in enumerate(eight)]
    assert second(six, eight) is None
    assert second(six, eight, tools=["b" * 100]) == ("tools", None)
    assert second(six, edited) == ("history_edited", 3)
    assert second(six, last) == ("message", 6)
    assert second(six, [six[0], *eight[3:]]) == ("history_cut", 1)
    assert second(six, eight, tokens=ids(eight, ["c" * 100])) == ("template", None)
    assert second(six, six[:4]) is None


def test_moved_cache_marks_change_no_message() -> None:
    """The marks of Anthropic's caching do not count as a changed message."""
    marked = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    plain = [{"type": "text", "text": "x"}]
    one, other = (
        read_parts(chat([{"role": "user", "content": content}], system=content))
        for content in (marked, plain)
    )
    assert one.messages.tolist() == other.messages.tolist()


def test_requests_that_only_begin_alike_are_no_session() -> None:
    """Without an id, another chat with the same first question is not taken for the next turn."""
    watch = Watch()
    for user in range(3):
        assert watch.turn(talk("Hello", system=f"You serve user {user}. " * 20)) is None
    assert watch.turn(talk(*LONG[:5]), scope=1) is None
    assert watch.turn(talk(*LONG[:7], system="Other. " * 50), scope=2) is None


def test_tokens_cached_otherwise_are_not_lost() -> None:
    """What the picked pod has cached behind the break costs nothing."""
    watch = Watch()
    watch.turn(talk(*LONG[:3]))
    changed = talk(*LONG[:5], system="Y" + "Be brief. " * 20)
    assert watch.turn(changed, cached=len(ids(changed))) is None


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=40, max_size=120),
    st.integers(0, 119),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_the_offset_is_the_first_token_that_differs(last: list[int], at: int, more: list[int]) -> None:
    """For any tokens, a break is told exactly if more than two blocks are lost, at the first difference."""
    watch, at = Watch(), at % len(last)
    then = [*last[:at], 9, *last[at + 1 :], *more]
    watch.turn(talk("a"), session="s", tokens=np.array(last, np.uint32))
    found = watch.turn(talk("a"), session="s", tokens=np.array(then, np.uint32))
    lost = len(last) // BLOCK * BLOCK - at // BLOCK * BLOCK
    if at >= len(last) - 2 * BLOCK or lost <= 0:
        assert found is None
    else:
        assert found is not None
        assert (found.offset_tokens, found.lost_tokens) == (at, lost)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000)), max_size=60))
def test_memory_stays_within_its_bound(turns: list[tuple[int, int]]) -> None:
    """Whatever comes, the sessions kept are the latest that fit into the bytes allowed."""
    watch, bound = Watch(bytes_max=20_000), 20_000
    for session, length in turns:
        watch.turn(talk("a"), session=str(session), tokens=np.zeros(length, np.uint32))
    kept = watch.breaks.page()["sessions"]
    assert len(kept) <= bound // 2000
    latest = dict.fromkeys(session for session, _ in turns)
    assert len(kept) <= len(latest)


def test_no_text_is_shown() -> None:
    """The page has numbers and digests, none of them equal under another key."""
    pages = []
    for key in (b"a" * 16, b"b" * 16):
        watch = Watch()
        watch.breaks = PrefixBreaks(BLOCK, key)
        watch.turn(talk(*LONG[:3]))
        watch.turn(talk(*LONG[:5], system="Secret. " * 30))
        pages.append(watch.breaks.page())
    assert "ecret" not in json.dumps(pages)
    assert pages[0]["breaks"][0]["digest"] != pages[1]["breaks"][0]["digest"]


def test_interleaved_chats_with_one_first_question_are_kept_apart() -> None:
    """Without ids, chats that share a first question are told apart by their last two messages."""
    watch = Watch()
    turns = [
        talk(*["Hello", *LONG[4 * user :]][: 2 * turn + 1], system=f"You serve user {user}. " * 20)
        for turn in range(3)
        for user in range(3)
    ]
    assert [watch.turn(messages) for messages in turns] == [None] * 9
    assert [session["turns"] for session in watch.breaks.page()["sessions"]] == [3, 3, 3]
