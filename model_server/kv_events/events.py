"""KV cache events in the wire layout of vLLM 0.32, and the block contents that they announce.

A block's content outlives its request, so that a copy in another tier can be announced with its tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from model_server.kv_events.hashing import ExtraKeys, event_hash
from model_server.shapes.shape import KvGroupSpec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"

ExternalBlockHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """Event: blocks of one request were cached, in chain order.

    Fields without a default are always encoded (nil when None); the others only when set.
    """

    block_hashes: Sequence[ExternalBlockHash]  # opaque to readers
    parent_block_hash: ExternalBlockHash | None  # block before the run; None for a first block
    token_ids: Sequence[int]  # the tokens of the whole run
    block_size: int  # tokens per block
    lora_id: int | None  # one-based adapter number, None for the base model
    medium: str | None  # storage tier: ``GPU`` (any device) or ``CPU``
    lora_name: str | None  # adapter name, None for the base model
    # Hash inputs besides the tokens (adapter, salt), one entry per hash.
    extra_keys: Sequence[Sequence[object] | None] | None = None
    group_idx: int | None = None  # KV cache group of models with several kinds of attention
    kv_cache_spec_kind: str | None = None  # for example ``full_attention`` or ``sliding_window``
    kv_cache_spec_sliding_window: int | None = None  # window in tokens


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """Event: one copy of each block was removed from the medium; other copies may remain."""

    block_hashes: Sequence[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """Event: the prefix cache was reset; every block announced before is gone."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events of one engine step, encoded as the array ``[ts, events, data_parallel_rank]``."""

    ts: float  # wall clock in seconds since the epoch
    events: Sequence[KVEvent]  # in the order of the pool's operations
    data_parallel_rank: int | None = 0  # rank of the engine; this server has one engine


# Receives the events of one step on the engine's thread, which it must not block.
PublishEvents: TypeAlias = Callable[[Sequence[KVEvent]], object]


# Encodes a `KVEventBatch` as the payload frame of an event message.
encode_batch = msgspec.msgpack.Encoder().encode
# Prefix cache key: (KV cache group, block hash). Groups cache KV of different layers for the same tokens.
CacheKey: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """Identity and tokens of one full block."""

    group: int  # KV cache group
    block_hash: bytes  # chained hash of its tokens and all tokens before them
    parent: bytes | None  # hash of the block before it; None at the start of a prompt
    token_ids: tuple[int, ...]  # its own tokens
    extra_keys: ExtraKeys | None  # other inputs of the hash, tagged
    lora: tuple[int, str] | None  # id and name of the adapter that computed it

    @property
    def key(self) -> CacheKey:
        return self.group, self.block_hash


@dataclass(frozen=True)
class KVEventBuilder:
    """Builder of the events of one engine's blocks."""

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
        """Return the event for blocks of one group that were cached.

        Args:
            contents: Blocks in chain order; consecutive unless `token_ids` is given.
            medium: Storage tier.
            parent: Hash of the block before the run; used only with `token_ids`.
            token_ids: Tokens of the whole run if `contents` are only some of its blocks.
        """
        first = contents[0]
        if token_ids is None:
            parent = first.parent
            token_ids = [token for content in contents for token in content.token_ids]
        group = self.groups[first.group]
        lora_id, lora_name = first.lora or (None, None)
        return BlockStored(
            block_hashes=[event_hash(content.block_hash) for content in contents],
            parent_block_hash=None if parent is None else event_hash(parent),
            token_ids=token_ids,
            block_size=self.block_tokens,
            lora_id=lora_id,
            medium=medium,
            lora_name=lora_name,
            # Events carry the bare values; the tags only make the hash unambiguous.
            extra_keys=[
                None if content.extra_keys is None else [key[1] for key in content.extra_keys]
                for content in contents
            ],
            group_idx=first.group,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
        )

    def removed(self, content: BlockContent, medium: str) -> BlockRemoved:
        return BlockRemoved([event_hash(content.block_hash)], medium, content.group)


def runs(contents: Sequence[BlockContent]) -> Iterator[list[BlockContent]]:
    """Split blocks into runs for one event each: every block is the child of the one before it."""
    run: list[BlockContent] = []
    for content in contents:
        if run and (
            content.parent != run[-1].block_hash
            or content.group != run[-1].group
            or content.lora != run[-1].lora
        ):
            yield run
            run = []
        run.append(content)
    if run:
        yield run
