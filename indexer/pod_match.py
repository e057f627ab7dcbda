"""What the indexer answers: how much of a prompt each pod holds, and how far that can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.index import MatchTable
from indexer.keys import Keys
from indexer.stream import StreamState
from indexer.tiers import Tiers


@dataclass(frozen=True, slots=True)
class PodMatch:
    """How much of a prompt one pod holds.

    Attributes:
        pod: "ip:port".
        cached_blocks: Length of the longest unbroken prefix in any tier, speculative blocks included; whole
            blocks of the pod's engine. An engine computes at least a prompt's last token, so of a whole
            prompt it may serve one of its blocks less.
        blocks_by_tier: How many of these are best held in which tier; what was only just sent there counts
            as "speculative".
        weighted_blocks: Sum of the best tiers' weights over these blocks.
        state: State of the pod's event stream; STALE for a pod that is not followed.
    """

    pod: str
    cached_blocks: int
    blocks_by_tier: Mapping[str, int]
    weighted_blocks: float
    state: StreamState


class PodMatches(Mapping[str, PodMatch]):
    """Matches of many pods: a mapping that makes a `PodMatch` when one is asked for, and its arrays.

    No dataclass, as `MatchTable` is none.

    Attributes:
        table: The index's answer.
        states: State of each stream that was opened.
        followed: All pods that are followed.
    """

    __slots__ = ("followed", "states", "table")

    def __init__(
        self, table: MatchTable, states: Mapping[str, StreamState], followed: frozenset[str]
    ) -> None:
        self.table = table
        self.states = states
        self.followed = followed

    @property
    def rows(self) -> Mapping[str, int]:
        """Pod -> its row in the arrays."""
        return self.table.rows

    @property
    def tiers(self) -> Tiers:
        """Names and weights of the columns of `blocks_by_tier`."""
        return self.table.tiers

    @property
    def cached_blocks(self) -> NDArray[np.int32]:
        """int32 [pods], see `PodMatch.cached_blocks`."""
        return self.table.blocks

    @property
    def blocks_by_tier(self) -> NDArray[np.int32]:
        """int32 [pods, tiers], see `PodMatch.blocks_by_tier`."""
        return self.table.blocks_by_tier

    def state(self, pod: str) -> StreamState:
        """State of one pod's stream."""
        # Before the subscriber has come to a new pod, it is on its way to a view.
        unknown = StreamState.RECOVERING if pod in self.followed else StreamState.STALE
        return self.states.get(pod, unknown)

    def whole_blocks(self, pod: str, keys: Keys) -> Keys:
        """Return the keys of a prompt's blocks that fill blocks of the pod's engine."""
        stride = self.table.stride(pod)
        return keys if stride == 1 else keys[: len(keys) - len(keys) % stride]

    def __getitem__(self, pod: str) -> PodMatch:
        match = self.table[pod]
        return PodMatch(pod, match.blocks, match.blocks_by_tier, match.weighted_blocks, self.state(pod))

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)
