"""Explanations of where a cached prefix ends."""

from __future__ import annotations

import numpy as np
import pytest

from indexer.index.contract import PrefixEnd, StreamState, explain_prefix
from indexer.wire.tiers import Tiers

TIERS = Tiers()
GPU, CPU = (1 << TIERS.number(tier) for tier in ("gpu", "cpu"))


@pytest.mark.parametrize(
    ("held", "usable", "end", "length", "beyond"),
    [
        ([GPU, GPU, CPU], 3, PrefixEnd.PROMPT, 3, 0),
        ([GPU, GPU, 0, CPU], 2, PrefixEnd.HOLE, 2, 1),
        ([0, GPU], 0, PrefixEnd.HOLE, 0, 1),
        ([GPU, GPU, GPU], 1, PrefixEnd.OTHER_ATTENTION, 3, 0),
        ([], 0, PrefixEnd.PROMPT, 0, 0),
    ],
)
def test_the_end_has_a_reason(held: list[int], usable: int, end: PrefixEnd, length: int, beyond: int) -> None:
    """A prefix ends at the prompt's end, at a hole, or at layers with another rule."""
    held_tiers = np.array(held, np.uint8)
    prefix = explain_prefix("pod", held_tiers, TIERS, status=(StreamState.STALE, "gap"), usable_blocks=usable)
    assert (prefix.end, prefix.cached_blocks, prefix.held_blocks, prefix.held_beyond) == (
        end,
        usable,
        length,
        beyond,
    )
    assert (prefix.state, prefix.reason) == (StreamState.STALE, "gap")


@pytest.mark.parametrize(
    ("usable", "drops", "end"),
    [
        (2, True, PrefixEnd.DRAFTER),
        (0, True, PrefixEnd.OTHER_ATTENTION),
        (2, False, PrefixEnd.OTHER_ATTENTION),
    ],
)
def test_a_dropped_block_is_named(usable: int, drops: bool, end: PrefixEnd) -> None:
    """A prefix that ends one engine block early at an engine with a drafter ends because of the drafter."""
    held = np.array([GPU] * 6, np.uint8)
    prefix = explain_prefix(
        "p",
        held,
        TIERS,
        status=(StreamState.EXACT, ""),
        usable_blocks=usable,
        stride=2,
        drops=drops,
        drafter="d",
    )
    assert (prefix.end, prefix.drafter) == (end, "d")


def test_each_block_lies_in_its_best_tier() -> None:
    """Stretches are listed from the start; a block in two tiers counts in the better one."""
    held = np.array([GPU | CPU, GPU, CPU, CPU, GPU], np.uint8)
    prefix = explain_prefix("p", held, TIERS, status=(StreamState.EXACT, ""), usable_blocks=5)
    assert prefix.tiers == (("gpu", 2), ("cpu", 2), ("gpu", 1))
    assert (prefix.engine, prefix.state) == ("p", StreamState.EXACT)
