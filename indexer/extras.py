"""What a block's content depends on besides its tokens: from an event's extra keys to bytes for its key.

Every kind has its own typed form, so that an adapter's name can never be taken for an image or a salt. A
request's multimodal items give the same bytes (`extras_of_prompt`), whatever the engine's block size.
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
class MultimodalItem:
    """One image, video or sound of a prompt."""

    identifier: str  # the hash of its content, as the engine names it in its events
    offset: int  # the prompt's token at which its placeholders begin
    length: int  # how many placeholder tokens it has


@dataclass(frozen=True, slots=True)
class RunExtras:
    """Extras of one run of engine blocks."""

    cache_salt: str | None  # the salt of the prompt that the run begins; None where it continues one
    # For each engine block what else it depends on; empty when none depends on anything.
    entries: Sequence[Sequence[Any]]

    def of_index_blocks(self, split: int, block_tokens: int) -> Sequence[bytes]:
        """One entry for each index block, see `BlockHasher.chain`; each engine block is `split` of them."""
        starts = range(0, -split * block_tokens, -block_tokens)
        return [pack(entry, start, block_tokens) for entry in self.entries for start in starts]


def read_extras(event: BlockStored, *, starts_prompt: bool) -> RunExtras:
    """Reads the extra keys of a store that carries tokens.

    An engine writes, per block and in this order: the LoRA name (already known from `lora_name`, and part
    of the root), [multimodal id, offset in the block] pairs, the cache salt (first block of a prompt only),
    a digest of prompt embeddings. A multimodal id may come without its offset; in a first block it looks like
    a salt and is taken for one: such a block is never found, but nothing else is found in its place.

    Args:
        starts_prompt: Whether the run has no parent.

    Raises:
        TokenError: An extra key is of no known kind, an item begins in front of the prompt, or the number of
            entries is not that of the blocks.
    """
    salt = event.cache_salt if starts_prompt else None
    if event.extra_keys is None:
        return RunExtras(salt, ())
    if len(event.extra_keys) != len(event.block_hashes):
        raise TokenError("extra_keys must have one entry for each block")
    entries: list[Sequence[Any]] = []
    for position, entry in enumerate(event.extra_keys):
        items = _without_lora(entry or [], event.lora_name)
        if starts_prompt and position == 0:
            items, salt = _without_salt(items, salt)
        for item in items:
            _check(item, position * event.block_size if starts_prompt else _MAX_OFFSET)
        entries.append(items)
    return RunExtras(salt, entries if any(entries) else ())


def pack(items: Sequence[Any], start: int, block_tokens: int) -> bytes:
    """What one index block depends on besides tokens; b"" for nothing.

    A multimodal item counts where it begins: all blocks behind depend on that one through their chain, and an
    event does not tell where the item ends. So the bytes do not depend on the engine's block size.

    Args:
        items: Extras of an engine block that overlaps the index block, checked by `read_extras`.
        start: Where the engine block begins in the index block, in tokens; negative in front of it.
    """
    return b"".join(_pack(item, start, block_tokens) for item in items)


def extras_of_prompt(
    items: Sequence[MultimodalItem], block_tokens: int, prompt_tokens: int
) -> Sequence[bytes]:
    """Extras of a prompt's full blocks, byte for byte those that an engine's events give.

    Args:
        prompt_tokens: Tokens of the prompt, placeholders included.

    Returns:
        One entry for each full block, see `BlockHasher.chain`; empty when no block depends on an item.

    Raises:
        TokenError: An item begins in front of the prompt.
    """
    blocks = [b""] * (prompt_tokens // block_tokens)
    for item in sorted(items, key=lambda item: item.offset):
        if not 0 <= item.offset < _MAX_OFFSET:
            raise TokenError(f"multimodal item: offset must be within 0..2**31-1, is {item.offset}")
        block, offset = divmod(item.offset, block_tokens)
        # An item without tokens that lies between two blocks is in none.
        if block < len(blocks) and (item.length or offset):
            blocks[block] += _pack([item.identifier, offset], 0, block_tokens)
    return blocks if any(blocks) else ()


def _without_lora(items: list[Any], lora_name: str | None) -> list[Any]:
    return items[1:] if lora_name is not None and items[:1] == [lora_name] else items


def _without_salt(items: list[Any], salt: str | None) -> tuple[list[Any], str | None]:
    for position in reversed(range(len(items))):
        if isinstance(items[position], str):
            return items[:position] + items[position + 1 :], items[position]
    return items, salt


def _check(item: object, tokens_in_front: int) -> None:
    match item:
        case bytes() | str():
            return
        case [str(), int(offset)] if not isinstance(offset, bool) and abs(offset) < _MAX_OFFSET:
            if offset < -tokens_in_front:
                raise TokenError(f"multimodal item begins {offset + tokens_in_front} tokens into its prompt")
        case _:
            raise TokenError(f"extra key of unknown form: {type(item).__name__}")


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
