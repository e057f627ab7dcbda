"""The arithmetic of block keys, compiled: 32-bit words in, chained 64-bit keys out.

A key is two multilinear hashes of the block's words, the upper 32 bits of each. Every such hash of a block
of fixed length is strongly universal (Lemire and Kaser, "Strongly universal string hashing is fast", 2014):
whoever does not know the random multipliers finds two blocks of one key with a chance of 2**-64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compiled.jit import inlined, kernel

# Multipliers: of the constant 1, of the parent's two words, of the extras' two words, then of each token.
HEAD_WORDS = 5
_USUAL_TOKENS = 16

_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)


@kernel
def chain_keys(
    parent: np.uint64,
    tokens: NDArray[np.uint32],
    extras: NDArray[np.uint64],
    multipliers: NDArray[np.uint64],
    keys: NDArray[np.uint64],
) -> None:
    """Writes the keys of consecutive blocks.

    Args:
        parent: Key of the block before the first.
        tokens: uint32 [blocks * block_tokens or more]; what is over at the end is not read.
        extras: uint64 [blocks], or empty where no block has any.
        multipliers: uint64 [2, HEAD_WORDS + block_tokens].
        keys: uint64 [blocks], written.
    """
    block_tokens = multipliers.shape[1] - HEAD_WORDS
    if block_tokens == _USUAL_TOKENS:
        # The same with a length that the compiler knows: a sixth faster.
        _chain_blocks(parent, tokens, extras, multipliers, keys, _USUAL_TOKENS)
    else:
        _chain_blocks(parent, tokens, extras, multipliers, keys, block_tokens)


@kernel
def chain_behind(
    tokens: NDArray[np.uint32],
    extras: NDArray[np.uint64],
    multipliers: NDArray[np.uint64],
    keys: NDArray[np.uint64],
) -> None:
    """As `chain_keys`, with the parent in front of the keys: uint64 [1 + blocks].

    To make a number for a kernel costs Python as much as the call.
    """
    chain_keys(keys[0], tokens, extras, multipliers, keys[1:])


@inlined
def _chain_blocks(
    parent: np.uint64,
    tokens: NDArray[np.uint32],
    extras: NDArray[np.uint64],
    multipliers: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    block_tokens: int,
) -> None:
    key = parent
    for block in range(len(keys)):
        start = block * block_tokens
        high = multipliers[0, 0]
        low = multipliers[1, 0]
        for offset in range(block_tokens):
            word = np.uint64(tokens[start + offset])
            high += multipliers[0, HEAD_WORDS + offset] * word
            low += multipliers[1, HEAD_WORDS + offset] * word
        if len(extras):
            word = extras[block] & _LOW
            next_word = extras[block] >> _HALF
            high += multipliers[0, 3] * word + multipliers[0, 4] * next_word
            low += multipliers[1, 3] * word + multipliers[1, 4] * next_word
        # The parent comes last: all above is computed while the key before is still under way.
        word = key & _LOW
        next_word = key >> _HALF
        high += multipliers[0, 1] * word + multipliers[0, 2] * next_word
        low += multipliers[1, 1] * word + multipliers[1, 2] * next_word
        key = ((high >> _HALF) << _HALF) | (low >> _HALF)
        keys[block] = key
