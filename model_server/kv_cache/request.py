"""State of a request inside the engine, shared by the scheduler and the KV cache manager."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from model_server.kv_cache.block_pool import Block
from model_server.kv_cache.host_tier import HostBlock, Restore
from model_server.kv_events.hashing import ROOT_DIGEST, ExtraKeys, hash_block
from model_server.requests import ChosenToken, FinishReason, GenerationRequest, LoraRequest, TokenOutput


@dataclass(slots=True, eq=False, repr=False)
class BlockTable:
    """A request's blocks in one KV cache group."""

    # In chain order; None where a block has rolled out of the group's window.
    blocks: list[Block | None] = field(default_factory=list)
    # The same as numbers, for building tensors; 0 for what has rolled out.
    block_ids: "array[int]" = field(default_factory=partial(array, "i"))
    rolled: int = 0  # how many have rolled out, all at the start
    registered: int = 0  # how many of the first blocks were looked at for being made findable

    def extend(self, blocks: Sequence[Block | None]) -> None:
        self.blocks.extend(blocks)
        self.block_ids.extend(0 if block is None else block.block_id for block in blocks)

    def replace(self, index: int, block: Block | None) -> None:
        self.blocks[index] = block
        self.block_ids[index] = 0 if block is None else block.block_id

    def held(self) -> list[Block]:
        return [block for block in self.blocks if block is not None]


@dataclass(slots=True, eq=False, repr=False)
class LiveRequest:
    """A request between submission and its last token."""

    request: GenerationRequest  # as it was submitted
    sampling_seed: int  # base of its random draws
    adapter: LoraRequest | None = None  # what changes the model for it; None is the base model
    arrived_s: float = 0.0  # when it came, on the engine's clock
    serial: int = 0  # rises from request to request
    started_s: float | None = None  # when its first step began, on the same clock; None before
    takes_best: bool = field(init=False)  # whether the largest logit alone decides on each of its tokens
    token_ids: list[int] = field(init=False)  # prompt and generated tokens
    computed: int = 0  # how many of them have their KV in its blocks
    tables: list[BlockTable] = field(default_factory=list)  # one per KV cache group; empty without blocks
    restore: Restore | None = None  # its blocks that come from the host tier; None when all are there
    # Blocks of the host tier that are held for it since it was preempted, until they are back.
    swapped: list[HostBlock] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were needed
    # Lengths in blocks at which groups with a window keep what a later request needs to resume there.
    retained_ends: set[int] = field(default_factory=set)
    expected_blocks: int = 0  # of its prefix that were cached when it was last looked at, while it waits
    expected_tokens: int = 0  # those it will not have to compute, as far as that is known while it waits
    cached_tokens: int | None = None  # of its prompt, found in the cache when it first ran; None before

    def __post_init__(self) -> None:
        self.takes_best = self.request.constraint is None and self.request.sampling.takes_best
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def pending(self) -> int:
        """Known tokens without KV: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.computed

    @property
    def uncached(self) -> int:
        """Tokens that it will have to compute until its next one; an estimate while it waits."""
        return self.pending if self.tables else len(self.token_ids) - self.expected_tokens

    @property
    def block_ids(self) -> "list[array[int]]":
        return [table.block_ids for table in self.tables]

    def extra_keys(self, block_index: int) -> ExtraKeys | None:
        """Return what enters the hash of one of its blocks beside the tokens; a salt only the first.

        vLLM has the adapter's path in the third place. Its content tells more: another adapter loaded from
        the same path under the same name must not find the first one's blocks.
        """
        adapter, salt = self.adapter, self.request.cache_salt if block_index == 0 else None
        of_adapter = () if adapter is None else (("lora", adapter.name, adapter.content_hash),)
        return of_adapter + (() if salt is None else (("cache_salt", salt),)) or None

    def digest(self, index: int, block_tokens: int) -> bytes:
        """Return the hash of one of its full blocks, all of whose tokens are known."""
        for number in range(len(self.digests), index + 1):
            parent = self.digests[number - 1] if number else ROOT_DIGEST
            tokens = self.token_ids[number * block_tokens : (number + 1) * block_tokens]
            assert len(tokens) == block_tokens, "only full blocks have a hash"
            self.digests.append(hash_block(parent, tokens, self.extra_keys(number)))
        return self.digests[index]

    def output(
        self, token: ChosenToken | None, reason: FinishReason | None = None, error: str | None = None
    ) -> TokenOutput:
        """Return what its sink is told of a step, or of its end."""
        return TokenOutput(
            request_id=self.request_id,
            token_ids=() if token is None else (token.token_id,),
            finish_reason=reason,
            cached_tokens=self.cached_tokens or 0,
            error=error,
            logprobs=() if token is None or token.logprobs is None else (token.logprobs,),
            started_s=self.started_s,
        )


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The next `length` tokens of one request, to be computed in this step."""

    live: LiveRequest  # the request; its tokens before `start` have their KV
    start: int  # position of the chunk's first token
    length: int  # tokens in the chunk; 1 for a decode
    samples: bool  # whether it reaches the last known token, so that the next one is sampled

    @property
    def stop(self) -> int:
        return self.start + self.length
