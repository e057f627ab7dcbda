"""Explanations of where a cached prefix ends."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.index.contract import Cause, PrefixEnd, explain_prefix
from indexer.wire.tiers import Tiers

TIERS = Tiers()
GPU, CPU = (1 << TIERS.number(tier) for tier in ("gpu", "cpu"))


@pytest.mark.parametrize(
    ("held", "causes", "end", "length", "beyond"),
    [
        ([GPU, GPU, CPU], {}, PrefixEnd.PROMPT, 3, 0),
        ([GPU, GPU, 0, CPU], {Cause.EVICTED: 16}, PrefixEnd.HOLE, 2, 1),
        ([0, GPU], {}, PrefixEnd.HOLE, 0, 1),
        ([GPU, GPU, GPU], {Cause.WINDOW: 32}, PrefixEnd.OTHER_ATTENTION, 3, 0),
        ([GPU, GPU, GPU], {Cause.CHECKPOINT: 32}, PrefixEnd.CHECKPOINT, 3, 0),
        ([GPU, GPU, GPU], {Cause.DRAFTER: 16}, PrefixEnd.DRAFTER, 3, 0),
        ([GPU, GPU, GPU], {Cause.DRAFTER: 16, Cause.WINDOW: 32}, PrefixEnd.OTHER_ATTENTION, 3, 0),
        ([], {}, PrefixEnd.PROMPT, 0, 0),
    ],
)
def test_the_end_has_a_reason(
    held: list[int], causes: dict[str, int], end: PrefixEnd, length: int, beyond: int
) -> None:
    """A prefix ends at the prompt's end, at a hole, or for the cause of most of the held tokens behind it."""
    prefix = explain_prefix(np.array(held, np.uint8), TIERS, causes=causes)
    assert (prefix.end, prefix.held_blocks, prefix.held_beyond) == (end, length, beyond)


@pytest.mark.parametrize(("held", "evicted_s_ago"), [([GPU, 0], 42.0), ([GPU, GPU], None)])
def test_the_loss_of_the_missing_block_is_told(held: list[int], evicted_s_ago: float | None) -> None:
    """The seconds since the first missing block was lost are told only where a block is missing."""
    prefix = explain_prefix(np.array(held, np.uint8), TIERS, evicted_s_ago=42.0)
    assert prefix.evicted_s_ago == evicted_s_ago


def test_each_block_lies_in_its_best_tier() -> None:
    """Stretches are listed from the start; a block in two tiers counts in the better one."""
    held = np.array([GPU | CPU, GPU, CPU, CPU, GPU], np.uint8)
    prefix = explain_prefix(held, TIERS)
    assert prefix.tiers == (("gpu", 2), ("cpu", 2), ("gpu", 1))
