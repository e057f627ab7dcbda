"""Results of applying events to a view: values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer.keys import Keys


class StoredRun(msgspec.Struct, frozen=True):
    """A run of new blocks.

    Attributes:
        parent: Key of the block before it, or the prompt's root.
        keys: Its blocks.
        tokens: uint32: the token ids of its first index block, at least; valid until the next batch
            of any pod is applied.
    """

    parent: int
    keys: Keys
    tokens: NDArray[np.uint32]


@dataclass(slots=True)
class Applied:
    """Result of applying one batch.

    Attributes:
        stored: Keys of the blocks that were announced with their tokens, run by run, parents first.
        runs: The same, each with its parent and its tokens; kept only if somebody asked for them.
        removals: Hashes removed whose "last" copy of a tier went, and those of which another "copy" stays.
        skipped: Events or hashes that could not be used, by (event type, reason).
        cleared: Whether the engine told that its cache is empty.
        stored_before_clear: Runs in `stored` that it announced before it said so the last time.
    """

    stored: list[Keys] = field(default_factory=list)
    runs: list[StoredRun] | None = None
    removals: Counter[str] = field(default_factory=Counter)
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    cleared: bool = False
    stored_before_clear: int = 0
