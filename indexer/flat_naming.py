"""Kernel of the flat index: from an engine's hashes to the names of their index blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel

_ODD = np.uint64(0xBF58_476D_1CE4_E5B9)
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
_HALF = np.uint64(32)
_NOTHING = np.uint64(0)
_ONE = np.uint64(1)


@inlined
def name_of(handle: np.uint64, scope: np.uint64, part: int) -> np.uint64:
    """The name of one index block, never 0.

    Args:
        handle: The engine's hash of its block.
        scope: Names of different scopes have nothing in common.
        part: Which index block of the engine's block.
    """
    mixed = (handle ^ scope) * _ODD
    mixed = (mixed ^ (mixed >> _HALF)) + np.uint64(part) * _STEP
    return mixed if mixed != _NOTHING else _ONE


@kernel
def name_hashes(handles: NDArray[np.uint64], scope: np.uint64, split: int, names: NDArray[np.uint64]) -> None:
    """Writes the names of the `split` index blocks of each engine block: uint64 [len(handles) * split]."""
    for block in range(len(handles)):
        for part in range(split):
            names[block * split + part] = name_of(handles[block], scope, part)
