"""Prefixes that an engine can resume: KV cache groups of hybrid models, and blocks dropped for a drafter.

A model with several kinds of attention layers keeps one group of blocks per kind and reports each group
separately. The first full-attention group is the lead group: its stores carry tokens and positions. Blocks of
other groups are identified by the same hashes. Each group is a holder of its own in the index.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from common.jit import kernel
from indexer.index.contract import Cause, Limit, PodMatches
from indexer.index.index import FlatIndex
from indexer.index.layout import GROUP_MARK
from indexer.keys import BlockHasher, Keys, Tokens
from indexer.views.view_parts import GROUPS_MAX, GroupRule, StoredRun
from indexer.wire.events import BlockStored


@dataclass(frozen=True, slots=True)
class PodGroups:
    """KV cache groups of a hybrid pod."""

    stride: int  # index blocks per block of the lead group, whose holder is the pod itself
    rules: Mapping[int, GroupRule]  # rules of the other groups, by number


def group_holder(pod: str, group: int) -> str:
    """Return the index's holder name of a group other than the lead group."""
    return f"{pod}{GROUP_MARK}{group}"


def usable_blocks(
    depth: int, stride: int, groups: Sequence[tuple[GroupRule, NDArray[np.uint8]]], *, drops: bool = False
) -> int:
    """Return the length of the longest prefix that the engine can resume.

    With a drafter that drops a block, vLLM lets each group match one block of its own further than the other
    groups, and then drops it.

    Args:
        depth: Unbroken prefix held by the lead group, in index blocks.
        groups: Rule of each other group with uint8 [depth or more]: non-zero at the last index block of each
            of its blocks that is held.
        drops: Whether the engine drops the last matched block of every group.

    Returns:
        Length in index blocks, a multiple of `stride`.
    """
    usable, limit = -1, depth
    depth = max(0, depth - depth % stride - stride * drops)
    while usable != depth:
        usable = depth = depth - depth % stride
        for rule, held in groups:
            extra = rule.stride * drops
            last_blocks = rule.last_blocks + drops if rule.last_blocks >= 0 else -1
            most = min(depth + extra, limit)
            depth = max(0, _resumable(held, most, rule.stride, last_blocks, rule.chunk) - extra)
    return usable


# Group of the keys of blocks in front of their next tokens.
NEXT_TOKENS = -1


class HybridMatcher:
    """Matcher that cuts hybrid pods' matches to prefixes that their engines can resume. Thread-safe."""

    def __init__(self, index: FlatIndex, hasher: BlockHasher) -> None:
        self._index = index
        self._hasher = hasher
        self._speculative_bit = np.uint8(1 << index.tiers.speculative)
        self._lock = threading.Lock()
        # Read by other threads without the lock, so they are replaced as a whole. Pods whose matches may have
        # to be shortened, with their groups if they have several, and whether they are paired.
        self.pods: Mapping[str, tuple[PodGroups | None, bool]] = {}
        self._dropping: frozenset[str] = frozenset()
        # Compiles the kernel now rather than during the first request.
        usable_blocks(1, 1, [(GroupRule(1, usable=True, leads=False), np.zeros(1, np.uint8))])

    def set_groups(self, pod: str, groups: PodGroups | None, *, is_paired: bool = False) -> None:
        """Set what was learned of a pod from its events.

        Args:
            groups: Its KV cache groups; None for at most one.
            is_paired: Whether its engine finds a block only in front of the token that followed it.
        """
        before, was_paired = self.pods.get(pod, (None, False))
        if before is groups and was_paired == is_paired:
            return
        with self._lock:
            pods = {**self.pods, pod: (groups, is_paired)}
            if groups is None and not is_paired:
                del pods[pod]
            self.pods = pods

    def set_drop(self, pod: str, drops: bool) -> bool:
        """Set whether a hybrid pod's engine drops the last block of each hit; return whether that changed."""
        if (pod in self._dropping) == drops:
            return False
        with self._lock:
            self._dropping = self._dropping | {pod} if drops else self._dropping - {pod}
        return True

    def limit(self, pod: str, *, drops: bool) -> Limit:
        """Return why a pod's engine may serve less than it holds; `drops`: it drops a block of every hit."""
        groups, is_paired = self.pods.get(pod, (None, False))
        if groups is None:
            return Limit(drops or is_paired)
        has_state = any(rule.has_state for rule in groups.rules.values())
        return Limit(drops, Cause.CHECKPOINT if has_state else Cause.WINDOW)

    def refine(
        self,
        keys: Keys,
        table: PodMatches,
        prompt_tokens: int | None = None,
        tokens: Tokens | None = None,
    ) -> PodMatches:
        """Shorten the matches of hybrid pods, and of pods whose engine compares the token behind a hit.

        A speculative block counts as held in all groups of its pod, because the blocks that a request will
        leave in a sliding window are not known in advance.

        Args:
            table: The index's matches of `keys`: prefixes held by the lead groups.
            prompt_tokens: Length of the prompt. An engine computes at least the last token, so a prompt that
                ends with a full block resumes at an earlier block. None: the prompt is longer than `keys`.
            tokens: The prompt's token ids; without them the last block of a hit is not counted where the
                engine compares the token behind it.

        Returns:
            The matches; `table` itself if none changes.
        """
        pods = self.pods
        blocks = blocks_by_tier = None
        for pod in pods.keys() & table.rows.keys():
            groups, is_paired = pods[pod]
            row = table.rows[pod]
            depth = int(table.cached_blocks[row])
            drops = pod in self._dropping
            if prompt_tokens is not None:
                # The dropped block may be the one with the last token.
                depth = min(depth, max(0, prompt_tokens - (not drops)) // self._hasher.block_tokens)
            if groups is None or is_paired:
                stride = int(table.strides[row]) if len(table.strides) else 1
                usable = self._found(keys, pod, depth - depth % stride, stride, tokens)
            else:
                usable = self._usable(keys[:depth], pod, groups, drops)
            if usable == table.cached_blocks[row]:
                continue
            if blocks is None or blocks_by_tier is None:
                blocks, blocks_by_tier = table.cached_blocks.copy(), table.blocks_by_tier.copy()
            cut = self._index.match(keys[:usable], (pod,))
            blocks[row], blocks_by_tier[row] = cut.cached_blocks[0], cut.blocks_by_tier[0]
        if blocks is None or blocks_by_tier is None:
            return table
        cut_down = PodMatches(table.rows, table.tiers, blocks, blocks_by_tier, strides=table.strides)
        cut_down.held, cut_down.behind = table.held, table.behind
        return cut_down

    def _found(self, keys: Keys, pod: str, depth: int, stride: int, tokens: Tokens | None) -> int:
        """Return the blocks of a prefix that are found: its last one only in front of the stored token.

        The blocks before it are in front of the token that begins the next one. The engine looks up all
        tokens but the last.
        """
        behind = depth * self._hasher.block_tokens
        if not depth or tokens is None or behind > len(tokens) - 2:
            return max(0, depth - stride)
        key = np.array([self._hasher.next_key(int(keys[depth - 1]), int(tokens[behind]))], np.uint64)
        is_assumed = self._index.held(keys[depth - 1 : depth], pod) & self._speculative_bit
        is_found = self._index.held(key, group_holder(pod, NEXT_TOKENS)) | is_assumed
        return depth if is_found[0] else depth - stride

    def _usable(self, keys: Keys, pod: str, groups: PodGroups, drops: bool) -> int:
        if not len(keys):
            return 0
        assumed = self._index.held(keys, pod) & self._speculative_bit
        held = [
            (rule, self._index.held(keys, group_holder(pod, group)) | assumed)
            for group, rule in groups.rules.items()
        ]
        return usable_blocks(len(keys), groups.stride, held, drops=drops)


@kernel
def _resumable(held: NDArray[np.uint8], limit: int, stride: int, last_blocks: int, chunk: int) -> int:
    """Return the longest prefix within `limit` index blocks that a group can resume, see `GroupRule`."""
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
        # All ends in between need the missing block as well, because `first` never decreases with `end`.
        end = hole
    return end * stride


FULL_ATTENTION = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

# Rules of an engine that names no groups, and of a group that is not indexed.
_ONLY = GroupRule(0, usable=True, leads=True)
_UNUSABLE = GroupRule(0, usable=False, leads=False)


class CacheGroups:
    """KV cache groups of one pod epoch, learned from its stores."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._groups: dict[int, GroupRule] = {}
        # Input of `HybridMatcher`, a new object after each change; None while at most one group is usable.
        self.rules: PodGroups | None = None

    @property
    def lead(self) -> int | None:
        """Return the lead group's number, or None if no full-attention group was seen yet."""
        return next((group for group, fact in self._groups.items() if fact.leads), None)

    def rule_of_store(self, event: BlockStored) -> GroupRule:
        """Return the rule of a store's group, which is derived from the store if the group is new."""
        group, kind = event.group_idx, event.kv_cache_spec_kind
        if group is None:
            # An engine that names no groups has one, of which it may report the kind.
            return _ONLY if kind is None or kind in FULL_ATTENTION else _UNUSABLE
        if group not in self._groups and event.block_size and len(self._groups) < GROUPS_MAX:
            self._groups[group] = self._new_rule(group, event)
            self._update_rules()
        return self._groups.get(group, _UNUSABLE)

    def rule_of(self, group: int | None) -> GroupRule | None:
        """Return the rule of a group; None if no store of it was seen."""
        return _ONLY if group is None else self._groups.get(group)

    def facts(self) -> tuple[GroupRule, ...]:
        """Return the rules of all groups in the order in which they were learned."""
        return tuple(self._groups.values())

    def restore(self, facts: Sequence[GroupRule]) -> None:
        """Replace all rules by those that another view learned of this epoch."""
        self._groups = {fact.group: fact for fact in facts}
        self.rules = None
        self._update_rules()

    def _update_rules(self) -> None:
        used = {group: fact for group, fact in self._groups.items() if fact.usable and not fact.leads}
        if used and (lead := self.lead) is not None:
            self.rules = PodGroups(self._groups[lead].stride, used)

    def _new_rule(self, group: int, event: BlockStored) -> GroupRule:
        kind, window_tokens = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window or 0
        stride, rest = divmod(event.block_size, self._block_tokens)
        needs_all = kind is None or kind in FULL_ATTENTION
        if needs_all and self.lead is None:
            return GroupRule(group, usable=True, leads=True, stride=max(1, stride))
        rule = GroupRule(group, usable=True, leads=False, stride=stride)
        match kind:
            case _ if rest:
                pass
            # A second group that needs all blocks must report its kind.
            case str() if needs_all:
                return rule
            case "mamba":
                return replace(rule, last_blocks=1, has_state=True)
            case "sliding_window" | "sliding_window_mla" if window_tokens:
                return replace(rule, last_blocks=-(-(window_tokens - 1) // event.block_size))
            case "chunked_local_attention" if window_tokens and not window_tokens % event.block_size:
                return replace(rule, chunk=window_tokens // self._block_tokens)
        return GroupRule(group, usable=False, leads=False)


# Evidence for one answer in excess of the other after which runs are no longer examined.
_CERTAIN = 8
# Least excess for a drop in a hybrid model, which also computes held blocks again after it lost a window.
_HYBRID_EXCESS = 2
# Longer than a step of an engine.
_NEW_S = 10.0
# Ends of runs and first blocks that are remembered; above it the oldest half is dropped.
_REMEMBERED_MAX = 8192

_Copies = Callable[[Keys], NDArray[np.int32]]


@dataclass(slots=True)
class BlockDrop:
    """Whether an engine drops the last matched block of every hit, learned from its events alone. Pure.

    vLLM does so with EAGLE, EAGLE3 and MTP drafters, which need the hidden states of that block: a hit of k
    blocks serves k - 1, and the last one is computed and stored again. ngram and draft models drop nothing.
    Two kinds of runs of at least two blocks, with a known parent, are evidence:

    - Drop: the first block was held before, the second was not.
    - No drop: the first block was not held before, although the run begins a request. Chunks of a long
      prefill, which continue the end of an earlier run, do not count.

    Concurrent requests with one new prompt store the same blocks, and the later stores look like a drop. So a
    first block is no evidence of one for some time after it was stored, and never if it showed no drop.
    """

    has_drafter: bool | None = None  # whether the engine's metrics name a drafter; None: unknown
    stores: int = 0  # runs that were evidence
    _balance: int = 0  # above 0: evidence of a drop prevails
    _excess: int = 1  # least balance that is an answer
    _learned: bool | None = None
    # Last key of each run, and whether the run is one decoded block.
    _ends: dict[int, bool] = field(default_factory=dict)
    # By first block: time until which concurrent requests may store it again.
    _new_until_s: dict[int, float] = field(default_factory=dict)

    @property
    def is_learning(self) -> bool:
        return self.has_drafter is not False and abs(self._balance) < _CERTAIN

    @property
    def drops(self) -> bool:
        """Return whether to predict a drop; the lower prediction for a drafter that is not learned yet."""
        if self.has_drafter is False:
            return False
        return bool(self.has_drafter) if self._learned is None else self._learned

    def reopen(self) -> None:
        """Forget the runs of a view that was cleared; keep the answer, but let new evidence change it."""
        self._balance = max(-1, min(1, self._balance))
        self._ends.clear()
        self._new_until_s.clear()

    def describe(self, block_tokens: int) -> str:
        """Return what is known of the drafter, in words; empty without a sign of one."""
        if self.has_drafter is False or (self.has_drafter is None and not self._learned):
            return ""
        block = f"{block_tokens} tokens" if block_tokens else "a block"
        if self._learned is None:
            return f"drafter: {block} a hit assumed, not learned yet"
        cost = block if self._learned else "nothing"
        return f"drafter: costs {cost} a hit, learned from {self.stores} stores"

    def observe(
        self,
        runs: Sequence[StoredRun],
        block: int,
        copies_of: _Copies,
        published_s: float,
        *,
        is_hybrid: bool = False,
    ) -> None:
        """Learn from the runs of one or more batches, which are in the index already.

        Args:
            block: Index blocks per block of the engine.
            copies_of: Returns int32 [keys], the engine's copies of each block in device memory.
            published_s: Time of the last batch, by the engine's clock.
        """
        self._excess = _HYBRID_EXCESS if is_hybrid else 1
        examined: list[tuple[int, int, int]] = []
        for run in runs:
            follows_end = self._ends.pop(run.parent, None)
            if follows_end is not False:
                second = min(2 * block, len(run.keys)) - 1
                examined.append((run.parent, run.keys.item(block - 1), run.keys.item(second)))
            self._ends[run.keys.item(-1)] = len(run.keys) <= block and follows_end is not None
        if examined:
            # All at once: a call costs more than a key.
            copies = copies_of(np.array(examined, np.uint64).ravel()).reshape(-1, 3).tolist()
            for (_, first, second), held in zip(examined, copies, strict=True):
                self._examine(first, second, held, published_s)
        for remembered in (self._ends, self._new_until_s):
            if len(remembered) > _REMEMBERED_MAX:
                for key in list(remembered)[: _REMEMBERED_MAX // 2]:
                    del remembered[key]

    def _examine(self, first: int, second: int, copies: Sequence[int], published_s: float) -> None:
        """Learn from a run by the copies of its parent, of its first and of its second block."""
        if not copies[0] or copies[2] != 1:
            return
        if copies[1] == 1:
            if first == second:
                self._new_until_s[first] = published_s + _NEW_S
            else:
                self._new_until_s[first] = math.inf
                self.count(-1)
        elif published_s >= self._new_until_s.get(first, -math.inf):
            self.count(1)

    def count(self, evidence: int) -> None:
        """Count runs that are evidence: above 0 of a drop, below 0 of none."""
        self.stores += abs(evidence)
        self._balance = max(-_CERTAIN, min(_CERTAIN, self._balance + evidence))
        if self._balance < 0 or self._balance >= self._excess:
            self._learned = self._balance > 0
