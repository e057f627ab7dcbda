"""KV cache events in the layout that vLLM 0.32 sends (msgpack maps with a ``type`` key).

In: what the engine's block pool did in one step. Out: the payload bytes of one event batch. Knows
nothing about sockets or sequence numbers (see ``publish``) nor about how block hashes are made.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"

BlockHash: TypeAlias = int | bytes
ExtraKeys: TypeAlias = Sequence[object]


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
    extra_keys: Sequence[ExtraKeys | None] | None = None
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

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Drop the events."""


_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(batch: KVEventBatch) -> bytes:
    """Encode one batch as the payload frame of an event message."""
    return _ENCODER.encode(batch)
