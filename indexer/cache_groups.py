"""The KV cache groups of one pod life: what its stores tell of them.

A model whose layers differ in their attention keeps a group of blocks for each kind, and announces each
group's apart. The first full-attention group leads: its runs tell tokens and positions, the blocks of the
others are known by the same hashes. No clock, no index.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from indexer.events import BlockStored
from indexer.hybrid import GroupRule, PodGroups
from indexer.view_parts import GroupFact

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
