"""Messages between routers of one fleet: changes of a ledger as msgpack of a bounded size, and back.

Each message is a map by field name. A router of another version is read, too: unknown fields are ignored, and
fields that it does not send have their defaults. So no field may change its meaning, and a new one needs a
default. Whatever is out of its bounds voids the message, and with it the peer's whole account.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from indexer.errors import PeerError
from indexer.keys import Keys
from router.feedback.lifecycle import Heard, Seconds, Text
from router.inflight.dispatch import Dispatch

FOLLOW = "/kvroute.v2.LedgerPeer/Follow"
"""The gRPC method, server streaming: a `FollowRequest` in; `News` out, empty messages as signs of life."""

MESSAGE_BYTES_MAX = 256 << 10
"""A message is ended where one more item would make it larger than this; a single item may be larger."""

KEYS_MAX = 16_384
"""Of one request: the first so many blocks that it will bring are sent."""

_KEY = np.dtype("<u8")
_TEXT_MAX = 512
_encode = msgspec.msgpack.Encoder().encode
_Message = TypeVar("_Message")

Number = Annotated[int, Meta(ge=0)]


class FollowRequest(Struct, frozen=True):
    """Identity of the router that asks."""

    instance: Text  # another text for each process
    fingerprint: Number  # of the seed and the length of blocks; shows that the asker knows the seed


class Sent(Struct, frozen=True, omit_defaults=True):
    """A request that a router has in flight.

    Attributes:
        key_bytes: Keys of the blocks that it will bring, first block first, 8 bytes each, little endian.
            Empty where they are not known, and once it is prefilled.
    """

    number: Number  # the router's own for it; no other request of its process ever has it
    pod: Annotated[str, Meta(min_length=1, max_length=_TEXT_MAX)]  # "ip:port"
    request_id: Text = ""  # as its client knows it
    prefill_pod: Text | None = None  # where it is prefilled first; None: on `pod`
    uncached_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0  # prompt tokens that have to be computed
    age_s: Seconds = 0.0  # seconds since it was sent
    adapter: Text | None = None  # the LoRA adapter that it needs
    key_bytes: Annotated[bytes, Meta(max_length=KEYS_MAX * _KEY.itemsize)] = b""
    is_prefilled: bool = False  # whether its queue is behind it

    def __post_init__(self) -> None:
        if len(self.key_bytes) % _KEY.itemsize:
            raise ValueError(f"key_bytes are {len(self.key_bytes)} bytes, not {_KEY.itemsize} for each key")

    @property
    def keys(self) -> Keys:
        return np.frombuffer(self.key_bytes, _KEY).astype(np.uint64, copy=False)


class News(Struct, frozen=True, omit_defaults=True):
    """Changes since the last message, to be taken in the order of these fields.

    Attributes:
        overdue: Numbers of requests whose prefill should be over by now, though nobody has told so.
    """

    sent: Sequence[Sent] = ()
    overdue: Sequence[Number] = ()
    prefilled: Sequence[Number] = ()  # those whose first token was seen
    ended: Sequence[Number] = ()  # those that are over, however they ended
    heard: Sequence[Heard] = ()  # what was heard of requests that are none of the sender's


def sent_of(number: int, dispatch: Dispatch, keys: Keys | None, now_s: float, *, prefilled: bool) -> Sent:
    """Describe an entry of the ledger."""
    return Sent(
        number,
        dispatch.pod,
        _sound(dispatch.request_id),
        dispatch.prefill_pod,
        dispatch.uncached_tokens,
        max(0.0, now_s - dispatch.dispatched_s),
        None if dispatch.adapter is None else _sound(dispatch.adapter),
        b"" if keys is None else keys[:KEYS_MAX].astype(_KEY, copy=False).tobytes(),
        prefilled,
    )


def heard_of(heard: Heard) -> Heard:
    """Return what was heard with texts that a message may hold."""
    pod = None if heard.pod is None else _sound(heard.pod)
    return msgspec.structs.replace(heard, request_id=_sound(heard.request_id), pod=pod)


def news_messages(news: News) -> Iterator[bytes]:
    """Serialise news; much of it as several messages, which are the same taken one after the other."""
    fields: dict[str, list[msgspec.Raw]] = {}
    size_bytes = 0
    for name in News.__struct_fields__:
        for item in getattr(news, name):
            raw = _encode(item)
            if size_bytes and size_bytes + len(raw) > MESSAGE_BYTES_MAX:
                yield _encode(fields)
                fields, size_bytes = {}, 0
            fields.setdefault(name, []).append(msgspec.Raw(raw))
            size_bytes += len(raw)
    if fields:
        yield _encode(fields)


def read_news(message: bytes) -> News:
    """Read and check news, see `read` for errors; an empty message is news of nothing."""
    return read(News, message) if message else News()


def read(kind: type[_Message], message: bytes) -> _Message:
    """Read and check a message.

    Raises:
        PeerError: "broken": the text names the field that is missing or out of its bounds.
    """
    try:
        return msgspec.msgpack.decode(message, type=kind)
    # Deeply nested values that no field has are passed over by recursion.
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError("broken", str(error)) from None


def _sound(text: str) -> str:
    """Make a text that a client chose one that a message may hold."""
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode()
