"""Ends of messages in JSON text: lists that go on alike share them, others do not."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenization.message_ends import (
    MessagesEnd,
    guessed_end,
    last_message_end,
    message_ends,
    messages_behind,
    messages_digest,
    shared_end,
    turn_ends,
)

contents = st.sampled_from(["", "a", '"}]', '{"role"', "}, {", "é😀", "word " * 99]) | st.text(max_size=9)
talks = st.lists(contents.map(lambda text: {"role": "user", "content": text}), min_size=1, max_size=9)


@pytest.fixture
def however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is short counts as shared."""
    monkeypatch.setattr("tokenization.message_ends._SHARED_LEAST_BYTES", 0)


def ends_of(text: bytes, new_messages: int) -> list[MessagesEnd]:
    """The ends of a list that is all of a text."""
    end = last_message_end(memoryview(text))
    assert end is not None
    return list(message_ends(text, 0, end, new_messages))


@given(talks, st.integers(0, 8), st.booleans(), st.integers(0, 9))
def test_a_list_that_goes_on_is_found_by_the_end_of_what_was_sent_before(
    talk: list[dict[str, str]], new: int, spaces: bool, front: int
) -> None:
    """The end of all messages of a request is among the ends of the next one, wherever its list stands."""
    separators = None if spaces else (",", ":")
    before = json.dumps(talk[: max(1, len(talk) - new)], separators=separators).encode()
    (sent,) = ends_of(before, 0)
    assert sent == (len(before) - 1, messages_digest(memoryview(before)[:-1]))
    now = b"x" * front + json.dumps(talk, separators=separators).encode()
    # A content may look like messages, and is then counted as such.
    assert sent in message_ends(bytearray(now), front, len(now) - 1, 99)
    if not any('{"role"' in message["content"] for message in talk):
        assert sent in message_ends(now, front, len(now) - 1, new)


@given(talks, st.booleans(), st.integers(0, 9))
def test_the_ends_of_a_turn_are_the_first_and_third_of_all(
    talk: list[dict[str, str]], spaces: bool, front: int
) -> None:
    """What is looked for first is what looking behind any two messages finds."""
    text = b"x" * front + json.dumps(talk, separators=None if spaces else (",", ":")).encode()
    ends = turn_ends(bytearray(text), front, len(text) - 1)
    assert [*ends] == [*message_ends(text, front, len(text) - 1, 2)][::2]
    assert not turn_ends(text, front, front)


parts = st.lists(contents.map(lambda text: {"type": "text", "text": text}), max_size=2)
odd = st.one_of(
    st.builds(lambda content: {"role": "user", "content": content}, parts),
    st.builds(lambda text: {"content": text, "role": "user"}, contents),
    st.builds(lambda text: {"role": "user", "more": [{"a": text}, {"role": text}]}, contents),
    st.builds(lambda text: {"role": "user", "more": text, "inner": [{"role": text}]}, contents),
    st.builds(lambda text: {"role": "user", "content": text, "inner": {"role": text}}, contents),
)


@pytest.mark.usefixtures("however_short")
@given(talks, st.none() | odd, st.booleans())
@example([{"role": "user", "content": ""}] * 2, {"content": "", "role": "user"}, False)
@example([{"role": "user", "content": ""}] * 2, {"role": "user", "inner": [{}, {"role": ""}]}, False)
def test_what_lists_share_ends_in_front_of_the_last_message_or_is_not_told(
    talk: list[object], last: object, spaces: bool
) -> None:
    """Whatever a message holds, none is cut in two, and none but the last is left out."""
    talk = talk if last is None else [*talk, last]
    texts = [
        json.dumps(part, separators=None if spaces else (",", ":")).encode() for part in (talk[:-1], talk)
    ]
    before, view = texts[0][:-1], memoryview(texts[1])[:-1]
    shared = shared_end(view)
    if shared is not None or (last is None and len(talk) > 1):
        assert shared == (len(before), messages_digest(memoryview(before)))
        behind = messages_behind(view, shared.size_bytes)
        assert behind is not None
        assert json.loads(behind) == [talk[-1]]


def test_little_is_not_shared() -> None:
    """What is shorter than two kilobytes, or no list of messages, is nobody's beginning."""
    for chars, is_shared in ((1 << 10, False), (4 << 10, True)):
        text = json.dumps([{"role": "system", "content": "x" * chars}, {"role": "user", "content": "?"}])
        assert (shared_end(memoryview(text.encode())[:-1]) is not None) == is_shared
    assert shared_end(memoryview(b"")) is None


@given(talks, st.floats(0, 1, exclude_max=True))
def test_one_other_byte_is_another_list(talk: list[dict[str, str]], share: float) -> None:
    """No end behind a byte that differs is taken for the same."""
    text = bytearray(json.dumps(talk).encode())
    end = len(text) - 1
    ends = message_ends(text, 0, end, 8)
    at = int(share * end)
    text[at] ^= 1
    changed = {messages_digest(memoryview(text)[: known.size_bytes]) for known in ends}
    same = {known.digest for known in ends if known.size_bytes <= at}
    assert changed & {known.digest for known in ends} == same


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (b'[{"role":"user"}]', 16),
        (b'[{"role":"user"} \r\n\t]', 16),
        (b'[{"role":"user"},5]', None),
        (b'[{"role":"user"}' + b" " * 64 + b"]", None),
        (b'"}]', 2),
        (b"[]", None),
        (b"", None),
    ],
)
def test_where_the_last_message_ends_is_seen_or_not_told(text: bytes, end: int | None) -> None:
    """Only what a few bytes at the list's end show counts."""
    assert last_message_end(memoryview(text)) == end


@pytest.mark.parametrize(
    ("body", "start", "guess"),
    [
        (b'{"messages":[{"role":"user"}],"model":"m"}', 12, 28),
        (b'{"messages":[{"content":"a"}],"model":"m"}', 12, 0),
        (b'{"messages":[{"role":"user"} ],"model":"m"}', 12, 0),
        (b'{"a":{"role":"x"},"messages":[]}', 29, 0),
    ],
)
def test_the_end_of_a_list_that_is_not_decoded_is_guessed(body: bytes, start: int, guess: int) -> None:
    """The guess is the closing brace before a bracket behind the last thing that looks like a message."""
    assert guessed_end(body, start) == guess
