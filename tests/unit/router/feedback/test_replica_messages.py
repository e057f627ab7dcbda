"""Tests of the messages between routers: they survive encoding, and invalid ones are rejected."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.errors import PeerError
from router.feedback.change_log import (
    KEYS_MAX,
    MESSAGE_BYTES_MAX,
    LedgerChanges,
    Sent,
    decode_changes,
    decode_follow_request,
    encode_changes,
    report_message,
    sent_entry,
)
from router.feedback.outcomes import DONE, FAILED, FIRST_TOKEN, REFUSED, RequestReport
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
REPORT = st.builds(
    RequestReport,
    TEXTS,
    st.sampled_from([FIRST_TOKEN, DONE, FAILED, REFUSED]),
    TEXTS,
    st.none() | TEXTS,
    st.none() | SECONDS,
    st.none() | NUMBERS,
)
CHANGES = st.builds(LedgerChanges, st.lists(SENT), *[st.lists(NUMBERS)] * 3, st.lists(REPORT))


def joined(parts: list[LedgerChanges]) -> list[list[Any]]:
    """Return all items of the changes, in one list per field."""
    return [
        [item for part in parts for item in getattr(part, name)] for name in LedgerChanges.__struct_fields__
    ]


def decoded(changes: LedgerChanges) -> list[LedgerChanges]:
    """Return the changes after encoding and decoding."""
    return [decode_changes(message) for message in encode_changes(changes)]


@settings(max_examples=examples(200), deadline=None)
@given(changes=CHANGES)
def test_changes_survive_encoding(changes: LedgerChanges) -> None:
    """Every field of the changes is the same after encoding and decoding."""
    assert joined(decoded(changes)) == joined([changes])


def test_empty_changes_are_an_empty_message() -> None:
    """No changes are encoded as no message, and an empty message is decoded as no changes."""
    assert list(encode_changes(LedgerChanges())) == []
    assert decode_changes(b"") == LedgerChanges()


def test_many_changes_are_split_in_order() -> None:
    """Changes above the size limit are split into messages that keep the order of all items."""
    keys = bytes(8 * KEYS_MAX)
    changes = LedgerChanges(
        [Sent(number, POD, key_bytes=keys) for number in range(10)], ended=list(range(100_000))
    )
    messages = list(encode_changes(changes))
    assert len(messages) > 5
    assert max(map(len, messages)) <= MESSAGE_BYTES_MAX + 1024
    assert joined(decoded(changes)) == joined([changes])


def test_invalid_text_is_replaced_and_truncated() -> None:
    """A request id that is invalid UTF-8 or too long is made valid, so the message is accepted."""
    dispatch = Dispatch("a\ud800b" + "x" * 2000, POD, 1, 0.0, 0.0, None, RateSample.EXACT, 0.0)
    report = report_message(RequestReport("\udcff", DONE, "report", "p" * 600))
    (changes,) = decoded(
        LedgerChanges([sent_entry(1, dispatch, None, 1.0, prefilled=False)], reports=[report])
    )
    assert changes.sent[0].request_id == "a?b" + "x" * 509
    assert (changes.reports[0].request_id, changes.reports[0].pod) == ("?", "p" * 512)


def test_keys_of_a_long_prompt_are_truncated() -> None:
    """At most `KEYS_MAX` keys are sent with a request: those of the first blocks, in order."""
    keys = np.arange(KEYS_MAX + 5, dtype=np.uint64)
    dispatch = Dispatch("r", POD, 1, 0.0, 0.0, None, RateSample.EXACT, 0.0)
    (changes,) = decoded(LedgerChanges([sent_entry(1, dispatch, keys, 1.0, prefilled=False)]))
    assert changes.sent[0].keys.tolist() == list(range(KEYS_MAX))


def test_received_keys_are_writable() -> None:
    """Received keys have the type of all others: for read-only arrays, kernels would be compiled anew."""
    dispatch = Dispatch("r", POD, 1, 0.0, 0.0, None, RateSample.EXACT, 0.0)
    sent = sent_entry(1, dispatch, np.arange(3, dtype=np.uint64), 1.0, prefilled=False)
    (changes,) = decoded(LedgerChanges([sent]))
    assert changes.sent[0].keys.flags.writeable


def test_unknown_fields_are_ignored() -> None:
    """Fields of a newer version are ignored at every level of a message."""
    message = {
        "sent": [{"number": 1, "pod": POD, "colour": {"deep": [1, 2]}}],
        "heard": [{"request_id": "r", "event": "done", "source": "report", "why": None}],
        "moved": [{"number": 1}],
    }
    assert decode_changes(msgspec.msgpack.encode(message)) == LedgerChanges(
        [Sent(1, POD)], reports=[RequestReport("r", DONE, "report")]
    )


def test_missing_fields_have_defaults() -> None:
    """Fields that an older version does not send have their defaults."""
    assert decode_changes(msgspec.msgpack.encode({"sent": [{"number": 1, "pod": POD}]})).sent == [
        Sent(1, POD)
    ]
    assert decode_changes(msgspec.msgpack.encode({})) == LedgerChanges()


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
def test_invalid_request_is_rejected(named: str, fields: dict[str, Any]) -> None:
    """A field of a request that is out of its bounds makes the message invalid; the error names it."""
    sent = fields if named == "number" else {"number": 1, **fields}
    with pytest.raises(PeerError, match=rf"^broken: (.*{named}.*\$\.sent|.*\$\.sent\[0\]\.{named})"):
        decode_changes(msgspec.msgpack.encode({"sent": [sent]}))


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
def test_invalid_report_is_rejected(named: str, fields: dict[str, Any]) -> None:
    """A field of a report that is out of its bounds makes the message invalid; the error names it."""
    with pytest.raises(PeerError, match=rf"^broken: (.*{named}.*\$\.heard|.*\$\.heard\[0\]\.{named})"):
        decode_changes(msgspec.msgpack.encode({"heard": [fields]}))


@settings(max_examples=examples(300), deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_decoded_or_rejected(data: bytes) -> None:
    """Arbitrary bytes are decoded or rejected with `PeerError`."""
    for decode in (decode_changes, decode_follow_request):
        with suppress(PeerError):
            decode(data)


def test_deeply_nested_value_is_rejected() -> None:
    """A deeply nested value of an unknown field raises `PeerError`, not `RecursionError`."""
    with pytest.raises(PeerError, match=r"^broken: "):
        decode_changes(b"\x81\xa1x" + b"\x91" * 500_000)
