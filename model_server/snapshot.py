"""The body of `GET /kv_events/snapshot`: what the caches hold, and from which batch on the stream adds to it.

In: the contents of both tiers and the number of the next batch, as of one moment between two steps. Out:
pieces of one msgpack map:

    schema 1, boot_id (hex, one for each process), sequence, block_size, blocks (copies told), batches

`batches` is a list of payloads as they are published. Applied in order to an empty view, and followed by the
stream's batches from `sequence` on, they give what whoever heard every batch holds.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from model_server.block_content import Announcer, BlockContent, ContentKey, runs
from model_server.events import BlockStored, KVEventBatch, encode_batch

SCHEMA = 1
MEDIA_TYPE = "application/msgpack"

_BATCH_BLOCKS = _RUN_BLOCKS = 512
_FIXMAP_6 = b"\x86"
_ARRAY_32 = b"\xdd"

_encode = msgspec.msgpack.encode


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the caches between two steps."""

    boot_id: str  # names this process
    sequence: int  # number of the first batch that is not in here
    rank: int | None  # third element of every batch
    announcer: Announcer  # writes the events
    held: Mapping[str, Sequence[BlockContent]]  # by medium, what is held there; a content once for each copy

    def pieces(self) -> Iterator[bytes]:
        """Return the body, encoded piece by piece."""
        batches = self._batches()
        yield _FIXMAP_6
        for name, value in (
            ("schema", SCHEMA),
            ("boot_id", self.boot_id),
            ("sequence", self.sequence),
            ("block_size", self.announcer.block_tokens),
            ("blocks", sum(map(len, self.held.values()))),
        ):
            yield _encode(name) + _encode(value)
        yield _encode("batches") + _ARRAY_32 + len(batches).to_bytes(4, "big")
        now_s = time.time()
        for events in batches:
            yield _encode(encode_batch(KVEventBatch(now_s, events, self.rank)))

    def events(self) -> Iterator[BlockStored]:
        """Announce all that is held.

        First one copy of each block, parents before children, in runs. Then the other copies, each for itself
        and children before parents: a run that is continued in the same batch may be taken for one that is
        only told again.
        """
        copies = {medium: Counter(content.key for content in held) for medium, held in self.held.items()}
        order = _parents_first({content.key: content for held in self.held.values() for content in held})
        media = {key: medium for medium in reversed(copies) for key in copies[medium]}
        for medium, together in groupby(order, lambda content: media[content.key]):
            for run in runs(list(together)):
                for first in range(0, len(run), _RUN_BLOCKS):
                    yield self.announcer.stored(run[first : first + _RUN_BLOCKS], medium)
        for content in reversed(order):
            for medium, counted in copies.items():
                for _ in range(counted[content.key] - (medium == media[content.key])):
                    yield self.announcer.stored([content], medium)

    def _batches(self) -> list[list[BlockStored]]:
        batches: list[list[BlockStored]] = []
        blocks = _BATCH_BLOCKS
        for event in self.events():
            if blocks >= _BATCH_BLOCKS:
                batches.append([])
                blocks = 0
            batches[-1].append(event)
            blocks += len(event.block_hashes)
        return batches


def _parents_first(contents: Mapping[ContentKey, BlockContent]) -> list[BlockContent]:
    order: list[BlockContent] = []
    placed: set[ContentKey] = set()
    for key in contents:
        chain = []
        at: ContentKey | None = key
        while at is not None and at in contents and at not in placed:
            placed.add(at)
            content = contents[at]
            chain.append(content)
            at = None if content.parent is None else (content.group, content.parent)
        order.extend(reversed(chain))
    return order
