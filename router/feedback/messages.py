"""Messages between routers of one fleet: changes of a ledger, encoded as msgpack maps of bounded size.

Other versions are compatible: unknown fields are ignored, and missing fields have their defaults. So a field
must not change its meaning, and a new field needs a default. A value out of its bounds makes the message
invalid, and the receiver drops all requests of that peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from indexer.errors import PeerError
from indexer.keys import Keys
from router.feedback.outcomes import RequestReport, Seconds, Text
from router.inflight.dispatch import SEQUENCES_MAX, Dispatch

FOLLOW = "/kvroute.v2.LedgerPeer/Follow"
"""gRPC method, server streaming: `FollowRequest` in, `LedgerChanges` out; empty messages are heartbeats."""

MESSAGE_BYTES_MAX = 256 << 10
"""Size limit of a message in bytes; only a message with a single item may be larger."""

KEYS_MAX = 16_384
"""Maximum block keys sent per request; the first ones are sent."""

_KEY = np.dtype("<u8")
_TEXT_MAX = 512
_encode = msgspec.msgpack.Encoder().encode
_Message = TypeVar("_Message")

Number = Annotated[int, Meta(ge=0)]


class FollowRequest(Struct, frozen=True):
    """Identity of the calling router."""

    instance: Text  # unique per process
    fingerprint: Number  # derived from hash seed and block length; proves that the caller knows the seed


class Sent(Struct, frozen=True, omit_defaults=True):
    """Request that a router has in flight.

    Attributes:
        key_bytes: Keys of the blocks that the request adds to its pod, first block first, 8 bytes each,
            little endian. Empty if unknown, and after the prefill.
    """

    number: Number  # unique per process of the sender
    pod: Annotated[str, Meta(min_length=1, max_length=_TEXT_MAX)]  # "ip:port"
    request_id: Text = ""  # the client's
    prefill_pod: Text | None = None  # pod that prefills the request; None: `pod`
    uncached_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 0  # prompt tokens to compute
    age_s: Seconds = 0.0  # seconds since the dispatch
    adapter: Text | None = None  # LoRA adapter
    key_bytes: Annotated[bytes, Meta(max_length=KEYS_MAX * _KEY.itemsize)] = b""
    is_prefilled: bool = False  # whether its first token is reported or presumed
    engine: Text | None = None  # engine of a pod with several; None: the pod chooses
    sequences: Annotated[int, Meta(ge=1, le=SEQUENCES_MAX)] = 1  # samples or beams that it decodes

    def __post_init__(self) -> None:
        if len(self.key_bytes) % _KEY.itemsize:
            raise ValueError(f"key_bytes: {len(self.key_bytes)} bytes, expected {_KEY.itemsize} per key")

    @property
    def keys(self) -> Keys:
        return np.frombuffer(self.key_bytes, _KEY).astype(np.uint64, copy=False)


class LedgerChanges(Struct, frozen=True, omit_defaults=True, rename={"reports": "heard"}):
    """Changes since the previous message, to be applied in the order of the fields.

    Attributes:
        overdue: Numbers of requests whose prefill timed out without a report.
    """

    sent: Sequence[Sent] = ()
    overdue: Sequence[Number] = ()
    prefilled: Sequence[Number] = ()  # requests whose first token was reported
    ended: Sequence[Number] = ()  # requests that ended in any way
    reports: Sequence[RequestReport] = ()  # reports on requests that are not the sender's


def sent_entry(number: int, dispatch: Dispatch, keys: Keys | None, now_s: float, *, prefilled: bool) -> Sent:
    """Convert a ledger entry to its message."""
    return Sent(
        number,
        dispatch.pod,
        _bounded(dispatch.request_id),
        dispatch.prefill_pod,
        dispatch.uncached_tokens,
        max(0.0, now_s - dispatch.dispatched_s),
        None if dispatch.adapter is None else _bounded(dispatch.adapter),
        b"" if keys is None else keys[:KEYS_MAX].astype(_KEY, copy=False).tobytes(),
        prefilled,
        dispatch.engine,
        dispatch.sequences,
    )


def report_message(report: RequestReport) -> RequestReport:
    """Return the report with its texts valid and bounded."""
    pod = None if report.pod is None else _bounded(report.pod)
    return msgspec.structs.replace(report, request_id=_bounded(report.request_id), pod=pod)


def encode_changes(changes: LedgerChanges) -> Iterator[bytes]:
    """Yield the changes as messages; applied in order, they equal one message with all changes."""
    fields: dict[str, list[msgspec.Raw]] = {}
    size_bytes = 0
    for name, field in zip(changes.__struct_fields__, changes.__struct_encode_fields__, strict=True):
        for item in getattr(changes, name):
            raw = _encode(item)
            if size_bytes and size_bytes + len(raw) > MESSAGE_BYTES_MAX:
                yield _encode(fields)
                fields, size_bytes = {}, 0
            fields.setdefault(field, []).append(msgspec.Raw(raw))
            size_bytes += len(raw)
    if fields:
        yield _encode(fields)


def decode_changes(message: bytes) -> LedgerChanges:
    """Decode and validate changes, see `decode` for errors; a heartbeat has none."""
    return decode(LedgerChanges, message) if message else LedgerChanges()


def decode(kind: type[_Message], message: bytes) -> _Message:
    """Decode and validate a message.

    Raises:
        PeerError: "broken", with the name of the missing or invalid field.
    """
    try:
        return msgspec.msgpack.decode(message, type=kind)
    # msgspec skips unknown fields by recursion, so a deeply nested value raises RecursionError.
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerError("broken", str(error)) from None


def _bounded(text: str) -> str:
    """Return a client's text as valid UTF-8 within the length limit."""
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode()
