"""What a peer does wrong, by RFC 9113's codes; never leaves the package."""

from __future__ import annotations

from enum import IntEnum


class H2Code(IntEnum):
    """Error codes of RFC 9113, section 7."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class H2Error(Exception):
    """The connection cannot go on: it is told why, and closed."""

    def __init__(self, code: H2Code, message: str) -> None:
        super().__init__(message)
        self.code = code
