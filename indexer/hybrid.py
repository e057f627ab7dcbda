"""Matches cut to what engines can resume: whole blocks of their own, and what hybrid attention needs.

An engine serves whole blocks of its own size only: an index block of a prompt may match although the rest of
its engine block differs. And layers may differ in what they remember: which blocks each KV cache group of a
pod holds comes in, the longest prefix that its engine can resume goes out. Knows neither events nor engine
hashes; each group but the lead is a holder of its own in the index.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiled.jit import kernel
from indexer.events import BlockStored
from indexer.flat_index import FlatIndex
from indexer.index import PodMatches
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER
from indexer.view_parts import GroupFact

# Sets of holders whose strides are kept as an array; a fleet asks for few.
_KEPT_ROWS_MAX = 64


class EngineStrides:
    """Index blocks per engine block, by holder. Written by one thread, read by any."""

    def __init__(self) -> None:
        # Replaced as a whole, never changed.
        self._strides: Mapping[str, int] = {}
        # By the identity of a match's rows, which is kept here too, so that no other takes its place.
        self._by_rows: dict[int, tuple[Mapping[str, int], NDArray[np.int32]]] = {}
        table = np.zeros((0, 1), np.int32)
        _cut(table[:, 0], table, table[:, 0])  # Compiled here, not while a first request waits.

    def learn(self, holder: str, stride: int) -> None:
        """Record the engine's index blocks per engine block; 1 if its blocks are not larger than those."""
        if self._strides.get(holder, 1) == stride:
            return
        others = {other: known for other, known in self._strides.items() if other != holder}
        self._strides = {**others, holder: stride} if stride > 1 else others
        self._by_rows = {}

    def of(self, holder: str) -> int:
        """Return the engine's index blocks per engine block; 1 where nothing else is known."""
        return self._strides.get(holder, 1)

    def whole_blocks(self, table: PodMatches) -> PodMatches:
        """Return the matches cut to whole engine blocks; `table` itself if no engine has larger ones."""
        if not self._strides:
            return table
        strides = self._of_rows(table.rows)
        if not len(strides):
            return table
        blocks, blocks_by_tier = table.cached_blocks.copy(), table.blocks_by_tier.copy()
        _cut(blocks, blocks_by_tier, strides)
        return PodMatches(table.rows, table.tiers, blocks, blocks_by_tier, strides=strides)

    def _of_rows(self, rows: Mapping[str, int]) -> NDArray[np.int32]:
        """Return int32 [rows], the holders' strides; empty if all are 1."""
        by_rows, known = self._by_rows, self._strides
        if (kept := by_rows.get(id(rows))) is not None:
            return kept[1]
        strides = np.ones(len(rows), np.int32)
        for holder in known.keys() & rows.keys():
            strides[rows[holder]] = known[holder]
        if not (strides > 1).any():
            strides = strides[:0]
        if len(by_rows) >= _KEPT_ROWS_MAX:
            by_rows.clear()
        by_rows[id(rows)] = rows, strides
        return strides


@kernel
def _cut(blocks: NDArray[np.int32], blocks_by_tier: NDArray[np.int32], strides: NDArray[np.int32]) -> None:
    """Round each row's blocks down to a multiple of its stride.

    An engine drops the end of a chain first, so what is cut off lies in the slowest tier that holds any.
    """
    for row in range(len(blocks)):
        over = blocks[row] % strides[row]
        blocks[row] -= over
        for tier in range(blocks_by_tier.shape[1] - 1, -1, -1):
            taken = min(over, blocks_by_tier[row, tier])
            blocks_by_tier[row, tier] -= taken
            over -= taken


ALL_BLOCKS = -1
NO_CHUNKS = 0


@dataclass(frozen=True, slots=True)
class GroupRule:
    """Which blocks of a group an engine needs to resume behind a prefix.

    These are the rules of vLLM's cache managers: full attention needs all blocks, a sliding window those that
    cover `window - 1` tokens before the prefix's end, a linear layer the one that holds the state at the end,
    chunked attention those of the chunk that the end lies in.

    Attributes:
        stride: Index blocks of one of the group's blocks.
        last_blocks: How many of its blocks in front of the prefix's end; ALL_BLOCKS.
        chunk: Index blocks of a chunk, in front of which nothing is needed; NO_CHUNKS.
    """

    stride: int
    last_blocks: int = ALL_BLOCKS
    chunk: int = NO_CHUNKS


@dataclass(frozen=True, slots=True)
class PodGroups:
    """The KV cache groups of a hybrid pod.

    Attributes:
        stride: Index blocks of one block of the lead group, whose blocks are the pod's own in the index.
        rules: The other groups' rules.
    """

    stride: int
    rules: Mapping[int, GroupRule]


def group_holder(pod: str, group: int) -> str:
    """The name in the index of a group other than the pod's lead."""
    return f"{pod}#{group}"


def usable_blocks(depth: int, stride: int, groups: Sequence[tuple[GroupRule, NDArray[np.uint8]]]) -> int:
    """The longest prefix that can be resumed.

    Args:
        depth: Unbroken prefix that the full attention of the lead group holds, in index blocks.
        stride: Index blocks of one of the lead group's blocks.
        groups: Each other group's rule and, uint8 [depth or more], at the last index block of each of its
            blocks anything but 0 if it is held.

    Returns:
        Its length in index blocks, a multiple of `stride`.
    """
    usable = -1
    while usable != depth:
        usable = depth = depth - depth % stride
        for rule, held in groups:
            depth = _resumable(held, depth, rule.stride, rule.last_blocks, rule.chunk)
    return usable


class HybridMatcher:
    """Cuts the matches of hybrid pods to what their engines can resume. Thread-safe.

    Args:
        index: Holds the pods' blocks, and each group's under its `group_holder`.
        block_tokens: Tokens of an index block.
    """

    def __init__(self, index: FlatIndex, block_tokens: int) -> None:
        self._index = index
        self._block_tokens = block_tokens
        self._speculative_bit = np.uint8(1 << index.tiers.number(SPECULATIVE_TIER))
        self._lock = threading.Lock()
        # Read by other threads; replaced as a whole.
        self._pods: Mapping[str, PodGroups] = {}
        # Compiled here, not while a first request waits.
        usable_blocks(1, 1, [(GroupRule(1), np.zeros(1, np.uint8))])

    def learn(self, pod: str, groups: PodGroups | None) -> None:
        """Takes over what a pod's events tell of its groups; None for a pod with one group, or none."""
        if self._pods.get(pod) is groups:
            return
        with self._lock:
            others = {other: known for other, known in self._pods.items() if other != pod}
            self._pods = others if groups is None else {**others, pod: groups}

    def refine(self, keys: Keys, table: PodMatches, prompt_tokens: int | None = None) -> PodMatches:
        """Shortens the matches of hybrid pods.

        A block that is only assumed to come to a pod is assumed in all its groups: what a request will leave
        in a window is not known before.

        Args:
            keys: What was matched.
            table: The index's answer for `keys`; the lead groups' unbroken prefixes.
            prompt_tokens: Length of the prompt. An engine computes at least its last token, so of a prompt
                that ends with a block it looks for the end of an earlier one. None: longer than `keys`.

        Returns:
            `table` itself if nothing is to be changed.
        """
        pods = self._pods
        if not pods:
            return table
        blocks = blocks_by_tier = None
        for pod in pods.keys() & table.rows.keys():
            row = table.rows[pod]
            depth = int(table.cached_blocks[row])
            if prompt_tokens is not None:
                depth = min(depth, max(0, prompt_tokens - 1) // self._block_tokens)
            usable = self._usable(keys[:depth], pod, pods[pod])
            if usable == table.cached_blocks[row]:
                continue
            if blocks is None or blocks_by_tier is None:
                blocks, blocks_by_tier = table.cached_blocks.copy(), table.blocks_by_tier.copy()
            cut = self._index.match(keys[:usable], (pod,))
            blocks[row], blocks_by_tier[row] = cut.cached_blocks[0], cut.blocks_by_tier[0]
        if blocks is None or blocks_by_tier is None:
            return table
        return PodMatches(table.rows, table.tiers, blocks, blocks_by_tier)

    def _usable(self, keys: Keys, pod: str, groups: PodGroups) -> int:
        if not len(keys):
            return 0
        assumed = self._index.held(keys, pod) & self._speculative_bit
        held = [
            (rule, self._index.held(keys, group_holder(pod, group)) | assumed)
            for group, rule in groups.rules.items()
        ]
        return usable_blocks(len(keys), groups.stride, held)


@kernel
def _resumable(held: NDArray[np.uint8], limit: int, stride: int, last_blocks: int, chunk: int) -> int:
    """The longest prefix within `limit` index blocks that one group can resume, see `GroupRule`."""
    end = limit // stride
    while end > 0:
        first = 0
        if last_blocks != ALL_BLOCKS:
            first = max(0, end - last_blocks)
        if chunk != NO_CHUNKS:
            first = end * stride // chunk * chunk // stride
        hole = end - 1
        while hole >= first and held[(hole + 1) * stride - 1] != 0:
            hole -= 1
        if hole < first:
            break
        # All ends between need the block that is missing, too: the first one needed never comes before.
        end = hole
    return end * stride


FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_SLIDING_WINDOW = frozenset({"sliding_window", "sliding_window_mla"})
_MAX_GROUPS = 32


class Unusable(Enum):
    """A group of which nothing is indexed: its rule is not known, or there are too many groups."""

    UNUSABLE = "unusable"


UNUSABLE: Final = Unusable.UNUSABLE


class CacheGroups:
    """What is known of one pod life's groups.

    Args:
        block_tokens: Tokens of an index block.

    Attributes:
        rules: For the matcher, a new object whenever something was learnt; None while only one group is used.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # None stands for the lead.
        self._groups: dict[int, GroupRule | Unusable | None] = {}
        self._lead_stride = 1
        self.rules: PodGroups | None = None

    @property
    def has_lead(self) -> bool:
        """Whether a full-attention group was seen."""
        return None in self._groups.values()

    @property
    def lead(self) -> int | None:
        """The lead group's number; None where the engine names no groups, or none of full attention yet."""
        return next((group for group, rule in self._groups.items() if rule is None), None)

    def of_store(self, event: BlockStored) -> GroupRule | Unusable | None:
        """The rule of a store's group, learnt if it is new; None for the lead."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if group is None:
            # An engine that tells no groups has one, and tells its kind or not.
            return None if kind is None or kind in FULL_ATTENTION else UNUSABLE
        if group not in self._groups and event.block_size:
            if len(self._groups) == _MAX_GROUPS:
                return UNUSABLE
            self._learn(group, event)
        return self._groups.get(group, UNUSABLE)

    def of(self, group: int | None) -> GroupRule | Unusable | None:
        """The rule of a group; None for the lead.

        Raises:
            KeyError: No store of this group was seen.
        """
        return None if group is None else self._groups[group]

    @property
    def lead_stride(self) -> int:
        """Index blocks of a block of the lead group."""
        return self._lead_stride

    def facts(self) -> tuple[GroupFact, ...]:
        """All groups, in the order in which they were learnt."""
        return tuple(
            GroupFact(group, True, False, rule.stride, rule.last_blocks, rule.chunk)
            if isinstance(rule, GroupRule)
            else GroupFact(group, usable=rule is None, leads=rule is None)
            for group, rule in self._groups.items()
        )

    def restore(self, facts: Sequence[GroupFact], lead_stride: int) -> None:
        """Takes over what other groups of the same life are known to be; nothing was learnt here."""
        self._lead_stride = lead_stride
        for fact in facts:
            rule = None if fact.leads else GroupRule(fact.stride, fact.last_blocks, fact.chunk)
            self._groups[fact.group] = rule if fact.usable else UNUSABLE
        self._tell_rules()

    def forget(self) -> None:
        """Begins a new life."""
        self._groups.clear()
        self._lead_stride = 1
        self.rules = None

    def _learn(self, group: int, event: BlockStored) -> None:
        rule = self._rule(event)
        if rule is None and not self.has_lead:
            self._lead_stride = max(1, event.block_size // self._block_tokens)
            self._groups[group] = None
        elif rule is None:
            # Only a group that tells its kind may be a second one whose blocks are all needed.
            told = event.kv_cache_spec_kind is not None and event.block_size % self._block_tokens == 0
            self._groups[group] = GroupRule(event.block_size // self._block_tokens) if told else UNUSABLE
        else:
            self._groups[group] = rule
        self._tell_rules()

    def _tell_rules(self) -> None:
        used = {other: rule for other, rule in self._groups.items() if isinstance(rule, GroupRule)}
        if used and self.has_lead:
            self.rules = PodGroups(self._lead_stride, used)

    def _rule(self, event: BlockStored) -> GroupRule | Unusable | None:
        """The rule of a group's kind; None where all blocks are needed."""
        kind, window_tokens = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0
        if kind is None or kind in FULL_ATTENTION:
            return None
        stride, rest = divmod(event.block_size, self._block_tokens)
        if rest:
            return UNUSABLE
        if kind == "mamba":
            return GroupRule(stride, last_blocks=1)
        if kind in _SLIDING_WINDOW and window_tokens > 0:
            return GroupRule(stride, last_blocks=-(-(window_tokens - 1) // event.block_size))
        if kind == "chunked_local_attention" and window_tokens > 0 and window_tokens % event.block_size == 0:
            return GroupRule(stride, chunk=window_tokens // self._block_tokens)
        return UNUSABLE
