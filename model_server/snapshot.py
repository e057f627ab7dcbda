"""The body of `GET /kv_events/snapshot`: what the caches hold, and from which batch on the stream adds to it.

In: a copy of the cache mirror and the number of the next batch. Out: pieces of one msgpack map:

    schema 1, boot_id (hex, one for each process), sequence, block_size, blocks (copies told), batches

`batches` is a list of payloads as they are published. Applied in order to an empty view, and followed by the
stream's batches from `sequence` on, they give what whoever heard every batch holds.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from model_server.cache_mirror import CacheMirror
from model_server.events import BlockStored, KVEventBatch, encode_batch

SCHEMA = 1
MEDIA_TYPE = "application/msgpack"

_BATCH_BLOCKS = 512
_FIXMAP_6 = b"\x86"
_ARRAY_32 = b"\xdd"

_encode = msgspec.msgpack.encode


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the caches between two steps.

    Attributes:
        boot_id: Names this process.
        sequence: Number of the first batch that is not in here.
        block_size: Tokens in one block.
        rank: Third element of every batch.
        held: What is held; nobody else changes it.
    """

    boot_id: str
    sequence: int
    block_size: int
    rank: int | None
    held: CacheMirror

    def pieces(self) -> Iterator[bytes]:
        """The body, encoded piece by piece."""
        batches = self._batches()
        yield _FIXMAP_6
        for name, value in (
            ("schema", SCHEMA),
            ("boot_id", self.boot_id),
            ("sequence", self.sequence),
            ("block_size", self.block_size),
            ("blocks", self.held.copies()),
        ):
            yield _encode(name) + _encode(value)
        yield _encode("batches") + _ARRAY_32 + len(batches).to_bytes(4, "big")
        now_s = time.time()
        for events in batches:
            yield _encode(encode_batch(KVEventBatch(now_s, events, self.rank)))

    def _batches(self) -> list[list[BlockStored]]:
        batches: list[list[BlockStored]] = []
        blocks = _BATCH_BLOCKS
        for event in self.held.events():
            if blocks >= _BATCH_BLOCKS:
                batches.append([])
                blocks = 0
            batches[-1].append(event)
            blocks += len(event.block_hashes)
        return batches
