"""Answers of an index: how far pods hold a prompt and why, how far that can be trusted, and its size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys
from indexer.tiers import Tiers


class StreamState(StrEnum):
    """How far the index's view of one pod can be trusted."""

    EXACT = "EXACT"
    RECOVERING = "RECOVERING"
    STALE = "STALE"


NOT_FOLLOWED = StreamState.STALE, "not_followed"
_ALL_ONE = np.zeros(0, np.int32)
_NO_STATES: Mapping[str, StreamState] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PodMatch:
    """How much of a prompt one pod holds."""

    pod: str  # "ip:port"
    # Length of the longest unbroken prefix in any tier, speculative blocks included; whole blocks of the
    # pod's engine. An engine computes at least a prompt's last token, so of a whole prompt it may serve one
    # of its blocks less.
    cached_blocks: int
    # How many of these are best held in which tier, none of them 0; what was only just sent there counts as
    # "speculative".
    blocks_by_tier: Mapping[str, int]
    weighted_blocks: float  # sum of the best tiers' weights over these blocks; never rounded
    state: StreamState  # state of the pod's event stream; STALE for a pod that is not followed


class PodMatches(Mapping[str, PodMatch]):
    """Matches of many pods, as arrays; read as a mapping it makes one `PodMatch` for each pod asked for.

    No dataclass: one is made for each request, and a frozen one costs a microsecond.
    """

    __slots__ = "blocks_by_tier", "cached_blocks", "followed", "longest", "rows", "states", "strides", "tiers"

    def __init__(
        self,
        rows: Mapping[str, int],
        tiers: Tiers,
        cached_blocks: NDArray[np.int32],
        blocks_by_tier: NDArray[np.int32],
        longest: int | None = None,
        *,
        strides: NDArray[np.int32] = _ALL_ONE,
        states: Mapping[str, StreamState] = _NO_STATES,
        followed: Collection[str] = (),
    ) -> None:
        self.rows = rows  # each pod's row in the arrays
        self.tiers = tiers  # names and weights of the columns of `blocks_by_tier`
        self.cached_blocks = cached_blocks  # int32 [pods], see `PodMatch`
        self.blocks_by_tier = blocks_by_tier  # int32 [pods, tiers], see `PodMatch`
        self.longest = int(cached_blocks.max(initial=0)) if longest is None else longest  # of `cached_blocks`
        # int32 [pods]: index blocks per block of the pod's engine; empty: 1 for all.
        self.strides = strides
        self.states = states  # of each stream that was opened
        self.followed = followed  # all pods that are followed

    def state(self, pod: str) -> StreamState:
        # Before the subscriber has come to a new pod, it is on its way to a view.
        unknown = StreamState.RECOVERING if pod in self.followed else StreamState.STALE
        return self.states.get(pod, unknown)

    def whole_blocks(self, pod: str, keys: Keys) -> Keys:
        """Return the keys of a prompt's blocks that fill blocks of the pod's engine."""
        stride = int(self.strides[self.rows[pod]]) if len(self.strides) else 1
        return keys if stride == 1 else keys[: len(keys) - len(keys) % stride]

    def __getitem__(self, pod: str) -> PodMatch:
        row = self.rows[pod]
        counts: list[int] = self.blocks_by_tier[row].tolist()
        by_tier = {name: count for name, count in zip(self.tiers.names, counts, strict=True) if count}
        weighted = self.tiers.weighted(counts)
        return PodMatch(pod, int(self.cached_blocks[row]), by_tier, weighted, self.state(pod))

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Size of an index."""

    blocks: int  # unique blocks held
    capacity_blocks: int  # most that it may hold
    holdings: int  # pairs of (block, pod) held
    evicted_blocks: int  # blocks dropped so far because the capacity was reached
    used_bytes: int = 0  # memory that it takes for them
    capacity_bytes: int = 0  # most that it may take


class PrefixEnd(Enum):
    """Why a prefix is as long as it is."""

    PROMPT = "prompt"
    HOLE = "hole"
    OTHER_ATTENTION = "other_attention"


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a prompt that one engine holds."""

    engine: str
    state: StreamState  # state of its stream; STALE if it is not followed
    reason: str
    cached_blocks: int  # length of the prefix that is of use
    end: PrefixEnd
    held_blocks: int  # length of the prefix that is held, of use or not
    held_beyond: int  # blocks that are held behind the first one missing
    tiers: tuple[tuple[str, int], ...]  # best tier and length of each stretch of the held prefix


def explain_prefix(
    engine: str,
    held: NDArray[np.uint8],
    tiers: Tiers,
    *,
    status: tuple[StreamState, str],
    usable_blocks: int,
    stride: int = 1,
) -> Prefix:
    """Tells the story.

    Args:
        held: uint8 [blocks], see `Index.held`.
        status: State of the engine's stream and its reason.
        stride: Index blocks per block of the engine, which holds an engine block of the prompt or does not.
    """
    missing = np.flatnonzero(held == 0)
    first_missing = int(missing[0]) if len(missing) else len(held)
    length = first_missing - first_missing % stride
    best = [_best_tier(bits, tiers) for bits in held[:length].tolist()]
    if usable_blocks < length:
        end = PrefixEnd.OTHER_ATTENTION
    else:
        end = PrefixEnd.HOLE if first_missing < len(held) else PrefixEnd.PROMPT
    return Prefix(
        engine=engine,
        state=status[0],
        reason=status[1],
        cached_blocks=usable_blocks,
        end=end,
        held_blocks=length,
        held_beyond=int(np.count_nonzero(held[first_missing:])),
        tiers=tuple((tier, len(list(stretch))) for tier, stretch in groupby(best)),
    )


def _best_tier(bits: int, tiers: Tiers) -> str:
    # The lowest bit is the best tier's.
    return tiers.names[(bits & -bits).bit_length() - 1]
