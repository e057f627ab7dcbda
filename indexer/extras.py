"""What a block's content depends on besides its tokens: from an event's extra keys to bytes for its key.

Every kind has its own typed form, so that an adapter's name can never be taken for an image or a salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from indexer.errors import TokenError
from indexer.events import BlockStored
from indexer.keys import length_prefixed, utf8

_MAX_OFFSET = 1 << 31


@dataclass(frozen=True, slots=True)
class RunExtras:
    """Extras of one run of blocks.

    Attributes:
        cache_salt: The salt of the prompt that the run begins; None where it continues one.
        blocks: One entry for each index block, see `BlockHasher.chain`; empty when no block has any.
    """

    cache_salt: str | None
    blocks: Sequence[bytes]


def read_extras(event: BlockStored, block_tokens: int, *, starts_prompt: bool) -> RunExtras:
    """Reads the extra keys of a store that carries tokens.

    An engine writes, per block and in this order: the LoRA name (already known from `lora_name`, and part
    of the root), [multimodal id, offset in the block] pairs, the cache salt (first block of a prompt only),
    a digest of prompt embeddings. Early vLLM wrote a multimodal id without its offset; in a first block it
    looks like a salt and is taken for one: such a block is never found, but nothing else is found in its
    place.

    Args:
        event: `block_size` is a multiple of `block_tokens`.
        block_tokens: Tokens of an index block.
        starts_prompt: Whether the run has no parent.

    Raises:
        TokenError: An extra key is of no known kind, or the number of entries is not that of the blocks.
    """
    salt = event.cache_salt if starts_prompt else None
    if event.extra_keys is None:
        return RunExtras(salt, ())
    if len(event.extra_keys) != len(event.block_hashes):
        raise TokenError("extra_keys must have one entry for each block")
    split = event.block_size // block_tokens
    blocks: list[bytes] = []
    for position, entry in enumerate(event.extra_keys):
        items = _without_lora(entry or [], event.lora_name)
        if starts_prompt and position == 0:
            items, salt = _without_salt(items, salt)
        for start in range(0, split * block_tokens, block_tokens):
            blocks.append(b"".join(_pack(item, start, block_tokens) for item in items))
    return RunExtras(salt, blocks if any(blocks) else ())


def _without_lora(items: list[Any], lora_name: str | None) -> list[Any]:
    return items[1:] if lora_name is not None and items[:1] == [lora_name] else items


def _without_salt(items: list[Any], salt: str | None) -> tuple[list[Any], str | None]:
    for position in reversed(range(len(items))):
        if isinstance(items[position], str):
            return items[:position] + items[position + 1 :], items[position]
    return items, salt


def _pack(item: object, start: int, block_tokens: int) -> bytes:
    """One extra of the index block that begins `start` tokens into its engine block."""
    match item:
        case bytes():
            return b"E" + length_prefixed(item)
        case str():
            return b"I" + length_prefixed(utf8(item))
        case [str(identifier), int(offset)] if abs(offset) < _MAX_OFFSET:
            # The event tells where an item begins, not where it ends: it counts up to the engine block's end.
            if offset >= start + block_tokens:
                return b""
            return (
                b"M" + (offset - start).to_bytes(8, "little", signed=True) + length_prefixed(utf8(identifier))
            )
        case _:
            raise TokenError(f"extra key of unknown form: {type(item).__name__}")
