"""Wire format of view snapshots: encodes a view into messages of at most 1 MiB, decodes and validates them.

Each message is a msgpack map with a field `type`; columns of numbers are little-endian bytes. A snapshot is a
header, parts, and an end message with the number of parts. Types, lengths and bounds of received messages are
checked here, once; an incomplete snapshot is rejected as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from indexer.config import IndexerConfig
from indexer.errors import PeerError
from indexer.index.layout import PART_BLOCKS, HeldBlocks
from indexer.views.view_parts import ViewFacts, ViewPart, ViewSnapshot, words

# Increased whenever block keys, names or the format of these messages change.
SCHEMA = 2
MESSAGE_BYTES_MAX = 1 << 20

# Format of the parts: columns of block names.
FORM = "flat"

# Snapshots with more copies of one block in one tier are rejected.
COPIES_MAX = 65_536
DIGEST_BYTES = 16

_SEQUENCE_MAX = (1 << 64) - 2
# Minimum size by which a message counts against the bound: about its memory overhead.
_MESSAGE_BYTES = 1024

_Group = Annotated[int, Meta(ge=0, le=65_535)] | None
_Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class _Header(Struct, frozen=True, tag="header"):
    sequence: Annotated[int, Meta(ge=0)]
    digest: _Digest
    evicted_blocks: Annotated[int, Meta(ge=0)]
    facts: ViewFacts


class _Held(Struct, frozen=True, tag="held"):
    group: _Group
    keys: bytes
    tiers: bytes
    name_counts: bytes
    names: bytes
    copies: bytes


class _End(Struct, frozen=True, tag="end"):
    parts: int


_Message = _Header | _Held | _End
_DECODER = msgspec.msgpack.Decoder(_Message)


def snapshot_messages(snapshot: ViewSnapshot) -> Iterator[bytes]:
    """Yield the messages of a snapshot.

    Raises:
        PeerError: A part is too large for a message.
    """
    encode = msgspec.msgpack.encode
    header = _Header(snapshot.sequence, snapshot.digest, snapshot.evicted_blocks, snapshot.facts)
    yield encode(header)
    for part in snapshot.parts:
        assert isinstance(part, ViewPart), "a view that was just listed has no changes"
        message = encode(_Held(part.group, *(column.tobytes() for column in part.blocks)))
        if len(message) > MESSAGE_BYTES_MAX:
            raise PeerError("too_large", f"a part of {len(message)} bytes, at most {MESSAGE_BYTES_MAX}")
        yield message
    yield encode(_End(len(snapshot.parts)))


def read_messages(messages: Iterable[bytes], config: IndexerConfig, tiers: int) -> tuple[ViewSnapshot, int]:
    """Decode all messages of a snapshot; return it and their size in bytes; `tiers` is the number of tiers.

    Raises:
        PeerError: The snapshot is malformed, incomplete or larger than `snapshot_max_bytes`.
    """
    header, end, parts = None, None, list[ViewPart]()
    size_bytes = counted_bytes = 0
    for number, data in enumerate(messages):
        size_bytes += len(data)
        counted_bytes += max(len(data), _MESSAGE_BYTES)
        if counted_bytes > config.snapshot_max_bytes:
            raise PeerError("too_large", f"the snapshot exceeds {config.snapshot_max_bytes} bytes")
        try:
            message: _Message = _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError("broken", f"message {number}: {error}") from None
        _require(end is None, "a message after the end")
        if header is None:
            if not isinstance(message, _Header):
                raise PeerError("broken", "the first message is not a header")
            header, groups = message, _groups(message, config.block_tokens)
            continue
        match message:
            case _Header():
                raise PeerError("broken", "a second header")
            case _End(expected):
                end = expected
            case _:
                _require(message.group in groups, f"group {message.group} is not in the header")
                parts.append(ViewPart(message.group, _held(message, tiers)))
    if header is None or end != len(parts):
        raise PeerError("broken", f"received {len(parts)} parts, expected {end}")
    snapshot = ViewSnapshot(header.sequence, header.digest, header.facts, header.evicted_blocks, parts)
    return snapshot, size_bytes


def _groups(header: _Header, block_tokens: int) -> frozenset[int | None]:
    tokens = header.facts.run_tokens
    _require(header.sequence <= _SEQUENCE_MAX, "sequence")
    _require(tokens is None or tokens % block_tokens == 0, "run_tokens")
    usable = (fact.group for fact in header.facts.groups if fact.usable and not fact.leads)
    return frozenset((None, *usable))


def _held(message: _Held, tier_count: int) -> HeldBlocks:
    keys, names = _words(message.keys), _words(message.names)
    tiers, name_counts = _bytes(message.tiers), _bytes(message.name_counts)
    copies = _words(message.copies).view(np.int64)
    _require(0 < len(keys) <= PART_BLOCKS, "number of blocks")
    _require(len(keys) == len(tiers) == len(name_counts), "columns of different lengths")
    _require(bool(tiers.all()) and int(tiers.max()) < 1 << tier_count, "tiers")
    _require(int(name_counts.sum()) == len(names) <= 2 * PART_BLOCKS and names.all(), "names")
    _require(len(copies) % 3 == 0 and len(copies) <= 6 * PART_BLOCKS, "number of copies")
    further = copies.reshape(-1, 3)
    places, tier, count = further[:, 0], further[:, 1], further[:, 2]
    in_bounds = (places >= 0) & (places < len(keys)) & (tier >= 0) & (tier < tier_count)
    _require(bool(in_bounds.all()), "place or tier of copies")
    _require(bool(((count > 0) & (count < COPIES_MAX)).all()), "number of copies of a block")
    _require(bool(((tiers[places] >> tier) & 1).all()), "copies in a tier that does not hold the block")
    return HeldBlocks(keys, tiers, name_counts, names, further)


def _words(data: bytes) -> NDArray[np.uint64]:
    _require(len(data) % 8 == 0, "length of a column of 64-bit numbers")
    return words(data)


def _bytes(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).copy()


def _require(condition: bool | np.bool, what: str) -> None:
    if not condition:
        raise PeerError("broken", f"invalid snapshot: {what}")
