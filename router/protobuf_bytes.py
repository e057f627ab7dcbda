"""Pieces of protobuf's encoding (protobuf.dev/programming-guides/encoding), for messages written by hand."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """A whole number of at least 0."""
    if value < 0x80:
        return bytes([value])
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number and where it ends.

    Raises:
        IndexError: The data ends within it.
    """
    value = shift = 0
    while (byte := data[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1


def tag(number: int) -> bytes:
    """What stands in front of a field (number 1 to 15) that has a length: text, bytes or a message."""
    return bytes([number << 3 | 2])
