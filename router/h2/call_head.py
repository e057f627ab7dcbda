"""A call's head: a request's header fields in, the method and how its messages come out (PROTOCOL-HTTP2.md).

And the blocks that answer it. Knows nothing of what methods there are.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Final

import grpc

from router.h2.header_blocks import Fields, field, status_200

_CONTENT_TYPE = b"application/grpc"
_ENCODINGS = b"identity,deflate,gzip"
_TIMEOUT_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT_DIGITS_MAX = 8
# What HTTP/2 and gRPC themselves mean by a field is no metadata.
_RESERVED = frozenset((b"te", b"content-type"))
_RESERVED_BEGINNINGS = (b":", b"grpc-")
# Details beyond this length would not fit a peer's header list.
_DETAILS_MAX = 4096

HEADERS: Final = status_200((b"content-type", _CONTENT_TYPE), (b"grpc-accept-encoding", _ENCODINGS))
OK_TRAILERS: Final = field(b"grpc-status", b"0")

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class CallHead:
    """What a call says before its first message.

    Attributes:
        path: "/package.Service/Method".
        encoding: How its compressed messages are; "identity": none are.
        timeout_s: How long the client waits; None: it does not say.
        fields: All header fields.
        refusal: The block that answers a request that is no call of ours; None: it is one.
    """

    path: str
    encoding: str
    timeout_s: float | None
    fields: Fields
    refusal: bytes | None

    @property
    def metadata(self) -> Metadata:
        """What the client says beside gRPC's own fields; values of "-bin" keys as bytes."""
        return tuple(
            (name.decode("latin-1"), _value(name, value))
            for name, value in self.fields
            if name not in _RESERVED and not name.startswith(_RESERVED_BEGINNINGS)
        )


def call_head(fields: Fields) -> CallHead:
    """Reads a request's fields; whatever they say, there is an answer to it."""
    said = dict(fields)
    encoding = said.get(b"grpc-encoding", b"identity").decode("latin-1")
    path = said.get(b":path", b"").decode("latin-1")
    refusal = None
    if said.get(b":method") != b"POST":
        refusal = _plain_refusal(b"405")
    elif not said.get(b"content-type", b"").startswith(_CONTENT_TYPE):
        refusal = _plain_refusal(b"415")
    elif encoding not in ("identity", "gzip", "deflate"):
        refusal = refusal_block(grpc.StatusCode.UNIMPLEMENTED, f"no such grpc-encoding: {encoding}")
    return CallHead(path, encoding, _timeout_s(said.get(b"grpc-timeout")), fields, refusal)


def trailers_block(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> bytes:
    """The block that ends a call whose headers are sent."""
    if code is grpc.StatusCode.OK and not details and not metadata:
        return OK_TRAILERS
    number: int = code.value[0]
    block = field(b"grpc-status", str(number).encode())
    if details:
        block += field(b"grpc-message", _percent_encoded(details))
    return block + metadata_block(metadata)


def refusal_block(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> bytes:
    """The one block that answers a call without any message."""
    return HEADERS + trailers_block(code, details, metadata)


def metadata_block(metadata: Metadata) -> bytes:
    """Metadata as fields."""
    return b"".join(field(name.lower().encode("latin-1"), _sent(value)) for name, value in metadata)


def _plain_refusal(status: bytes) -> bytes:
    return field(b":status", status)


def _timeout_s(text: bytes | None) -> float | None:
    if not text:
        return None
    digits, unit = text[:-1].decode("latin-1"), text[-1:].decode("latin-1")
    if unit not in _TIMEOUT_UNITS_S or not digits.isdecimal() or len(digits) > _TIMEOUT_DIGITS_MAX:
        return None
    return int(digits) * _TIMEOUT_UNITS_S[unit]


def _value(name: bytes, value: bytes) -> str | bytes:
    if not name.endswith(b"-bin"):
        return value.decode("latin-1")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4))
    except ValueError:
        return value


def _sent(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return base64.b64encode(value).rstrip(b"=")
    return value.encode("latin-1", "replace")


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")[:_DETAILS_MAX]
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
