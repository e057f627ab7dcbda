"""Header blocks: decoding of request headers (HPACK, RFC 7541), and the few blocks that the server sends.

Header fields follow gRPC's PROTOCOL-HTTP2.md.

Gateways send the same fields with every call. A block that does not change the decoder's dynamic table always
decodes to the same fields while the table stays the same, so its result is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import grpc
import hpack

from router.h2.frames import H2Code, H2Error

LIST_BYTES_MAX = 64 << 10
_KNOWN_MAX = 64
_KNOWN_BYTES_MAX = 4 << 10
_STATUS_200 = b"\x88"
_CONTENT_TYPE = b"application/grpc"
_ENCODINGS = b"identity,deflate,gzip"
# Longer status details would exceed a peer's header list limit.
_DETAILS_MAX = 4096

Fields = list[tuple[bytes, bytes]]
_Head = TypeVar("_Head")


class HeaderBlocks(Generic[_Head]):
    """Decoder of one connection's header blocks, in order of arrival, with a cache."""

    def __init__(self, read: Callable[[Fields], _Head]) -> None:
        self._read = read
        self._decoder = hpack.Decoder(max_header_list_size=LIST_BYTES_MAX)
        self._known: dict[bytes, _Head] = {}

    def head(self, block: bytes) -> _Head:
        """Decode a block and return what `read` makes of its fields.

        Raises:
            H2Error: The block is not valid HPACK or too long; the decoder cannot be used afterwards.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        size, newest, limit = self._table_state()
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.OversizedHeaderListError as error:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, f"headers above {LIST_BYTES_MAX} bytes") from error
        except (hpack.HPACKError, IndexError, ValueError) as error:
            raise H2Error(H2Code.COMPRESSION_ERROR, "a header block is not HPACK") from error
        head = self._read([(bytes(name), bytes(value)) for name, value in fields])
        now_size, now_newest, now_limit = self._table_state()
        if now_newest is not newest or (now_size, now_limit) != (size, limit):
            self._known.clear()
        elif len(block) <= _KNOWN_BYTES_MAX:
            if len(self._known) == _KNOWN_MAX:
                self._known.clear()
            self._known[block] = head
        return head

    def _table_state(self) -> tuple[int, object, int]:
        # hpack adds entries on the left and evicts them on the right.
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return len(entries), entries[0] if entries else None, table.maxsize


def field(name: bytes, value: bytes) -> bytes:
    """Return a field in literal form, not added to the peer's dynamic table."""
    return b"\x00" + _sized(name) + _sized(value)


def status_200(*fields: tuple[bytes, bytes]) -> bytes:
    """Return a block with `:status: 200` and these fields."""
    return _STATUS_200 + b"".join(field(name, value) for name, value in fields)


def _sized(text: bytes) -> bytes:
    """Return a string without Huffman coding, prefixed with its length as a 7-bit integer (section 5.1)."""
    size = len(text)
    if size < 127:
        return bytes((size,)) + text
    size -= 127
    number = bytearray(b"\x7f")
    while size >= 128:
        number.append(size & 127 | 128)
        size >>= 7
    number.append(size)
    return bytes(number) + text


HEADERS: Final = status_200((b"content-type", _CONTENT_TYPE), (b"grpc-accept-encoding", _ENCODINGS))
OK_TRAILERS: Final = field(b"grpc-status", b"0")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CallHead:
    """Request headers of a call."""

    path: str  # "/package.Service/Method"
    encoding: str  # compression of its messages; "identity" for none
    refusal: bytes | None  # block that rejects the request if it is not a valid gRPC call


def call_head(fields: Fields) -> CallHead:
    """Interpret a request's header fields. Never raises: an invalid request gets a `refusal`."""
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
    """Return the block that ends a call whose headers have been sent."""
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
    """Return the single block of a response without messages (gRPC's Trailers-Only)."""
    return HEADERS + trailers_block(code, details, metadata)


def _plain_refusal(status: bytes) -> bytes:
    return field(b":status", status)


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")[:_DETAILS_MAX]
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
