"""KV cache events in the layout that vLLM 0.32 sends, and the full blocks that they announce.

What a block holds outlives its request, so that a copy in another tier can be announced with its tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from model_server.kv_events.hashing import ExtraKeys, event_hash
from model_server.shapes import KvGroupSpec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"

BlockHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """A run of newly full blocks of one request, in chain order.

    Fields without a default are always on the wire (nil when None); the others only when set.
    """

    block_hashes: Sequence[BlockHash]  # the engine's own hashes, opaque to readers
    parent_block_hash: BlockHash | None  # hash of the block before the run; None at the start of a prompt
    token_ids: Sequence[int]  # the tokens of the whole run
    block_size: int  # tokens per block
    lora_id: int | None  # one-based adapter number, None for the base model
    medium: str | None  # where the blocks lie: ``GPU`` (any device) or ``CPU``
    lora_name: str | None  # adapter name, None for the base model
    # What went into each hash beside the tokens (adapter, salt), one entry per hash.
    extra_keys: Sequence[Sequence[object] | None] | None = None
    group_idx: int | None = None  # KV cache group of models with several kinds of attention
    kv_cache_spec_kind: str | None = None  # for example ``full_attention`` or ``sliding_window``
    kv_cache_spec_sliding_window: int | None = None  # window in tokens


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """One physical copy of each hash left the medium; other copies of the same hash may remain."""

    block_hashes: Sequence[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """The prefix cache was reset: nothing announced before is held any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """All events of one engine step: the positional array ``[ts, events, data_parallel_rank]``."""

    ts: float  # wall clock in seconds since the epoch
    events: Sequence[KVEvent]  # in the order of the pool's operations
    # Which engine of a data-parallel server; None when there is only one.
    data_parallel_rank: int | None = None


class EventSink(Protocol):
    """Where the engine hands its events to."""

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Take the events of one step; called on the engine thread, never blocks."""


class NullSink:
    """Swallows the events of an engine that announces nothing."""

    def publish(self, events: Sequence[KVEvent]) -> None: ...


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(batch: KVEventBatch) -> bytes:
    """Encode one batch as the payload frame of an event message."""
    return _ENCODER.encode(batch)


# Blocks of different KV cache groups hold different layers' KV of the same tokens.
ContentKey: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """One full block."""

    group: int  # KV cache group
    digest: bytes  # chained hash of its tokens and all before them
    parent: bytes | None  # digest of the block before it; None at the start of a prompt
    token_ids: tuple[int, ...]  # its own tokens
    extra_keys: ExtraKeys | None  # what else entered the digest, tagged
    lora: tuple[int, str] | None  # number and name of the adapter that it was computed with

    @property
    def key(self) -> ContentKey:
        return self.group, self.digest


@dataclass(frozen=True)
class Announcer:
    """Writes the events of one engine's blocks."""

    groups: Sequence[KvGroupSpec]
    block_tokens: int

    def stored(
        self,
        contents: Sequence[BlockContent],
        medium: str,
        *,
        parent: bytes | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> BlockStored:
        """Announce blocks of one group.

        Args:
            contents: In chain order; without `token_ids` they follow one another.
            medium: Where they lie.
            parent: Digest of the block before the run that `token_ids` are of.
            token_ids: Of a longer run of which `contents` are a part; None if they are all of it.
        """
        first = contents[0]
        if token_ids is None:
            parent = first.parent
            token_ids = [token for content in contents for token in content.token_ids]
        group = self.groups[first.group]
        lora_id, lora_name = first.lora or (None, None)
        return BlockStored(
            block_hashes=[event_hash(content.digest) for content in contents],
            parent_block_hash=None if parent is None else event_hash(parent),
            token_ids=token_ids,
            block_size=self.block_tokens,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            # Readers get the bare values; the tags only keep the hash unambiguous.
            extra_keys=[
                None if content.extra_keys is None else [key[1] for key in content.extra_keys]
                for content in contents
            ],
            group_idx=first.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
        )

    def removed(self, content: BlockContent, medium: str) -> BlockRemoved:
        """Announce that one copy of a block is gone."""
        return BlockRemoved([event_hash(content.digest)], medium, content.group)


def runs(contents: Sequence[BlockContent]) -> Iterator[list[BlockContent]]:
    """Cut blocks into runs that one event can announce: each block the child of the one before it."""
    run: list[BlockContent] = []
    for content in contents:
        if run and (
            content.parent != run[-1].digest or content.group != run[-1].group or content.lora != run[-1].lora
        ):
            yield run
            run = []
        run.append(content)
    if run:
        yield run
