"""Chained hashes of full KV blocks: vLLM's `sha256_cbor` with its fixed default seed.

Input: the parent's hash, the block's token ids, its extra keys. Output: a 32-byte hash, and the 64-bit number
that events use for it. Outside the engine both are opaque.

    block hash = sha256(cbor([parent, [token ids], extra keys or null]))
"""

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

CborValue: TypeAlias = "int | bytes | str | Sequence[CborValue] | None"
ExtraKeys: TypeAlias = tuple[tuple[str, ...], ...]

_UINT, _NEGATIVE, _BYTES, _TEXT, _ARRAY = range(5)


def root_block_hash(seed: str) -> bytes:
    """Return the parent hash of every first block."""
    return hashlib.sha256(encode_cbor(seed)).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: ExtraKeys | None) -> bytes:
    """Return the hash of a full block; `parent` is the hash of the block before it, or `ROOT_BLOCK_HASH`.

    `extra_keys` are the other inputs of its KV (adapter, salt), tagged as in vLLM 0.31 and later.
    """
    return hashlib.sha256(encode_cbor((parent, token_ids, extra_keys))).digest()


def event_hash(block_hash: bytes) -> int:
    """Return the hash that events carry for a block: the last 8 bytes of `block_hash`, big-endian."""
    return int.from_bytes(block_hash[-8:], "big")


def encode_cbor(value: CborValue) -> bytes:
    """Encode a value in canonical CBOR (RFC 8949, section 4.2); only the types that block hashes need."""
    if isinstance(value, int):
        return _head(_UINT, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    if value is None:
        return b"\xf6"
    return _head(_ARRAY, len(value)) + b"".join([encode_cbor(item) for item in value])


def _head(major_type: int, number: int) -> bytes:
    """Encode a major type and its length or value in the fewest bytes, as canonical CBOR requires."""
    prefix = major_type << 5
    if number < 24:
        return bytes((prefix | number,))
    if number < 1 << 8:
        return bytes((prefix | 24, number))
    if number < 1 << 16:
        return bytes((prefix | 25,)) + number.to_bytes(2, "big")
    if number < 1 << 32:
        return bytes((prefix | 26,)) + number.to_bytes(4, "big")
    return bytes((prefix | 27,)) + number.to_bytes(8, "big")


ROOT_BLOCK_HASH = root_block_hash("vllm-none-hash")
