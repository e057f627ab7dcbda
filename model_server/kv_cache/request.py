"""State of a request inside the engine, shared by the scheduler and the KV cache manager."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from model_server.kv_cache.block_pool import KVCacheBlock
from model_server.kv_cache.host_tier import HostBlock, Restore
from model_server.kv_events.hashing import ROOT_BLOCK_HASH, ExtraKeys, hash_block
from model_server.requests import ChosenToken, EngineCoreOutput, EngineCoreRequest, FinishReason, LoraRequest


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """Blocks of one request in one KV cache group."""

    # In chain order; None for a block that has left the group's window.
    blocks: list[KVCacheBlock | None] = field(default_factory=list)
    # Ids of `blocks`, for building tensors; 0 for a block that has left the window.
    block_ids: "array[int]" = field(default_factory=partial(array, "i"))
    num_skipped: int = 0  # blocks at the start that have left the window
    num_cached_blocks: int = 0  # blocks at the start that `cache_blocks` has already examined

    def extend(self, blocks: Sequence[KVCacheBlock | None]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(0 if block is None else block.block_id for block in blocks)

    def skip(self, stop: int) -> list[KVCacheBlock]:
        """Remove and return the blocks before `stop`, which have left the window."""
        skipped = [block for block in self.blocks[self.num_skipped : stop] if block is not None]
        for index in range(self.num_skipped, stop):
            self.blocks[index], self.block_ids[index] = None, 0
        self.num_skipped = max(self.num_skipped, stop)
        return skipped

    def held_blocks(self) -> list[KVCacheBlock]:
        return [block for block in self.blocks if block is not None]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request between submission and its last token."""

    core_request: EngineCoreRequest  # as submitted
    sampling_seed: int  # seed of its random draws
    lora_request: LoraRequest | None = None  # its LoRA adapter; None for the base model
    arrived_s: float = 0.0  # arrival time on the engine's clock (`time.monotonic`)
    arrival_index: int = 0  # increases from request to request; breaks ties of `arrived_s`
    started_s: float | None = None  # start of its first step, same clock; None before
    is_greedy: bool = field(init=False)  # the largest logit alone decides each token
    token_ids: list[int] = field(init=False)  # prompt tokens and generated tokens
    num_computed_tokens: int = 0  # leading tokens that have their KV in its blocks
    block_tables: list[BlockTable] = field(default_factory=list)  # per KV cache group; empty while waiting
    restore: Restore | None = None  # blocks being restored from the host tier; None when there are none
    # Host blocks pinned since the request was preempted, until they are restored.
    swapped_blocks: list[HostBlock] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of its full blocks, computed on demand
    # Prefix lengths in blocks at which sliding-window groups keep the blocks that a later request needs.
    resume_points: set[int] = field(default_factory=set)
    expected_hit_tokens: int = 0  # cached prefix at the last lookup while waiting
    num_cached_tokens: int | None = None  # prompt tokens found in the cache at first admission; None before

    def __post_init__(self) -> None:
        self.is_greedy = self.core_request.constraint is None and self.core_request.sampling.is_greedy
        self.token_ids = list(self.core_request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.core_request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.core_request.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without KV: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def estimated_prefill_tokens(self) -> int:
        """Tokens to compute until the next output token; an estimate while the request waits."""
        return self.num_pending_tokens if self.block_tables else self.num_tokens - self.expected_hit_tokens

    @property
    def block_ids(self) -> "list[array[int]]":
        return [table.block_ids for table in self.block_tables]

    def extra_keys(self, block_index: int) -> ExtraKeys | None:
        """Return the hash inputs of a block besides its tokens: adapter, and the salt for the first block.

        vLLM hashes the adapter's path. The content hash is stricter: a different adapter loaded from the same
        path under the same name must not match blocks of the first one.
        """
        adapter, salt = self.lora_request, self.core_request.cache_salt if block_index == 0 else None
        of_adapter = () if adapter is None else (("lora", adapter.name, adapter.content_hash),)
        return of_adapter + (() if salt is None else (("cache_salt", salt),)) or None

    def block_hash(self, index: int, block_tokens: int) -> bytes:
        """Return the hash of a full block; all of the block's tokens must be known."""
        for number in range(len(self.block_hashes), index + 1):
            parent = self.block_hashes[number - 1] if number else ROOT_BLOCK_HASH
            tokens = self.token_ids[number * block_tokens : (number + 1) * block_tokens]
            assert len(tokens) == block_tokens, "only full blocks have a hash"
            self.block_hashes.append(hash_block(parent, tokens, self.extra_keys(number)))
        return self.block_hashes[index]

    def make_output(
        self, token: ChosenToken | None, reason: FinishReason | None = None, error: str | None = None
    ) -> EngineCoreOutput:
        """Return the output of a step that sampled `token`, or the request's last output."""
        return EngineCoreOutput(
            request_id=self.request_id,
            token_ids=() if token is None else (token.token_id,),
            finish_reason=reason,
            cached_tokens=self.num_cached_tokens or 0,
            error=error,
            logprobs=() if token is None or token.logprobs is None else (token.logprobs,),
            started_s=self.started_s,
        )


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request that a step computes."""

    request: Request  # tokens before `start` already have their KV
    start: int  # position of the first token to compute
    num_tokens: int  # tokens to compute; 1 for a decode
    samples: bool  # whether the last known token is included, so that the next token is sampled

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens
