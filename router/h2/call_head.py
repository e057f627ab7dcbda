"""A call's head: a request's header fields in, the method and how its messages come out (PROTOCOL-HTTP2.md).

And the blocks that answer it. Knows nothing of what methods there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc

from router.h2.header_blocks import Fields, field, status_200

_CONTENT_TYPE = b"application/grpc"
_ENCODINGS = b"identity,deflate,gzip"
# Details beyond this length would not fit a peer's header list.
_DETAILS_MAX = 4096

HEADERS: Final = status_200((b"content-type", _CONTENT_TYPE), (b"grpc-accept-encoding", _ENCODINGS))
OK_TRAILERS: Final = field(b"grpc-status", b"0")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallHead:
    """What a call says before its first message."""

    path: str  # "/package.Service/Method"
    encoding: str  # of its compressed messages; "identity": none are
    refusal: bytes | None  # the block that answers a request that is no call of ours


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
    return CallHead(path, encoding, refusal)


def trailers_block(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> bytes:
    """The block that ends a call whose headers are sent."""
    if code is grpc.StatusCode.OK and not details and not metadata:
        return OK_TRAILERS
    number: int = code.value[0]
    block = field(b"grpc-status", str(number).encode())
    if details:
        block += field(b"grpc-message", _percent_encoded(details))
    return block + b"".join(
        field(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in metadata
    )


def refusal_block(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> bytes:
    """The one block that answers a call without any message."""
    return HEADERS + trailers_block(code, details, metadata)


def _plain_refusal(status: bytes) -> bytes:
    return field(b":status", status)


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")[:_DETAILS_MAX]
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
