"""Matches cut to what engines with hybrid attention can resume, and what their stores tell of their groups.

A model whose layers differ in their attention keeps a group of blocks for each kind, and announces each
group's apart. The first full-attention group leads: its runs tell tokens and positions, the blocks of the
others are known by the same hashes; each is a holder of its own in the index.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from common.jit import kernel
from indexer.index.contract import PodMatches
from indexer.index.index import FlatIndex
from indexer.keys import Keys
from indexer.tiers import SPECULATIVE_TIER
from indexer.views.view_parts import GROUPS_MAX, GroupFact
from indexer.wire.events import BlockStored


@dataclass(frozen=True, slots=True)
class PodGroups:
    """The KV cache groups of a hybrid pod."""

    stride: int  # index blocks of one block of the lead group, whose blocks are the pod's own in the index
    rules: Mapping[int, GroupFact]  # the other groups' rules


def group_holder(pod: str, group: int) -> str:
    """The name in the index of a group other than the pod's lead."""
    return f"{pod}#{group}"


def usable_blocks(depth: int, stride: int, groups: Sequence[tuple[GroupFact, NDArray[np.uint8]]]) -> int:
    """The longest prefix that can be resumed.

    Args:
        depth: Unbroken prefix that the full attention of the lead group holds, in index blocks.
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
    """Cuts the matches of hybrid pods to what their engines can resume. Thread-safe."""

    def __init__(self, index: FlatIndex, block_tokens: int) -> None:
        self._index = index
        self._block_tokens = block_tokens
        self._speculative_bit = np.uint8(1 << index.tiers.number(SPECULATIVE_TIER))
        self._lock = threading.Lock()
        # Read by other threads; replaced as a whole.
        self._pods: Mapping[str, PodGroups] = {}
        # Compiled here, not while a first request waits.
        usable_blocks(1, 1, [(GroupFact(1, usable=True, leads=False), np.zeros(1, np.uint8))])

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
        return PodMatches(table.rows, table.tiers, blocks, blocks_by_tier, strides=table.strides)

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
    """The longest prefix within `limit` index blocks that one group can resume, see `GroupFact`."""
    end = limit // stride
    while end > 0:
        first = 0
        if last_blocks >= 0:
            first = max(0, end - last_blocks)
        if chunk > 0:
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


# Facts of an engine that names no groups, and of a group of which nothing is indexed.
_ONLY = GroupFact(0, usable=True, leads=True)
_UNUSABLE = GroupFact(0, usable=False, leads=False)


class CacheGroups:
    """Facts known of one pod life's groups."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._groups: dict[int, GroupFact] = {}
        # For the matcher, a new object whenever something was learnt; None while only one group is used.
        self.rules: PodGroups | None = None

    @property
    def lead(self) -> int | None:
        """The lead group's number; None where the engine names no groups, or none of full attention yet."""
        return next((group for group, fact in self._groups.items() if fact.leads), None)

    def of_store(self, event: BlockStored) -> GroupFact:
        """Return what is known of a store's group, learnt if it is new."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if group is None:
            # An engine that tells no groups has one, and tells its kind or not.
            return _ONLY if kind is None or kind in FULL_ATTENTION else _UNUSABLE
        if group not in self._groups and event.block_size and len(self._groups) < GROUPS_MAX:
            self._groups[group] = self._fact(group, event)
            self._tell_rules()
        return self._groups.get(group, _UNUSABLE)

    def of(self, group: int | None) -> GroupFact:
        """Return what is known of a group.

        Raises:
            KeyError: No store of this group was seen.
        """
        return _ONLY if group is None else self._groups[group]

    def facts(self) -> tuple[GroupFact, ...]:
        """All groups, in the order in which they were learnt."""
        return tuple(self._groups.values())

    def restore(self, facts: Sequence[GroupFact]) -> None:
        """Take over what another view knows of this life, instead of what was learnt here."""
        self._groups = {fact.group: fact for fact in facts}
        self.rules = None
        self._tell_rules()

    def _tell_rules(self) -> None:
        used = {group: fact for group, fact in self._groups.items() if fact.usable and not fact.leads}
        if used and (lead := self.lead) is not None:
            self.rules = PodGroups(self._groups[lead].stride, used)

    def _fact(self, group: int, event: BlockStored) -> GroupFact:
        kind, window_tokens = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0
        stride, rest = divmod(event.block_size, self._block_tokens)
        needs_all = kind is None or kind in FULL_ATTENTION
        if needs_all and self.lead is None:
            return GroupFact(group, usable=True, leads=True, stride=max(1, stride))
        rule = GroupFact(group, usable=True, leads=False, stride=stride)
        # Only a group that tells its kind may be a second one whose blocks are all needed.
        if rest == 0 and needs_all and kind is not None:
            return rule
        if rest == 0 and kind == "mamba":
            return replace(rule, last_blocks=1)
        if rest == 0 and kind in _SLIDING_WINDOW and window_tokens > 0:
            return replace(rule, last_blocks=-(-(window_tokens - 1) // event.block_size))
        is_chunked = kind == "chunked_local_attention" and window_tokens > 0
        if rest == 0 and is_chunked and window_tokens % event.block_size == 0:
            return replace(rule, chunk=window_tokens // self._block_tokens)
        return GroupFact(group, usable=False, leads=False)
