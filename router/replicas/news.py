"""What routers tell each other, as messages: changes of a ledger in, bytes of a bounded size out, and back.

Field by field as proto/kvroute/v1/ledger.proto has it. What comes in is another process's, and checked here
once: whatever is out of its bounds voids the message, and with it the peer's whole account.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from indexer.errors import PeerError
from indexer.keys import Keys
from router._pb import ledger_pb2 as pb
from router.dispatch import Dispatch
from router.outcomes import DONE, FAILED, FIRST_TOKEN, REFUSED, Heard

SCHEMA = 1

MESSAGE_BYTES_MAX = 256 << 10
"""A message is ended where it reaches this; the last request in it may reach beyond by its own size."""

KEYS_MAX = 16_384
"""Of one request: the first so many blocks that it will bring are told."""

_KEY = np.dtype("<u8")
_TEXT_MAX = 512
_TOKENS_MAX = 1 << 40
# What a request takes beside its texts and keys, and a number of one.
_SENT_BYTES, _NUMBER_BYTES = 64, 11


class Sent(msgspec.Struct, frozen=True):
    """A request that a router has in flight.

    Attributes:
        number: The router's own for it; no other request of its process ever has it.
        keys: Of the blocks that it will bring; empty where they are not known.
        is_prefilled: Whether its queue is behind it.
    """

    number: int
    request_id: str
    pod: str
    prefill_pod: str | None
    uncached_tokens: int
    age_s: float
    adapter: str | None
    keys: Keys
    is_prefilled: bool


_EVENTS = {
    FIRST_TOKEN: pb.Outcome.EVENT_FIRST_TOKEN,
    DONE: pb.Outcome.EVENT_DONE,
    FAILED: pb.Outcome.EVENT_FAILED,
    REFUSED: pb.Outcome.EVENT_REFUSED,
}
_EVENT_NAMES = {event: name for name, event in _EVENTS.items()}


class News(msgspec.Struct, frozen=True):
    """Changes in the order in which they are to be taken: see LedgerNews."""

    sent: Sequence[Sent] = ()
    overdue: Sequence[int] = ()
    prefilled: Sequence[int] = ()
    ended: Sequence[int] = ()
    heard: Sequence[Heard] = ()


def sent_of(number: int, dispatch: Dispatch, keys: Keys | None, now_s: float, *, prefilled: bool) -> Sent:
    """What is told of an entry of the ledger."""
    return Sent(
        number,
        dispatch.request_id,
        dispatch.pod,
        dispatch.prefill_pod,
        dispatch.uncached_tokens,
        max(0.0, now_s - dispatch.dispatched_s),
        dispatch.adapter,
        _NO_KEYS if keys is None else keys[:KEYS_MAX],
        prefilled,
    )


def news_messages(news: News) -> Iterator[bytes]:
    """Serialised LedgerNews; several where there is much, which are the same taken one after the other."""
    message, size_bytes = pb.LedgerNews(), 0
    for field, items in _fields(news):
        told = getattr(message, field)
        for item, item_bytes in items:
            if size_bytes + item_bytes > MESSAGE_BYTES_MAX and size_bytes:
                yield message.SerializeToString()
                message, size_bytes = pb.LedgerNews(), 0
                told = getattr(message, field)
            told.append(item)
            size_bytes += item_bytes
    if size_bytes:
        yield message.SerializeToString()


def read_news(message: pb.LedgerNews) -> News:
    """Reads and checks a message.

    Raises:
        PeerError: "broken": something is out of its bounds; the text names it.
    """
    return News(
        [_read_sent(sent) for sent in message.sent],
        list(message.overdue),
        list(message.prefilled),
        list(message.ended),
        [_read_heard(outcome) for outcome in message.heard],
    )


_NO_KEYS = np.zeros(0, np.uint64)


def _fields(news: News) -> Iterator[tuple[str, Iterable[tuple[object, int]]]]:
    """Fields of LedgerNews in their order, with their items and about how many bytes each takes."""
    yield "sent", (_written_sent(sent) for sent in news.sent)
    for name in ("overdue", "prefilled", "ended"):
        yield name, ((number, _NUMBER_BYTES) for number in getattr(news, name))
    yield "heard", (_written_heard(heard) for heard in news.heard)


def _written_sent(sent: Sent) -> tuple[pb.SentRequest, int]:
    keys = sent.keys.astype(_KEY, copy=False).tobytes()
    written = pb.SentRequest(
        number=sent.number,
        request_id=_sound(sent.request_id),
        pod=_sound(sent.pod),
        prefill_pod=_sound(sent.prefill_pod),
        uncached_tokens=sent.uncached_tokens,
        age_s=sent.age_s,
        adapter=_sound(sent.adapter),
        keys=keys,
        is_prefilled=sent.is_prefilled,
    )
    texts = len(sent.request_id) + len(sent.pod) + len(sent.prefill_pod or "") + len(sent.adapter or "")
    return written, _SENT_BYTES + texts + len(keys)


def _written_heard(heard: Heard) -> tuple[pb.Outcome, int]:
    written = pb.Outcome(
        request_id=_sound(heard.request_id),
        event=_EVENTS[heard.event],
        source=_sound(heard.source),
        pod=_sound(heard.pod),
        late_s=heard.late_s,
        cached_tokens=heard.cached_tokens,
    )
    return written, _SENT_BYTES + len(heard.request_id) + len(heard.pod or "")


def _read_sent(sent: pb.SentRequest) -> Sent:
    if not sent.pod:
        raise PeerError("broken", "sent.pod is empty")
    if len(sent.keys) % _KEY.itemsize or len(sent.keys) > KEYS_MAX * _KEY.itemsize:
        raise PeerError("broken", f"sent.keys are {len(sent.keys)} bytes: no 8 for each, or too many")
    if sent.uncached_tokens > _TOKENS_MAX:
        raise PeerError("broken", f"sent.uncached_tokens is {sent.uncached_tokens}")
    return Sent(
        sent.number,
        _text("sent.request_id", sent.request_id),
        _text("sent.pod", sent.pod),
        _text("sent.prefill_pod", sent.prefill_pod) or None,
        sent.uncached_tokens,
        _seconds("sent.age_s", sent.age_s),
        _text("sent.adapter", sent.adapter) or None,
        np.frombuffer(sent.keys, _KEY).astype(np.uint64, copy=False),
        sent.is_prefilled,
    )


def _read_heard(outcome: pb.Outcome) -> Heard:
    if outcome.event not in _EVENT_NAMES:
        raise PeerError("broken", f"heard.event is {outcome.event}")
    return Heard(
        _text("heard.request_id", outcome.request_id),
        _EVENT_NAMES[outcome.event],
        _text("heard.source", outcome.source),
        _text("heard.pod", outcome.pod) or None,
        _seconds("heard.late_s", outcome.late_s) if outcome.HasField("late_s") else None,
        outcome.cached_tokens if outcome.HasField("cached_tokens") else None,
    )


def _sound(text: str | None) -> str:
    """What a message may hold of a text that a client chose."""
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode() if text else ""


def _text(field: str, text: str) -> str:
    if len(text) > _TEXT_MAX:
        raise PeerError("broken", f"{field} has {len(text)} characters, {_TEXT_MAX} at most")
    return text


def _seconds(field: str, value: float) -> float:
    if not math.isfinite(value) or value < 0.0:
        raise PeerError("broken", f"{field} is {value}")
    return value
