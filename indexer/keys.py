"""Block keys: chained 64-bit hashes of token ids and extra keys, the only prefix hash function of kvroute.

Each full block of a prompt has one key. Keys depend on a seed, so that clients cannot prepare prompts whose
keys collide. Engines' own hashes are unrelated to them.

Each kind of extra key is packed in a typed form, so that an adapter's name cannot be mistaken for an image or
a salt. A request's multimodal items are packed to the same bytes as the extra keys of an engine's events,
for any engine block size.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from common.jit import inlined, kernel
from indexer.errors import TokenError
from indexer.wire.events import BlockStored

# Block keys in the order of the prompt: uint64 [blocks].
Keys: TypeAlias = NDArray[np.uint64]
# Token ids: a uint32 array is used without checks, in any other sequence each number is checked.
Tokens: TypeAlias = Sequence[int] | NDArray[np.uint32]

EMPTY: Keys = np.empty(0, np.uint64)
# Multipliers before those of the tokens: of the constant 1, the parent's two words, the extras' two words.
HEAD_WORDS = 5
_USUAL_TOKENS = 16

_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)


class BlockHasher:
    """Hasher of blocks to keys.

    A key hashes the parent's key, the block's extras and its token ids. The first block's parent is a root
    key, made of the model, adapter and salt. A key consists of the upper 32 bits of two multilinear hashes of
    the block's 32-bit words. Such a hash of a block of fixed length is strongly universal (Lemire and Kaser,
    "Strongly universal string hashing is fast", 2014): without the random multipliers, two blocks collide
    with a probability of 2**-64.

    Args:
        seed: Unsigned 64-bit number; keys of different seeds are independent.
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
        """Return a number that identifies the seed and block size without revealing the seed."""
        return int(xxh3_64_intdigest(self.multipliers.tobytes(), self._extras_seed))

    def root(self, model: str, lora_name: str | None = None, cache_salt: str | None = None) -> int:
        """Return the parent key of a prompt's first block; a salt separates one tenant's from others'."""
        packed = _model_text(model, lora_name) + _optional_text(cache_salt)
        return int(xxh3_64_intdigest(packed, self._root_seed))

    def next_key(self, key: int, next_token: int) -> int:
        """Return the key of a block in front of a token."""
        return int(self.chain(key, np.full(self.block_tokens, next_token, np.uint32))[0])

    def chain(self, parent: int, token_ids: Tokens, extras: Sequence[bytes] = ()) -> Keys:
        """Return the keys of the full blocks in `token_ids`; a partial block at the end has none.

        Args:
            parent: Key of the previous block, or a root.
            token_ids: Integers in 0..2**32-1.
            extras: Packed extra keys of each block (see `pack`), b"" for none; empty if no block has any.

        Raises:
            TokenError: A token id is out of range or not an integer.
        """
        tokens = token_words(token_ids)
        blocks = len(tokens) // self.block_tokens
        digests = self._digests(extras[:blocks]) if extras else EMPTY
        keys = np.empty(1 + blocks, np.uint64)
        keys[0] = parent
        chain_behind(tokens, digests, self.multipliers, keys)
        return keys[1:]

    def _digests(self, extras: Sequence[bytes]) -> NDArray[np.uint64]:
        seed = self._extras_seed
        return np.array([xxh3_64_intdigest(extra, seed) if extra else 0 for extra in extras], np.uint64)


def token_words(token_ids: Tokens) -> NDArray[np.uint32]:
    """Return token ids as uint32 words, the form in which they are hashed.

    Raises:
        TokenError: A token id is out of range or not an integer.
    """
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.uint32 and token_ids.ndim == 1:
        return token_ids
    try:
        return np.frombuffer(array("I", token_ids), np.uint32)
    except (OverflowError, TypeError, ValueError) as error:
        raise TokenError(f"token ids must be integers in 0..2**32-1: {error}") from None


def length_prefixed(data: bytes) -> bytes:
    """Return `data` preceded by its length, so that concatenated fields are unambiguous."""
    return len(data).to_bytes(4, "little") + data


def utf8(text: str) -> bytes:
    """Encode any text, including lone surrogates, which JSON allows."""
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
    """Write the keys of consecutive blocks.

    Args:
        parent: Key of the block before the first.
        tokens: uint32 [blocks * block_tokens or more]; further tokens are ignored.
        extras: uint64 [blocks], or empty where no block has any.
        multipliers: uint64 [2, HEAD_WORDS + block_tokens].
        keys: uint64 [blocks], written.
    """
    block_tokens = multipliers.shape[1] - HEAD_WORDS
    if block_tokens == _USUAL_TOKENS:
        # A constant length lets the compiler unroll the loop, which is a sixth faster.
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
    """Write the keys of consecutive blocks after their parent: `keys` is uint64 [1 + blocks].

    Passing the parent as a scalar would double the cost of the call from Python.
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
        # The parent comes last, so that the sums above do not wait for the previous key.
        word = key & _LOW
        next_word = key >> _HALF
        high += multipliers[0, 1] * word + multipliers[0, 2] * next_word
        low += multipliers[1, 1] * word + multipliers[1, 2] * next_word
        key = ((high >> _HALF) << _HALF) | (low >> _HALF)
        keys[block] = key


_MAX_OFFSET = 1 << 31


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """Image, video or audio item of a prompt."""

    identifier: str  # hash of its content, as in the engine's events
    offset: int  # position of its first placeholder token in the prompt
    length: int  # number of placeholder tokens


@dataclass(frozen=True, slots=True)
class RunExtras:
    """Extra keys of one run of engine blocks."""

    cache_salt: str | None  # salt of the prompt that the run begins; None if it continues one
    # Extra keys of each engine block; empty if no block has any.
    entries: Sequence[Sequence[Any]]

    def of_index_blocks(self, split: int, block_tokens: int) -> Sequence[bytes]:
        """Return packed extra keys per index block, see `BlockHasher.chain`; `split` per engine block."""
        starts = range(0, -split * block_tokens, -block_tokens)
        return [pack(entry, start, block_tokens) for entry in self.entries for start in starts]


def read_extras(event: BlockStored, *, starts_prompt: bool) -> RunExtras:
    """Parse the extra keys of a store that carries tokens.

    An engine writes, per block and in this order: the LoRA name (also in `lora_name`, and part of the root),
    [multimodal id, offset in the block] pairs, the cache salt (first block of a prompt only), a digest of
    prompt embeddings. Some engines write a multimodal id without its offset. In a prompt's first block such
    an id is mistaken for a salt: the block is then never matched, which is safe.

    Args:
        starts_prompt: Whether the run has no parent.

    Raises:
        TokenError: An extra key is of an unknown kind, an item begins before the prompt, or the numbers of
            entries and blocks differ.
    """
    salt = event.cache_salt if starts_prompt else None
    if event.extra_keys is None:
        return RunExtras(salt, ())
    if len(event.extra_keys) != len(event.block_hashes):
        raise TokenError("extra_keys must have one entry for each block")
    entries: list[Sequence[Any]] = []
    for position, entry in enumerate(event.extra_keys):
        items = entry or []
        if event.lora_name is not None and items[:1] == [event.lora_name]:
            items = items[1:]
        if starts_prompt and position == 0:
            items, salt = _without_salt(items, salt)
        for item in items:
            _check(item, position * event.block_size if starts_prompt else _MAX_OFFSET)
        entries.append(items)
    return RunExtras(salt, entries if any(entries) else ())


def pack(items: Sequence[Any], start: int, block_tokens: int) -> bytes:
    """Pack the extra keys of one index block into bytes; b"" for none.

    A multimodal item counts only in the block where it begins. Later blocks depend on that one through their
    chain, and events do not report where an item ends. So the engine's block size does not matter.

    Args:
        items: Extra keys of an engine block that overlaps the index block, checked by `read_extras`.
        start: Start of the engine block relative to the index block, in tokens; may be negative.
    """
    return b"".join(_pack(item, start, block_tokens) for item in items)


def extras_of_prompt(
    items: Sequence[MultimodalItem], block_tokens: int, prompt_tokens: int
) -> Sequence[bytes]:
    """Return packed extra keys of a prompt's full blocks, equal to those packed from an engine's events.

    Args:
        prompt_tokens: Tokens of the prompt, placeholders included.

    Returns:
        One entry per full block, see `BlockHasher.chain`; empty if no block has an item.

    Raises:
        TokenError: An item begins before the prompt.
    """
    blocks = [b""] * (prompt_tokens // block_tokens)
    for item in sorted(items, key=lambda item: item.offset):
        if not 0 <= item.offset < _MAX_OFFSET:
            raise TokenError(f"multimodal item: offset must be within 0..2**31-1, is {item.offset}")
        block, offset = divmod(item.offset, block_tokens)
        # An item without tokens at a block boundary belongs to no block.
        if block < len(blocks) and (item.length or offset):
            blocks[block] += _pack([item.identifier, offset], 0, block_tokens)
    return blocks if any(blocks) else ()


def _without_salt(items: list[Any], salt: str | None) -> tuple[list[Any], str | None]:
    for position in reversed(range(len(items))):
        if isinstance(items[position], str):
            return items[:position] + items[position + 1 :], items[position]
    return items, salt


def _check(item: object, tokens_before: int) -> None:
    match item:
        case bytes() | str():
            return
        case [str(), int(offset)] if not isinstance(offset, bool) and abs(offset) < _MAX_OFFSET:
            if offset < -tokens_before:
                raise TokenError(
                    f"multimodal item begins at token {offset + tokens_before} of its prompt, before 0"
                )
        case _:
            raise TokenError(f"extra key of unknown type: {type(item).__name__}")


def _pack(item: Any, start: int, block_tokens: int) -> bytes:
    if isinstance(item, bytes):
        return b"E" + _signed(start) + length_prefixed(item)
    if isinstance(item, str):
        return b"I" + _signed(start) + length_prefixed(utf8(item))
    identifier, offset = item
    begin = start + offset
    if offset < 0 or not 0 <= begin < block_tokens:
        return b""
    return b"M" + _signed(begin) + length_prefixed(utf8(identifier))


def _signed(tokens: int) -> bytes:
    return tokens.to_bytes(8, "little", signed=True)
