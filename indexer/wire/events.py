"""Events of an engine's KV cache, with vLLM's field names."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

# Twice a context of one million tokens; bounds the memory that one hostile event can allocate.
MAX_TOKENS = 2_097_152
MAX_EVENTS = 65_536
MAX_HASH_BYTES = 64
MAX_GROUP = 65_535
MAX_WINDOW_TOKENS = 2**31 - 1

# An engine's hash of a block: a digest (vLLM: 16 or 32 bytes), uint64 (vLLM) or int64 (SGLang).
EngineHash = int | Annotated[bytes, Meta(min_length=1, max_length=MAX_HASH_BYTES)]
EngineHashes = Annotated[list[EngineHash], Meta(max_length=MAX_TOKENS)]
_TokenId = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
TokenIds = Annotated[list[_TokenId], Meta(max_length=MAX_TOKENS)]
TokenPairs = Annotated[list[tuple[_TokenId, _TokenId]], Meta(max_length=MAX_TOKENS)]
# Per block: None, or a list of LoRA name, [multimodal id, offset], cache salt, prompt-embeddings digest.
ExtraKeys = Annotated[list[Annotated[list[Any], Meta(max_length=1024)] | None], Meta(max_length=MAX_TOKENS)]
GroupIdx = Annotated[int, Meta(ge=0, le=MAX_GROUP)]
WindowTokens = Annotated[int, Meta(ge=0, le=MAX_WINDOW_TOKENS)]


class BlockStored(Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Run of blocks that became available; `parent_block_hash` is the block in front of the run."""

    block_hashes: EngineHashes
    parent_block_hash: EngineHash | None = None
    token_ids: TokenIds = []
    block_size: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: WindowTokens | None = None
    # SGLang only; vLLM has the salt in the first block's extra keys.
    cache_salt: str | None = None
    # Token behind each block, if the engine finds blocks only in front of it (SGLang with EAGLE).
    next_tokens: TokenIds | None = None


class BlockRemoved(Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Removal of one copy of each of these blocks."""

    block_hashes: EngineHashes
    medium: str | None = None
    group_idx: GroupIdx | None = None


class AllBlocksCleared(Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """Notice that the engine's cache is empty."""


class BlockInactive(Struct, frozen=True, tag_field="type", tag="BlockInactive"):
    """Notice that no request uses these blocks; they stay cached."""

    block_hashes: EngineHashes
    medium: str | None = None
    group_idx: GroupIdx | None = None


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | BlockInactive
