"""Routers' messages to each other: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import PeerError
from router.feedback.lifecycle import DONE, FAILED, FIRST_TOKEN, REFUSED, Heard
from router.feedback.messages import (
    KEYS_MAX,
    MESSAGE_BYTES_MAX,
    FollowRequest,
    News,
    Sent,
    heard_of,
    news_messages,
    read,
    read_news,
    sent_of,
)
from router.inflight.dispatch import Dispatch
from router.inflight.rates import RateSample
from tests.support.depth import examples

POD = "10.0.0.1:8000"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NUMBERS = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e6)
SENT = st.builds(
    Sent,
    NUMBERS,
    TEXTS.filter(bool),
    TEXTS,
    st.none() | TEXTS,
    st.integers(0, 1 << 40),
    SECONDS,
    st.none() | TEXTS,
    st.lists(NUMBERS, max_size=20).map(lambda keys: np.array(keys, np.uint64).tobytes()),
    st.booleans(),
)
HEARD = st.builds(
    Heard,
    TEXTS,
    st.sampled_from([FIRST_TOKEN, DONE, FAILED, REFUSED]),
    TEXTS,
    st.none() | TEXTS,
    st.none() | SECONDS,
    st.none() | NUMBERS,
)
NEWS = st.builds(News, st.lists(SENT), *[st.lists(NUMBERS)] * 3, st.lists(HEARD))


def plain(news: list[News]) -> list[list[Any]]:
    """All of it by field."""
    return [[one for part in news for one in getattr(part, name)] for name in News.__struct_fields__]


def carried(news: News) -> list[News]:
    """News over the wire."""
    return [read_news(message) for message in news_messages(news)]


@settings(max_examples=examples(200), deadline=None)
@given(news=NEWS)
def test_what_is_told_is_what_is_read(news: News) -> None:
    """Every field of every kind survives the wire."""
    assert plain(carried(news)) == plain([news])


def test_nothing_to_tell_is_no_message() -> None:
    """An empty account has nothing that had to be sent, and an empty message is news of nothing."""
    assert list(news_messages(News())) == []
    assert read_news(b"") == News()


def test_much_goes_in_several_messages_in_the_same_order() -> None:
    """Many requests are told piece by piece, and what ends behind what begins."""
    keys = bytes(8 * KEYS_MAX)
    news = News([Sent(number, POD, key_bytes=keys) for number in range(10)], ended=list(range(100_000)))
    messages = list(news_messages(news))
    assert len(messages) > 5
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX + 1024
    assert plain(carried(news)) == plain([news])


def test_a_text_that_no_message_may_hold_is_told_as_well_as_it_can_be() -> None:
    """A client's strange or long request id spoils nothing for others."""
    dispatch = Dispatch("a\ud800b" + "x" * 2000, POD, 1, 0.0, 0.0, None, RateSample.EXACT, 0.0)
    heard = heard_of(Heard("\udcff", DONE, "report", "p" * 600))
    (news,) = carried(News([sent_of(1, dispatch, None, 1.0, prefilled=False)], heard=[heard]))
    assert news.sent[0].request_id == "a?b" + "x" * 509
    assert (news.heard[0].request_id, news.heard[0].pod) == ("?", "p" * 512)


def test_of_a_long_prompt_so_many_keys_are_told() -> None:
    """The keys of the first blocks go with a request, in their order."""
    keys = np.arange(KEYS_MAX + 5, dtype=np.uint64)
    dispatch = Dispatch("r", POD, 1, 0.0, 0.0, None, RateSample.EXACT, 0.0)
    (news,) = carried(News([sent_of(1, dispatch, keys, 1.0, prefilled=False)]))
    assert news.sent[0].keys.tolist() == list(range(KEYS_MAX))


def test_a_newer_routers_messages_are_read() -> None:
    """Fields that this version does not know are passed over, at every level."""
    told = {
        "sent": [{"number": 1, "pod": POD, "colour": {"deep": [1, 2]}}],
        "heard": [{"request_id": "r", "event": "done", "source": "report", "why": None}],
        "moved": [{"number": 1}],
    }
    assert read_news(msgspec.msgpack.encode(told)) == News([Sent(1, POD)], heard=[Heard("r", DONE, "report")])


def test_an_older_routers_messages_are_read() -> None:
    """Fields that are not sent have their defaults."""
    assert read_news(msgspec.msgpack.encode({"sent": [{"number": 1, "pod": POD}]})).sent == [Sent(1, POD)]
    assert read_news(msgspec.msgpack.encode({})) == News()


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("number", {"pod": "p"}),
    ("number", {"pod": "p", "number": -1}),
    ("number", {"pod": "p", "number": "1"}),
    ("pod", {}),
    ("pod", {"pod": ""}),
    ("pod", {"pod": "p" * 513}),
    ("key_bytes", {"pod": "p", "key_bytes": b"1234567"}),
    ("key_bytes", {"pod": "p", "key_bytes": bytes(8 * (KEYS_MAX + 1))}),
    ("age_s", {"pod": "p", "age_s": float("nan")}),
    ("age_s", {"pod": "p", "age_s": -1.0}),
    ("age_s", {"pod": "p", "age_s": float("inf")}),
    ("request_id", {"pod": "p", "request_id": "r" * 513}),
    ("prefill_pod", {"pod": "p", "prefill_pod": "r" * 513}),
    ("adapter", {"pod": "p", "adapter": "a" * 513}),
    ("uncached_tokens", {"pod": "p", "uncached_tokens": (1 << 40) + 1}),
]


@pytest.mark.parametrize(("named", "fields"), BROKEN)
def test_a_request_that_is_out_of_bounds_is_refused(named: str, fields: dict[str, Any]) -> None:
    """A number, text or list that no router tells voids the message, with the field's name."""
    sent = fields if named == "number" else {"number": 1, **fields}
    with pytest.raises(PeerError, match=rf"^broken: (.*{named}.*\$\.sent|.*\$\.sent\[0\]\.{named})"):
        read_news(msgspec.msgpack.encode({"sent": [sent]}))


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("event", {"request_id": "r", "source": "report"}),
        ("event", {"request_id": "r", "source": "report", "event": 9}),
        ("request_id", {"request_id": "r" * 513, "source": "report", "event": DONE}),
        ("late_s", {"request_id": "r", "source": "report", "event": DONE, "late_s": float("nan")}),
        ("cached_tokens", {"request_id": "r", "source": "report", "event": DONE, "cached_tokens": -1}),
    ],
)
def test_an_outcome_that_is_out_of_bounds_is_refused(named: str, fields: dict[str, Any]) -> None:
    """What was heard is checked as what was sent is."""
    with pytest.raises(PeerError, match=rf"^broken: (.*{named}.*\$\.heard|.*\$\.heard\[0\]\.{named})"):
        read_news(msgspec.msgpack.encode({"heard": [fields]}))


@settings(max_examples=examples(300), deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Whatever a peer sends is read, or refused by one error."""
    for kind in (News, FollowRequest):
        with suppress(PeerError):
            read(kind, data)


def test_values_nested_without_end_are_refused() -> None:
    """A deep value under an unknown name exhausts no stack."""
    with pytest.raises(PeerError, match=r"^broken: "):
        read_news(b"\x81\xa1x" + b"\x91" * 500_000)
