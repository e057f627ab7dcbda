"""Results of index queries: cached prefix per pod, its explanation, stream state and index size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import groupby
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys
from indexer.wire.tiers import Tiers


class StreamState(StrEnum):
    """How far the index's view of one pod can be trusted."""

    EXACT = "EXACT"
    RECOVERING = "RECOVERING"
    STALE = "STALE"


NOT_FOLLOWED = StreamState.STALE, "not_followed"
_ALL_ONE = np.zeros(0, np.int32)
_NO_RANKS: Mapping[str, int] = MappingProxyType({})
_NO_STATES: Mapping[str, StreamState] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PodMatch:
    """Cached prefix of a prompt at one pod."""

    pod: str  # "ip:port"
    # Length of the longest unbroken prefix in any tier, in index blocks, speculative blocks included; cut to
    # whole blocks of the pod's engine. If a whole prompt is cached, the engine may serve one of its blocks
    # less, because it computes at least the last token.
    cached_blocks: int
    # Blocks of this prefix by their best tier, without zeros. Blocks of a request that was only just sent to
    # the pod count as "speculative".
    blocks_by_tier: Mapping[str, int]
    weighted_blocks: float  # sum over these blocks of their best tier's weight; never rounded
    state: StreamState  # state of the pod's event stream; STALE for a pod that is not followed


class PodMatches(Mapping[str, PodMatch]):
    """Matches of many pods, as arrays; as a mapping, it creates the `PodMatch` of a pod when it is read.

    Not a dataclass: one is created per request, and a frozen dataclass costs a microsecond more.
    """

    __slots__ = (
        *("blocks_by_tier", "cached_blocks", "followed", "longest", "ranks", "rows", "states", "strides"),
        "tiers",
    )

    def __init__(
        self,
        rows: Mapping[str, int],
        tiers: Tiers,
        cached_blocks: NDArray[np.int32],
        blocks_by_tier: NDArray[np.int32],
        longest: int | None = None,
        *,
        strides: NDArray[np.int32] = _ALL_ONE,
        ranks: Mapping[str, int] = _NO_RANKS,
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
        self.ranks = ranks  # by pod with several engines: the rank whose match counts
        self.states = states  # of each stream that was opened, by pod
        self.followed = followed  # all pods that are followed

    def state(self, pod: str) -> StreamState:
        # A new pod has no stream until the subscriber reaches it; its view is about to be built.
        unknown = StreamState.RECOVERING if pod in self.followed else StreamState.STALE
        return self.states.get(pod, unknown)

    def whole_blocks(self, pod: str, keys: Keys) -> Keys:
        """Return the leading keys that fill whole blocks of the pod's engine."""
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
    capacity_blocks: int  # maximum of `blocks`
    holdings: int  # (block, pod) pairs held
    evicted_blocks: int  # blocks evicted so far because the capacity was reached
    used_bytes: int = 0  # memory used for these blocks
    capacity_bytes: int = 0  # maximum of `used_bytes`


class PrefixEnd(Enum):
    """Reason why a cached prefix ends where it does."""

    PROMPT = "prompt"  # all blocks are cached
    HOLE = "hole"  # the next block is missing
    OTHER_ATTENTION = "other_attention"  # another KV cache group lacks blocks that are needed to resume
    DRAFTER = "drafter"  # the engine drops the last matched block of every hit for its drafter


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached prefix of a prompt at one engine, with its explanation."""

    engine: str
    state: StreamState  # state of its stream; STALE if it is not followed
    reason: str  # of the state
    cached_blocks: int  # length of the prefix that the engine can resume from
    end: PrefixEnd
    held_blocks: int  # length of the unbroken prefix that it holds, usable or not
    held_beyond: int  # blocks held after the first missing one
    tiers: tuple[tuple[str, int], ...]  # best tier and length in blocks of each stretch of the held prefix
    drafter: str = ""  # what is known of the engine's drafter, in words; empty: no sign of one
    proven_blocks: int = 0  # length of the prefix that is proven to be held; speculative blocks are not
    end_proven: bool = False  # whether it is proven that the engine holds no more of the prompt


def explain_prefix(
    engine: str,
    held: NDArray[np.uint8],
    tiers: Tiers,
    *,
    status: tuple[StreamState, str],
    usable_blocks: int,
    stride: int = 1,
    drops: bool = False,
    drafter: str = "",
    proven: tuple[int, bool] = (0, False),
) -> Prefix:
    """Explain how long an engine's cached prefix is and why it ends there.

    Args:
        engine: Name of the engine, `PodStream.holder`.
        held: uint8 [blocks], see `FlatIndex.held`.
        status: State of the engine's stream and its reason.
        stride: Index blocks per engine block; the held prefix is cut to whole engine blocks.
        drops: Whether the engine drops the last matched block of every hit.
        drafter: See `Prefix`.
        proven: `proven_blocks` and `end_proven` of `Prefix`.
    """
    missing = np.flatnonzero(held == 0)
    first_missing = int(missing[0]) if len(missing) else len(held)
    length = first_missing - first_missing % stride
    best = [_best_tier(bits, tiers) for bits in held[:length].tolist()]
    if usable_blocks < length:
        # The block with the prompt's last token is not served either.
        is_drop = drops and length - usable_blocks <= 2 * stride
        end = PrefixEnd.DRAFTER if is_drop else PrefixEnd.OTHER_ATTENTION
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
        drafter=drafter,
        proven_blocks=proven[0],
        end_proven=proven[1],
    )


def _best_tier(bits: int, tiers: Tiers) -> str:
    # Tiers are numbered from the best one, so the lowest bit is the best tier.
    return tiers.names[(bits & -bits).bit_length() - 1]
