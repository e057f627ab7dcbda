"""Routers' messages to each other: what goes in comes out, and nothing else is believed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import PeerError
from router._pb import ledger_pb2 as pb
from router.outcomes import DONE, FAILED, FIRST_TOKEN, REFUSED, Heard
from router.replicas.news import KEYS_MAX, MESSAGE_BYTES_MAX, News, Sent, news_messages, read_news

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NUMBERS = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e6)
SENT = st.builds(
    Sent,
    NUMBERS,
    TEXTS,
    TEXTS.filter(bool),
    st.none() | TEXTS.filter(bool),
    st.integers(0, 1 << 40),
    SECONDS,
    st.none() | TEXTS.filter(bool),
    st.lists(NUMBERS, max_size=20).map(lambda keys: np.array(keys, np.uint64)),
    st.booleans(),
)
HEARD = st.builds(
    Heard,
    TEXTS,
    st.sampled_from([FIRST_TOKEN, DONE, FAILED, REFUSED]),
    TEXTS,
    st.none() | TEXTS.filter(bool),
    st.none() | SECONDS,
    st.none() | NUMBERS,
)
NEWS = st.builds(News, st.lists(SENT), *[st.lists(NUMBERS)] * 3, st.lists(HEARD))


def plain(news: list[News]) -> list[Any]:
    """All of it by field, keys as lists."""
    sent = [(*_fields(one)[:7], one.keys.tolist(), one.is_prefilled) for part in news for one in part.sent]
    numbers = [
        [number for part in news for number in getattr(part, name)]
        for name in ("overdue", "prefilled", "ended")
    ]
    return [sent, *numbers, [one for part in news for one in part.heard]]


def _fields(sent: Sent) -> list[Any]:
    return [getattr(sent, name) for name in sent.__struct_fields__]


def carried(news: News) -> list[News]:
    """News over the wire."""
    return [read_news(pb.LedgerNews.FromString(message)) for message in news_messages(news)]


@settings(max_examples=200, deadline=None)
@given(news=NEWS)
def test_what_is_told_is_what_is_read(news: News) -> None:
    """Every field of every kind survives the wire."""
    assert plain(carried(news)) == plain([news])


def test_nothing_to_tell_is_no_message() -> None:
    """An empty account has nothing that had to be sent."""
    assert list(news_messages(News())) == []


def test_much_goes_in_several_messages_in_the_same_order() -> None:
    """Many requests are told piece by piece, and what ends behind what begins."""
    keys = np.arange(KEYS_MAX, dtype=np.uint64)
    sent = [Sent(number, "r", "10.0.0.1:8000", None, 1, 0.0, None, keys, False) for number in range(10)]
    news = News(sent, ended=list(range(100_000)))
    messages = list(news_messages(news))
    assert len(messages) > 5
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX + 8 * KEYS_MAX + 1024
    assert plain(carried(news)) == plain([news])


def test_a_text_that_no_message_may_hold_is_told_as_well_as_it_can_be() -> None:
    """A client's strange request id spoils nothing for others."""
    odd = Sent(1, "a\ud800b" + "x" * 2000, "10.0.0.1:8000", None, 1, 0.0, None, np.zeros(0, np.uint64), False)
    (news,) = carried(News([odd], heard=[Heard("\udcff", DONE, "report")]))
    assert news.sent[0].request_id == "a?b" + "x" * 509
    assert news.heard[0].request_id == "?"


BROKEN: list[dict[str, Any]] = [
    {"sent": [{"number": 1}]},
    {"sent": [{"pod": "p", "keys": b"1234567"}]},
    {"sent": [{"pod": "p", "keys": bytes(8 * (KEYS_MAX + 1))}]},
    {"sent": [{"pod": "p", "age_s": float("nan")}]},
    {"sent": [{"pod": "p", "age_s": -1.0}]},
    {"sent": [{"pod": "p", "age_s": float("inf")}]},
    {"sent": [{"pod": "p" * 513}]},
    {"sent": [{"pod": "p", "request_id": "r" * 513}]},
    {"sent": [{"pod": "p", "adapter": "a" * 513}]},
    {"sent": [{"pod": "p", "uncached_tokens": (1 << 40) + 1}]},
    {"heard": [{"request_id": "r", "source": "report"}]},
    {"heard": [{"request_id": "r", "event": 9}]},
    {"heard": [{"request_id": "r" * 513, "event": 1}]},
    {"heard": [{"request_id": "r", "event": 2, "late_s": float("nan")}]},
]


@pytest.mark.parametrize("fields", BROKEN)
def test_what_is_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    """A number, text or list that no router tells voids the message, with the field's name."""
    with pytest.raises(PeerError, match=rf"^broken: {next(iter(fields))}\."):
        read_news(pb.LedgerNews(**fields))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_news_or_refused(data: bytes) -> None:
    """Whatever a peer sends is read, or refused by one of two errors."""
    with suppress(PeerError, DecodeError):
        read_news(pb.LedgerNews.FromString(data))
