"""Token ids to chained 64-bit block keys: the one hash function of kvroute.

Tokens of a prompt come in, one key per full block goes out. Keys depend on a seed, so that no client can
prepare prompts that collide. Engines are not known here: their hashes are foreign handles.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from compiled.jit import inlined, kernel
from indexer.errors import TokenError

# Block keys in the order of the prompt: uint64 [blocks].
Keys: TypeAlias = NDArray[np.uint64]
# Token ids as they come: a uint32 array is taken as it is, anything else is checked number by number.
Tokens: TypeAlias = Sequence[int] | NDArray[np.uint32]

_NO_EXTRAS = np.empty(0, np.uint64)
# Multipliers: of the constant 1, of the parent's two words, of the extras' two words, then of each token.
HEAD_WORDS = 5
_USUAL_TOKENS = 16

_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)


class BlockHasher:
    """Makes block keys.

    A key hashes the parent's key, the block's extras and its token ids. The first block's parent is a root
    made of what the whole prompt depends on. A key is two multilinear hashes of the block's 32-bit words, the
    upper 32 bits of each. Every such hash of a block of fixed length is strongly universal (Lemire and Kaser,
    "Strongly universal string hashing is fast", 2014): whoever does not know the random multipliers finds two
    blocks of one key with a chance of 2**-64.

    Args:
        seed: Unsigned 64-bit number; keys of different seeds have nothing in common.
    """

    def __init__(self, block_tokens: int, seed: int) -> None:
        self.block_tokens = block_tokens
        self._root_seed = seed
        # Further seeds keep roots, extras and multipliers apart without a tag in each.
        self._extras_seed = xxh3_64_intdigest(b"extras", seed)
        words = HEAD_WORDS + block_tokens
        numbers = [xxh3_64_intdigest(b"multiplier %d" % number, seed) for number in range(2 * words)]
        self.multipliers = np.array(numbers, np.uint64).reshape(2, words)

    def fingerprint(self) -> int:
        """Tells hashers of different seeds or block sizes apart, without giving the seed away."""
        return int(xxh3_64_intdigest(self.multipliers.tobytes(), self._extras_seed))

    def root(self, model: str, lora_name: str | None = None, cache_salt: str | None = None) -> int:
        """The key in front of a prompt's first block.

        Args:
            cache_salt: Keeps a tenant's blocks apart from others'; None for none.
        """
        packed = _model_text(model, lora_name) + _optional_text(cache_salt)
        return int(xxh3_64_intdigest(packed, self._root_seed))

    def chain(self, parent: int, token_ids: Tokens, extras: Sequence[bytes] = ()) -> Keys:
        """Keys of the full blocks in `token_ids`; a partial block at the end has none.

        Args:
            parent: Key of the block before, or a root.
            token_ids: Whole numbers of 0..2**32-1.
            extras: What each block depends on besides tokens (see `extras`), b"" for nothing; empty for a run
                of blocks that depend on tokens alone.

        Raises:
            TokenError: A token id is out of range or no whole number.
        """
        tokens = token_words(token_ids)
        blocks = len(tokens) // self.block_tokens
        digests = self._digests(extras[:blocks]) if extras else _NO_EXTRAS
        keys = np.empty(1 + blocks, np.uint64)
        keys[0] = parent
        chain_behind(tokens, digests, self.multipliers, keys)
        return keys[1:]

    def _digests(self, extras: Sequence[bytes]) -> NDArray[np.uint64]:
        seed = self._extras_seed
        return np.array([xxh3_64_intdigest(extra, seed) if extra else 0 for extra in extras], np.uint64)


def token_words(token_ids: Tokens) -> NDArray[np.uint32]:
    """Token ids as uint32 words, the form in which they are hashed.

    Raises:
        TokenError: A token id is out of range or no whole number.
    """
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.uint32 and token_ids.ndim == 1:
        return token_ids
    try:
        return np.frombuffer(array("I", token_ids), np.uint32)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be whole numbers of 0..2**32-1: {error}") from None


def length_prefixed(data: bytes) -> bytes:
    """`data` behind its length, so that neighbouring fields cannot be taken for one another."""
    return len(data).to_bytes(4, "little") + data


def utf8(text: str) -> bytes:
    """Bytes of any text, also of the lone surrogates that JSON lets through."""
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=1024)
def _model_text(model: str, lora_name: str | None) -> bytes:
    return _optional_text(model) + _optional_text(lora_name)


def _optional_text(text: str | None) -> bytes:
    return b"\0" if text is None else b"\1" + length_prefixed(utf8(text))


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
