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

from indexer.errors import TokenError
from indexer.key_kernels import HEAD_WORDS, chain_behind

# Block keys in the order of the prompt: uint64 [blocks].
Keys: TypeAlias = NDArray[np.uint64]
# Token ids as they come: a uint32 array is taken as it is, anything else is checked number by number.
Tokens: TypeAlias = Sequence[int] | NDArray[np.uint32]

_NO_EXTRAS = np.empty(0, np.uint64)


class BlockHasher:
    """Makes block keys.

    A key hashes the parent's key, the block's extras and its token ids, see `key_kernels`. The first block's
    parent is a root made of what the whole prompt depends on.

    Args:
        block_tokens: Tokens of one block.
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
            model: The base model's name.
            lora_name: The adapter's name; None for the base model.
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
