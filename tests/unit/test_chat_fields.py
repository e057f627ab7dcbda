"""Chat bodies read behind what is known of them: the fields of the whole, or its error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat_fields import ChatFields, ReadChat
from tokenization.message_ends import last_message_end, messages_digest

DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def outcome(body: bytes, fields: ChatFields | None) -> object:
    """What is read, or what is said instead; None: of the whole body, at once."""
    try:
        read = DECODER.decode(body) if fields is None else checked(fields.read(body))
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    if fields is not None:
        return {name: bytes(value) if name == "messages" else value for name, value in read.items()}
    try:
        others = {name: msgspec.json.decode(value) for name, value in read.items() if name != "messages"}
    except (ValueError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return {name: bytes(value) if name == "messages" else others[name] for name, value in read.items()}


def checked(chat: ReadChat) -> dict[str, Any]:
    """The fields, if the messages end where they are said to."""
    if chat.ends:
        messages = memoryview(chat.fields["messages"])
        assert chat.ends[0].size_bytes == last_message_end(messages)
        sizes = [end.size_bytes for end in chat.ends]
        assert [end.digest for end in chat.ends] == [messages_digest(messages[:size]) for size in sizes]
        assert sizes == sorted(set(sizes), reverse=True)
    return chat.fields


texts = st.sampled_from(["", "a", '"}]', '{"role"', '"messages":[', "é😀", "[]{}", "word " * 20])
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=2)
messages = st.lists(
    st.one_of(
        st.builds(lambda text: {"role": "user", "content": text}, texts),
        st.builds(lambda content: {"role": "user", "content": content}, parts),
        st.builds(lambda text: {"content": text, "role": "assistant"}, texts),
        st.just({"role": "assistant", "content": [{"role": "user", "content": "a"}]}),
    ),
    max_size=8,
)
others = st.dictionaries(
    st.sampled_from(["model", "stream", "tools", "before", "metadata"]),
    st.sampled_from([True, "m", {"messages": [{"role": "user", "content": "a"}]}, [{"role": "x"}], None]),
)
# What a text may be changed by: at a place (a share of its length), bytes for bytes.
edits = st.tuples(
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from([b"", b" ", b"}", b"]", b"[", b'"', b"\\", b"\xff", b',"messages":[]', b"{}"]),
)


def written(sent: list[Any], fields: dict[str, Any], is_first: bool, spaces: bool) -> bytes:
    """A body as a client's JSON library writes it."""
    body = {"messages": sent, **fields} if is_first else {**fields, "messages": sent}
    return json.dumps(body, separators=None if spaces else (",", ":")).encode()


def edited(body: bytes, edit: tuple[float, int, bytes]) -> bytes:
    """A body that somebody has broken, or nearly."""
    share, removed, put = edit
    at = int(share * len(body))
    return body[:at] + put + body[at + removed :]


@pytest.fixture(autouse=True)
def _however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is short counts as shared."""
    monkeypatch.setattr("tokenization.message_ends._SHARED_LEAST_BYTES", 0)


# Kept over all examples, so that what one leaves behind can harm the next.
REMEMBERING = ChatFields(known_max=200, long_bytes=0)


@settings(deadline=None, max_examples=300)
@given(
    messages,
    others,
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 8), max_size=3),
    st.lists(edits, max_size=3),
    st.lists(messages, max_size=2),
)
def test_whatever_was_read_before_the_fields_are_those_of_the_whole(
    talk: list[Any],
    fields: dict[str, Any],
    is_first: bool,
    spaces: bool,
    turns: list[int],
    broken: list[tuple[float, int, bytes]],
    otherwise: list[list[Any]],
) -> None:
    """A conversation sent turn by turn, otherwise at its end, or with errors, is read as if it were new."""
    for turn in (*turns, len(talk)):
        body = written(talk[:turn], fields, is_first, spaces)
        assert outcome(body, REMEMBERING) == outcome(body, None)
    for ending in otherwise:
        body = written([*talk[:-1], *ending], fields, is_first, spaces)
        assert outcome(body, REMEMBERING) == outcome(body, None)
    for edit in broken:
        body = edited(written(talk, fields, is_first, spaces), edit)
        assert outcome(body, REMEMBERING) == outcome(body, None)


def talk(turns: int) -> list[dict[str, str]]:
    """A conversation."""
    return [{"role": "user", "content": f"{at} " + "word " * 100} for at in range(turns)]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("new", [0, 1, 2, 4, 8])
def test_only_what_is_new_is_read(
    is_first: bool, spaces: bool, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a known beginning the decoder sees the new messages and the other fields, and no more."""
    fields, others = ChatFields(long_bytes=0), {"model": "m", "stream": True}
    fields.read(written(talk(20 - new), others, is_first, spaces))
    seen = watched(monkeypatch)
    body = written(talk(20), others, is_first, spaces)
    assert outcome(body, fields) == outcome(body, None)
    assert [size for size in seen if size > new * 600 + 200] == []
    # Once read, all of it is known.
    seen.clear()
    fields.read(body)
    assert [size for size in seen if size > 200] == []


def test_a_beginning_that_others_share_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a body that goes on otherwise behind another's messages, only the last one is read."""
    fields = ChatFields(long_bytes=0)
    fields.read(written(talk(20), {}, True, True))
    seen = watched(monkeypatch)
    for question in ("why?", "how?"):
        body = written([*talk(19), {"role": "user", "content": question}], {}, True, True)
        assert outcome(body, fields) == outcome(body, None)
    assert max(seen) < 300


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":{"messages":%b]},"messages":%b]}',
        b'{"messages":%b],"messages":%b]}',
        b'{"messages":%b],"messages":[]}',
        b'{"messages":%b],"messages":"%%b"}',
        b'{"a":"\\"messages\\":[","messages":%b]}',
        b'{"messages":[%b]]}',
        b'[{"messages":%b]}]',
        b'{"messages":%b,]}',
        b'{"messages":%b}',
        b'{"messages":%b]',
        b'{"messages":%b]}}',
        b'{"messages":%b {"role":"user"}]}',
        b'{"messages":%b,{"role":"user","content":}]}',
    ],
)
def test_known_messages_count_only_in_their_place(body: bytes) -> None:
    """Known messages elsewhere, twice, or in a body that is no JSON, change nothing."""
    fields, known = ChatFields(long_bytes=0), json.dumps(talk(3)).encode()[:-1]
    fields.read(b'{"messages":%b]}' % known)
    sent = body.replace(b"%b", known).replace(b"%%", b"%")
    assert outcome(sent, fields) == outcome(sent, None)


def test_what_is_remembered_is_bounded() -> None:
    """Any number of conversations are read rightly, and their digests do not pile up."""
    fields = ChatFields(known_max=10, long_bytes=0)
    for number in range(100):
        body = written([{"role": "user", "content": str(number)}], {}, True, False)
        assert outcome(body, fields) == outcome(body, None)
        assert len(fields._young) + len(fields._old) <= 10


def test_short_bodies_are_read_at_once() -> None:
    """Nothing is remembered of a body that costs less to read than to look up."""
    fields = ChatFields(long_bytes=10_000)
    fields.read(written(talk(3), {}, True, False))
    assert not fields._young


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the texts that the decoder of whole bodies is given, from now on."""
    seen: list[int] = []

    class Watched:
        def decode(self, body: bytes) -> dict[str, msgspec.Raw]:
            seen.append(len(body))
            return DECODER.decode(body)

    monkeypatch.setattr("router.chat_fields._RAW_FIELDS", Watched())
    return seen
