"""HTTP/2 frames (RFC 9113, sections 4 and 6) and the header blocks within (HPACK, RFC 7541).

The module checks the preface and frame sizes; `connection` interprets the frames. Violations raise H2Error.
Header fields follow gRPC's PROTOCOL-HTTP2.md.

Gateways send the same fields with every call. A block that does not change the decoder's dynamic table always
decodes to the same fields while the table stays the same, so its result is cached.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Generic, TypeVar

import grpc
import hpack
from hpack.hpack import encode_integer

LIST_BYTES_MAX = 64 << 10
_KNOWN_MAX = 64
_KNOWN_BYTES_MAX = 4 << 10
_CONTENT_TYPE = b"application/grpc"
_ENCODINGS = b"identity,deflate,gzip"
# Longer status details would exceed a peer's header list limit.
_DETAILS_MAX = 4096

Fields = list[tuple[bytes, bytes]]
_Head = TypeVar("_Head")

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
# Smallest and largest value of SETTINGS_MAX_FRAME_SIZE.
FRAME_BYTES_LEAST, FRAME_BYTES_MOST = 1 << 14, (1 << 24) - 1
WINDOW_BYTES_DEFAULT, WINDOW_BYTES_MOST = (1 << 16) - 1, (1 << 31) - 1
STREAM_IDS: Final = (1 << 31) - 1

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY: Final = 0x20

_HEAD = struct.Struct(">BHBBI")
_DATA_HEAD = struct.Struct(">IBI")
_SETTING = struct.Struct(">HI")
# Frame header as (upper 8 bits of the length, lower 16 bits, type, flags, stream id).
read_head: Final = _HEAD.unpack_from
# Header of a DATA frame from (length << 8, flags, stream id); the type of DATA is 0.
data_head: Final = _DATA_HEAD.pack
# Pairs of identifier and value from a SETTINGS payload, whose size must be a multiple of 6.
read_settings: Final = _SETTING.iter_unpack
# (type, flags, stream id, payload)
Frame = tuple[int, int, int, bytes]


class H2Code(IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class H2Error(Exception):
    """Connection error: the peer receives GOAWAY with this code, then the connection is closed."""

    def __init__(self, code: H2Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class FrameType(IntEnum):
    """Frame types of RFC 9113, section 6."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


_HEADERS, _LAST = int(FrameType.HEADERS), END_HEADERS | END_STREAM


class Setting(IntEnum):
    """Setting identifiers of RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


def head(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the 9-byte frame header for a payload of `size` bytes."""
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame: header and payload."""
    return head(len(payload), kind, flags, stream_id) + payload


def headers_frame(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """Return a HEADERS frame with a complete block; `ends` sets END_STREAM."""
    return head(len(block), _HEADERS, _LAST if ends else END_HEADERS, stream_id) + block


def number_frame(kind: int, stream_id: int, number: int) -> bytes:
    """Return RST_STREAM with an error code, or WINDOW_UPDATE with an increment."""
    return frame(kind, 0, stream_id, number.to_bytes(4, "big"))


def goaway_frame(last_stream_id: int, code: int, message: str) -> bytes:
    """Return GOAWAY with the last stream id that is served, an error code and a debug message."""
    numbers = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")
    return frame(FrameType.GOAWAY, 0, 0, numbers + message.encode("ascii", "replace"))


def settings_frame(settings: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(FrameType.SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


class FrameReader:
    """Splits the bytes of one connection into frames."""

    frame_bytes_max: Final = 1 << 16  # larger frames are a connection error

    def __init__(self) -> None:
        self._rest = b""
        self._is_begun = self._has_settings = False

    @property
    def has_partial_data(self) -> bool:
        """Return whether the preface or a frame has been received only in part."""
        return bool(self._rest) or not self._is_begun

    def feed(self, data: bytes) -> Iterable[Frame]:
        """Return the frames that `data` completes.

        Raises:
            H2Error: A frame is too large, or the bytes are not HTTP/2.
        """
        if not self._rest and self._has_settings and len(data) >= HEAD_BYTES:
            # Fast path: nearly always one read brings exactly one frame.
            upper, lower, kind, flags, stream_id = read_head(data)
            length = upper << 16 | lower
            if length == len(data) - HEAD_BYTES and length <= self.frame_bytes_max:
                return ((kind, flags, stream_id & STREAM_IDS, data[HEAD_BYTES:]),)
        return self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Frame]:
        if self._rest and self._has_settings:
            # Complete only the partial frame: concatenating all of `data` would copy it needlessly.
            first, at = self._completed(data)
            yield from self._split(first, 0)
            if self._rest:
                return
            yield from self._split(data, at)
            return
        data = self._rest + data
        yield from self._split(data, 0 if self._is_begun else self._preface(data))

    def _completed(self, data: bytes) -> tuple[bytes, int]:
        """Return the partial frame received so far, and how many bytes of `data` belong to it."""
        begun, at = self._rest, 0
        if (lacks := HEAD_BYTES - len(begun)) > 0:
            begun, at = begun + data[:lacks], lacks
        if len(begun) >= HEAD_BYTES:
            upper, lower, *_ = read_head(begun)
            lacks = (upper << 16 | lower) + HEAD_BYTES - len(begun)
            begun, at = begun + data[at : at + lacks], at + lacks
        return begun, at

    def _split(self, data: bytes, at: int) -> Iterator[Frame]:
        size = len(data)
        while self._is_begun and size - at >= HEAD_BYTES:
            upper, lower, kind, flags, stream_id = read_head(data, at)
            length = upper << 16 | lower
            if length > self.frame_bytes_max:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, f"a frame above {self.frame_bytes_max} bytes")
            begin = at + HEAD_BYTES
            if size - begin < length:
                break
            at = begin + length
            if not self._has_settings and kind != FrameType.SETTINGS:
                raise H2Error(H2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
            yield kind, flags, stream_id & STREAM_IDS, data[begin:at]
        self._rest = data[at:]

    def _preface(self, data: bytes) -> int:
        expected = PREFACE
        if data[: len(expected)] != expected[: len(data)]:
            raise H2Error(H2Code.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        if len(data) < len(expected):
            return 0
        self._is_begun = True
        return len(expected)


def check_unused(kind: int, stream_id: int, payload: bytes) -> None:
    """Check a frame that the server ignores.

    Raises:
        H2Error: The frame is malformed, or a client may not send it.
    """
    if kind == FrameType.PUSH_PROMISE:
        raise H2Error(H2Code.PROTOCOL_ERROR, "a client must not send PUSH_PROMISE")
    if kind == FrameType.GOAWAY and (stream_id or len(payload) < 8):
        raise H2Error(H2Code.PROTOCOL_ERROR, "GOAWAY is too short or not on stream 0")
    if kind == FrameType.PRIORITY:
        expect_size(payload, 5, "PRIORITY")
        if not stream_id:
            raise H2Error(H2Code.PROTOCOL_ERROR, "PRIORITY on stream 0")


def unpadded(payload: bytes) -> bytes:
    """Return a padded frame's payload without its padding.

    Raises:
        H2Error: The padding is as long as the frame or longer.
    """
    if not payload or payload[0] >= len(payload):
        raise H2Error(H2Code.PROTOCOL_ERROR, "the padding is not shorter than its frame")
    return payload[1 : len(payload) - payload[0]]


def expect_size(payload: bytes, size: int, what: str) -> None:
    """Raise H2Error unless the payload has the one size that its frame type allows."""
    if len(payload) != size:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, f"{what} of {len(payload)} bytes instead of {size}")


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


def _sized(text: bytes) -> bytes:
    """Return a string without Huffman coding, prefixed with its length as a 7-bit integer (section 5.1)."""
    return bytes(encode_integer(len(text), 7)) + text


STATUS_200: Final = b"\x88"  # indexed header field `:status: 200`
HEADERS: Final = (
    STATUS_200 + field(b"content-type", _CONTENT_TYPE) + field(b"grpc-accept-encoding", _ENCODINGS)
)
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
        refusal = field(b":status", b"405")
    elif not said.get(b"content-type", b"").startswith(_CONTENT_TYPE):
        refusal = field(b":status", b"415")
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


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")[:_DETAILS_MAX]
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
