"""Proof of what a view knows that misses the history before it was joined. Pure.

Events after the join are complete, so the view never holds more than the engine. Its blocks are proven. In
doubt is whether the engine holds more behind them, stored before the join. Two facts prove that it does not:

- Proven subtree: a request looks its prompt up and stores the first block that it misses. Engines free the
  end of a chain first, so they hold nothing behind a missing block, and events show all that is stored there
  from then on. A match that ends within such a subtree is exact. A last block of a prompt is computed and
  stored again although it is cached, and so is the last matched block where a drafter may drop it: a run of
  blocks must be longer than that.
- Full view: if it has as many different blocks in device memory as the engine has room for, there are no
  others. The number of stores since the join proves nothing, because hits keep old blocks in the cache.

A clear or a restart of the engine ends the doubt as well, see `state_machine`. Matches are not proven for
hybrid models (a hit needs all groups), with further tiers (which may hold what device memory lacks), where
the engine compares the next token, and after an event that could not be applied. One case is not noticed: a
request that skips the lookup (`prompt_logprobs`) stores second copies of blocks from before the join.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from indexer.keys import Keys
from indexer.views.view_parts import Outcome, StoredRun
from indexer.wire.decode import UNKNOWN_EVENT

LATE_REASONS = frozenset({"no_history", "history_truncated", "replay_failed", "gap"})
"""Reasons of STALE views that begin empty and have all events since then."""

# Time after the join in which stores may be of requests that were looked up before it.
SETTLE_S = 10.0
# Subtrees that are remembered; above it the oldest half is dropped, whose matches are in doubt again.
SUBTREES_MAX = 16_384
_COUNT_EVERY_S = 1.0
# vLLM's pool counts a block that never holds anything.
_NULL_BLOCKS = 1
# Skipped stores that such a view expects: they continue blocks from before the join.
_EXPECTED = frozenset({"unknown_hash", "orphan_dropped"})


class LateView:
    """What is proven of one epoch of an engine's view; written by one thread, read by any."""

    def __init__(self) -> None:
        self.capacity_blocks: int | None = None  # of the engine's device memory; None: unknown
        self._count_due_s = -math.inf
        self.reset()

    def reset(self) -> None:
        """Start with an empty view."""
        self.is_damaged = False  # whether an event could not be applied
        # Last key of the first engine block of each subtree, oldest first.
        self._subtrees: dict[int, None] = {}
        self._joined_s: float | None = None
        self._is_simple = True

    def applied(self, outcome: Outcome, stride: int, *, may_drop: bool, is_simple: bool) -> None:
        """Learn from applied batches.

        Args:
            stride: Index blocks per block of the engine.
            may_drop: Whether the engine may drop the last matched block of a hit.
            is_simple: Whether the engine has one tier and one KV cache group, found by their blocks alone.
        """
        if outcome.emptied:
            self.reset()
        if outcome.skipped or outcome.rejected:
            skipped = {reason for event, reason in outcome.skipped if event == "BlockStored"}
            self.is_damaged |= bool(skipped - _EXPECTED or outcome.rejected.keys() - {UNKNOWN_EVENT})
        self._is_simple = is_simple
        if self.is_damaged or not is_simple or not outcome.published_s:
            self._subtrees = {}
            return
        if self._joined_s is None:
            self._joined_s = outcome.published_s[0]
        if outcome.runs and outcome.published_s[-1] - self._joined_s >= SETTLE_S:
            self._remember(outcome.runs, stride, may_drop)

    def _remember(self, runs: Iterable[StoredRun], stride: int, may_drop: bool) -> None:
        for run in runs:
            if len(run.keys) >= (2 + may_drop) * stride:
                self._subtrees[int(run.keys[(1 + may_drop) * stride - 1])] = None
        if len(self._subtrees) > SUBTREES_MAX:
            self._subtrees = dict.fromkeys(list(self._subtrees)[len(self._subtrees) // 2 :])

    def is_end(self, keys: Keys, *, whole: bool) -> bool:
        """Return whether it is proven that the engine holds no more of a prompt than the view does.

        Args:
            keys: Last key of each engine block of the match and of the one behind it.
            whole: Whether the match is the whole prompt.
        """
        return self._is_simple and (whole or not self._subtrees.keys().isdisjoint(keys.tolist()))

    def may_be_full(self, blocks: int, now_s: float) -> bool:
        """Return whether the view's blocks should be counted for `is_full`; at most once a second.

        Args:
            blocks: Upper bound of the view's blocks, in the engine's block size.
        """
        if not self.is_full(blocks) or now_s < self._count_due_s:
            return False
        self._count_due_s = now_s + _COUNT_EVERY_S
        return True

    def is_full(self, blocks: int) -> bool:
        """Return whether the engine has no room for more than these different blocks in device memory."""
        usable = 0 if self.is_damaged or not self._is_simple else self.capacity_blocks or 0
        return usable > 0 and blocks >= usable - _NULL_BLOCKS
