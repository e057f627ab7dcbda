"""Explanations of where a cached prefix ends."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.index.contract import Cause, PrefixEnd, StreamState, explain_prefix
from indexer.wire.tiers import Tiers

TIERS = Tiers()
GPU, CPU = (1 << TIERS.number(tier) for tier in ("gpu", "cpu"))


@pytest.mark.parametrize(
    ("held", "usable", "causes", "end", "length", "beyond"),
    [
        ([GPU, GPU, CPU], 3, {}, PrefixEnd.PROMPT, 3, 0),
        ([GPU, GPU, 0, CPU], 2, {Cause.EVICTED: 16}, PrefixEnd.HOLE, 2, 1),
        ([0, GPU], 0, {}, PrefixEnd.HOLE, 0, 1),
        ([GPU, GPU, GPU], 1, {Cause.WINDOW: 32}, PrefixEnd.OTHER_ATTENTION, 3, 0),
        ([GPU, GPU, GPU], 1, {Cause.CHECKPOINT: 32}, PrefixEnd.CHECKPOINT, 3, 0),
        ([GPU, GPU, GPU], 2, {Cause.DRAFTER: 16}, PrefixEnd.DRAFTER, 3, 0),
        ([GPU, GPU, GPU], 0, {Cause.DRAFTER: 16, Cause.WINDOW: 32}, PrefixEnd.OTHER_ATTENTION, 3, 0),
        ([], 0, {}, PrefixEnd.PROMPT, 0, 0),
    ],
)
def test_the_end_has_a_reason(
    held: list[int], usable: int, causes: dict[str, int], end: PrefixEnd, length: int, beyond: int
) -> None:
    """A prefix ends at the prompt's end, at a hole, or for the cause of most of the held tokens behind it."""
    prefix = explain_prefix(
        "pod",
        np.array(held, np.uint8),
        TIERS,
        status=(StreamState.STALE, "gap"),
        usable_blocks=usable,
        causes=causes,
    )
    assert (prefix.end, prefix.cached_blocks, prefix.held_blocks, prefix.held_beyond) == (
        end,
        usable,
        length,
        beyond,
    )
    assert (prefix.state, prefix.reason) == (StreamState.STALE, "gap")


@pytest.mark.parametrize(("held", "evicted_s_ago"), [([GPU, 0], 42.0), ([GPU, GPU], None)])
def test_the_loss_of_the_missing_block_is_told(held: list[int], evicted_s_ago: float | None) -> None:
    """The seconds since the first missing block was lost are told only where a block is missing."""
    prefix = explain_prefix(
        "p",
        np.array(held, np.uint8),
        TIERS,
        status=(StreamState.EXACT, ""),
        usable_blocks=1,
        drafter="d",
        evicted_s_ago=42.0,
    )
    assert (prefix.evicted_s_ago, prefix.drafter) == (evicted_s_ago, "d")


def test_each_block_lies_in_its_best_tier() -> None:
    """Stretches are listed from the start; a block in two tiers counts in the better one."""
    held = np.array([GPU | CPU, GPU, CPU, CPU, GPU], np.uint8)
    prefix = explain_prefix("p", held, TIERS, status=(StreamState.EXACT, ""), usable_blocks=5)
    assert prefix.tiers == (("gpu", 2), ("cpu", 2), ("gpu", 1))
    assert (prefix.engine, prefix.state) == ("p", StreamState.EXACT)
