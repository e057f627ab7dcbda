"""Where the prefix that an engine holds ends, and why: which blocks it holds in, one story out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from indexer.roster import EngineState
from indexer.stream import StreamState
from indexer.tiers import Tiers


class PrefixEnd(Enum):
    """Why a prefix is as long as it is."""

    PROMPT = "prompt"
    HOLE = "hole"
    OTHER_ATTENTION = "other_attention"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What one engine holds of a prompt."""

    engine: str
    state: StreamState  # state of its stream; STALE if it is not followed
    reason: str
    cached_blocks: int  # length of the prefix that is of use
    end: PrefixEnd
    held_blocks: int  # length of the prefix that is held, of use or not
    held_beyond: int  # blocks that are held behind the first one missing
    tiers: tuple[tuple[str, int], ...]  # best tier and length of each stretch of the held prefix


def explain_prefix(
    engine: EngineState | str, held: NDArray[np.uint8], tiers: Tiers, *, usable_blocks: int, stride: int = 1
) -> Prefix:
    """Tells the story.

    Args:
        held: uint8 [blocks], see `Index.held`.
        stride: Index blocks per block of the engine, which holds an engine block of the prompt or does not.
    """
    missing = np.flatnonzero(held == 0)
    first_missing = int(missing[0]) if len(missing) else len(held)
    length = first_missing - first_missing % stride
    best = [_best_tier(bits, tiers) for bits in held[:length].tolist()]
    if usable_blocks < length:
        end = PrefixEnd.OTHER_ATTENTION
    else:
        end = PrefixEnd.HOLE if first_missing < len(held) else PrefixEnd.PROMPT
    if isinstance(engine, str):
        name, state, reason = engine, StreamState.STALE, "not_followed"
    else:
        name, state, reason = engine.stream.holder, engine.state, engine.reason
    return Prefix(
        engine=name,
        state=state,
        reason=reason,
        cached_blocks=usable_blocks,
        end=end,
        held_blocks=length,
        held_beyond=int(np.count_nonzero(held[first_missing:])),
        tiers=tuple((tier, len(list(stretch))) for tier, stretch in groupby(best)),
    )


def _best_tier(bits: int, tiers: Tiers) -> str:
    # The lowest bit is the best tier's.
    return tiers.names[(bits & -bits).bit_length() - 1]
