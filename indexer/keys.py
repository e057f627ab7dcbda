"""Token ids to chained 64-bit block keys: the one hash function of kvroute.

Tokens of a prompt come in, one key per full block goes out. Keys depend on a seed, so that no client can
prepare prompts that collide. Engines are not known here: their hashes are foreign handles (`engine_blocks`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from indexer.errors import TokenError

_KEY_BYTES = 8
_TOKEN_BYTES = 4


class BlockHasher:
    """Makes block keys.

    A key is XXH3-64 over the parent's key (8 bytes), the block's token ids (4 bytes each) and the block's
    extras, all little-endian. The first block's parent is a root made of what the whole prompt depends on.

    Args:
        block_tokens: Tokens of one block.
        seed: Unsigned 64-bit number; keys of different seeds have nothing in common.
    """

    def __init__(self, block_tokens: int, seed: int) -> None:
        self.block_tokens = block_tokens
        self._root_seed = seed
        # A second seed keeps roots and blocks apart without a tag in every block.
        self._block_seed = xxh3_64_intdigest(b"block", seed)

    def root(self, model: str, lora_name: str | None = None, cache_salt: str | None = None) -> int:
        """The key in front of a prompt's first block.

        Args:
            model: The base model's name.
            lora_name: The adapter's name; None for the base model.
            cache_salt: Keeps a tenant's blocks apart from others'; None for none.
        """
        packed = b"".join(map(_optional_text, (model, lora_name, cache_salt)))
        return int(xxh3_64_intdigest(packed, self._root_seed))

    def chain(self, parent: int, token_ids: Sequence[int], extras: Sequence[bytes] = ()) -> list[int]:
        """Keys of the full blocks in `token_ids`; a partial block at the end has none.

        Args:
            parent: Key of the block before, or a root.
            token_ids: Whole numbers of 0..2**32-1.
            extras: What each block depends on besides tokens (see `extras`), b"" for nothing; empty for a run
                of blocks that depend on tokens alone.

        Raises:
            TokenError: A token id is out of range or no whole number.
        """
        buffer = token_buffer(token_ids)
        size = self.block_tokens * _TOKEN_BYTES
        seed = self._block_seed
        keys = []
        key = parent
        for number, start in enumerate(range(0, len(buffer) - size + 1, size)):
            block = key.to_bytes(_KEY_BYTES, "little") + buffer[start : start + size]
            if extras:
                block += extras[number]
            key = int(xxh3_64_intdigest(block, seed))
            keys.append(key)
        return keys


def token_buffer(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which they are hashed.

    Raises:
        TokenError: A token id is out of range or no whole number.
    """
    try:
        tokens = array("I", token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be whole numbers of 0..2**32-1: {error}") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def length_prefixed(data: bytes) -> bytes:
    """`data` behind its length, so that neighbouring fields cannot be taken for one another."""
    return len(data).to_bytes(4, "little") + data


def utf8(text: str) -> bytes:
    """Bytes of any text, also of the lone surrogates that JSON lets through."""
    return text.encode("utf-8", "surrogatepass")


def _optional_text(text: str | None) -> bytes:
    return b"\0" if text is None else b"\1" + length_prefixed(utf8(text))
