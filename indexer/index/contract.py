"""Results of index queries: cached prefix per pod, its explanation, stream state and index size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys
from indexer.wire.tiers import Tiers


class StreamState(StrEnum):
    """How far the index's view of one pod can be trusted."""

    EXACT = "EXACT"
    RECOVERING = "RECOVERING"
    STALE = "STALE"


class Cause:
    """Why tokens of a prompt are served from the cache or computed, in their order along the prompt.

    Plain strings, because every pick uses several: a member of an enum costs a call to read and one to hash.
    """

    HIT = "hit"  # served from the cache, as predicted
    DRAFTER = "drafter"  # the engine drops the last matched block of every hit for its drafter
    WINDOW = "window"  # held, but layers with a window lack blocks that are needed to resume
    CHECKPOINT = "checkpoint"  # held, but layers with a state have none saved there
    ELSEWHERE = "elsewhere"  # held by another pod, or rank, than the chosen one
    EVICTED = "evicted"  # held once: removed, cleared, or gone with its pod
    OTHER_SCOPE = "other_scope"  # held under another cache salt or adapter
    NEVER_CACHED = "never_cached"  # not known to have been held
    PARTIAL_BLOCK = "partial_block"  # in no full block before the last token, which is always computed
    UNKNOWN = "unknown"  # the token ids are not known, or the engine does not look them up


class Limit(NamedTuple):
    """Why an engine serves less than the prefix that it holds."""

    drops: bool = False  # whether it drops the last matched block of every hit
    groups: str | None = None  # WINDOW or CHECKPOINT if other layers need blocks of their own


class PromptCauses(NamedTuple):
    """Tokens of a request's prompts by cause; they sum up to all tokens."""

    tokens: dict[str, int]  # without zeros
    evicted_s_ago: float | None = None  # since the first evicted block was lost; None: none was


NOT_FOLLOWED = StreamState.STALE, "not_followed"
_ALL_ONE = np.zeros(0, np.int32)
_NO_RANKS: Mapping[str, int] = MappingProxyType({})
_NO_STATES: Mapping[str, StreamState] = MappingProxyType({})
_NO_CAUSES: Mapping[str, int] = MappingProxyType({})


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
        *("behind", "blocks_by_tier", "cached_blocks", "followed", "held", "longest", "ranks", "rows"),
        *("states", "strides", "tiers"),
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
        behind: Sequence[int] = (0, 0, 0),
        held: NDArray[np.int32] | None = None,
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
        # int32 [pods]: the unbroken prefix that each pod holds, whether its engine serves all of it or not.
        self.held = cached_blocks if held is None else held
        # In index blocks, the longest prefix that any pod holds, and the longest that was ever held as far as
        # remembered; then the second at which the first block that none holds was lost, or 0.
        self.behind = behind

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
    CHECKPOINT = "checkpoint"  # layers with a state have none saved behind a later block


_ENDS = {
    Cause.DRAFTER: PrefixEnd.DRAFTER,
    Cause.WINDOW: PrefixEnd.OTHER_ATTENTION,
    Cause.CHECKPOINT: PrefixEnd.CHECKPOINT,
}


def split_prompt(
    match: PodMatches, pod: str, prompt_tokens: int, block_tokens: int, limit: Limit, scoped_blocks: int = 0
) -> dict[str, int]:
    """Return the tokens of a prompt by cause, if it is computed by `pod`; they sum up to `prompt_tokens`.

    Args:
        block_tokens: Tokens per index block.
        scoped_blocks: Prefix that is held under another salt or adapter.
    """
    row = match.rows[pod]
    stride = match.strides.item(row) if len(match.strides) else 1
    served = match.cached_blocks.item(row)
    held = served if match.held is match.cached_blocks else match.held.item(row)
    any_held, ever_held, _ = match.behind
    servable = (prompt_tokens - 1) // block_tokens if prompt_tokens else 0
    ends = [(Cause.HIT, served)]  # rarely many
    if held > served:
        if limit.drops:
            ends.append((Cause.DRAFTER, min(held, served + stride)))
        ends.append((limit.groups or Cause.ELSEWHERE, held))
    if any_held or match.longest > served:
        ends.append((Cause.ELSEWHERE, max(any_held, match.longest)))
    if ever_held:
        ends.append((Cause.EVICTED, ever_held))
    if scoped_blocks:
        ends.append((Cause.OTHER_SCOPE, scoped_blocks))
    ends.append((Cause.NEVER_CACHED, servable))
    tokens: dict[str, int] = {}
    start = 0
    for cause, end in ends:
        if end > servable:
            end = servable
        end -= end % stride
        if end > start:
            tokens[cause] = tokens.get(cause, 0) + (end - start) * block_tokens
            start = end
    if prompt_tokens > start * block_tokens:
        tokens[Cause.PARTIAL_BLOCK] = prompt_tokens - start * block_tokens
    return tokens


class HeldPrefix(NamedTuple):
    """Part of a prompt that an engine holds."""

    end: PrefixEnd
    held_blocks: int  # length of the unbroken prefix that it holds, usable or not
    held_beyond: int  # blocks held after the first missing one
    tiers: tuple[tuple[str, int], ...]  # best tier and length in blocks of each stretch of the held prefix
    evicted_s_ago: float | None = None  # since a pod lost the first missing block; None: not remembered


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached prefix of a prompt at one engine, with its explanation."""

    engine: str
    state: StreamState  # state of its stream; STALE if it is not followed
    reason: str  # of the state
    cached_blocks: int  # length of the prefix that the engine can resume from
    held: HeldPrefix
    drafter: str = ""  # what is known of the engine's drafter, in words; empty: no sign of one
    proven_blocks: int = 0  # length of the prefix that is proven to be held; speculative blocks are not
    end_proven: bool = False  # whether it is proven that the engine holds no more of the prompt
    faults: tuple[str, ...] = ()  # why its cache cannot be used as its users expect, for operators


def explain_prefix(
    held: NDArray[np.uint8],
    tiers: Tiers,
    *,
    stride: int = 1,
    causes: Mapping[str, int] = _NO_CAUSES,
    evicted_s_ago: float | None = None,
) -> HeldPrefix:
    """Explain how long an engine's cached prefix is and why it ends there.

    Args:
        held: uint8 [blocks], see `FlatIndex.held`.
        stride: Index blocks per engine block; the held prefix is cut to whole engine blocks.
        causes: The prompt's tokens, see `split_prompt`.
    """
    missing = np.flatnonzero(held == 0)
    first_missing = int(missing[0]) if len(missing) else len(held)
    length = first_missing - first_missing % stride
    # Tiers are numbered from the best one, so the lowest bit is the best tier.
    best = [tiers.names[(bits & -bits).bit_length() - 1] for bits in held[:length].tolist()]
    end = PrefixEnd.HOLE if first_missing < len(held) else PrefixEnd.PROMPT
    if shortened := {cause: tokens for cause, tokens in causes.items() if cause in _ENDS}:
        end = _ENDS[max(shortened, key=shortened.__getitem__)]
    return HeldPrefix(
        end,
        length,
        int(np.count_nonzero(held[first_missing:])),
        tuple((tier, len(list(stretch))) for tier, stretch in groupby(best)),
        evicted_s_ago if first_missing < len(held) else None,
    )
