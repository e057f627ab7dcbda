"""One request while it lives in the engine: its tokens, how many of them have KV, and its blocks.

Plain state that the scheduler and the block manager share; it decides nothing itself.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from model_server.block_hash import ROOT_DIGEST, ExtraKeys, hash_block, lora_keys, salt_keys
from model_server.requests import ChosenToken, FinishReason, GenerationRequest, TokenOutput

if TYPE_CHECKING:
    from model_server.free_queue import Block
    from model_server.host_tier import HostBlock
    from model_server.lora import LoraAdapter
    from model_server.offload import Restore


class BlockTable:
    """A request's blocks in one KV cache group.

    Attributes:
        blocks: In chain order; None where a block has rolled out of the group's window.
        block_ids: The same as numbers, for building tensors; 0 for what has rolled out.
        rolled: How many have rolled out, all at the start.
        registered: How many of the first blocks were looked at for being made findable.
    """

    __slots__ = ("block_ids", "blocks", "registered", "rolled")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []
        self.block_ids = array("i")
        self.rolled = 0
        self.registered = 0

    def extend(self, blocks: "Sequence[Block | None]") -> None:
        """Append blocks."""
        self.blocks.extend(blocks)
        self.block_ids.extend(0 if block is None else block.block_id for block in blocks)

    def replace(self, index: int, block: "Block | None") -> None:
        """Put another block, or none, in a place."""
        self.blocks[index] = block
        self.block_ids[index] = 0 if block is None else block.block_id

    def held(self) -> "list[Block]":
        """Return the blocks that are there."""
        return [block for block in self.blocks if block is not None]

    def clear(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
        del self.block_ids[:]
        self.rolled = self.registered = 0


class LiveRequest:
    """A request between submission and its last token.

    Attributes:
        request: As it was submitted.
        sampling_seed: Base of its random draws.
        adapter: What changes the model for it; None is the base model.
        arrived_s: When it came, on the engine's clock.
        started_s: When its first step began, on the same clock; None before.
        serial: Rises from request to request.
        takes_best: Whether the largest logit alone decides on each of its tokens.
        token_ids: Prompt and generated tokens.
        computed: How many of them have their KV in its blocks.
        tables: Its block tables, one per KV cache group; empty while it holds no blocks.
        restore: Its blocks that come from the host tier; None when all are there.
        swapped: Blocks of the host tier that are held for it since it was preempted, until they are back.
        digests: Hashes of its full blocks, as far as they were needed.
        retained_ends: Lengths in blocks at which groups with a window keep what a later request needs to
            resume there.
        expected_blocks: Blocks of its prefix that were cached when it was last looked at, while it waits.
        expected_tokens: How many tokens it will not have to compute, as far as that is known while it waits.
        cached_tokens: Prompt tokens found in the cache when it first ran; None before.
    """

    __slots__ = (
        "adapter",
        "arrived_s",
        "cached_tokens",
        "computed",
        "digests",
        "expected_blocks",
        "expected_tokens",
        "request",
        "restore",
        "retained_ends",
        "sampling_seed",
        "serial",
        "started_s",
        "swapped",
        "tables",
        "takes_best",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        sampling_seed: int,
        adapter: "LoraAdapter | None" = None,
        *,
        arrived_s: float = 0.0,
        serial: int = 0,
    ) -> None:
        self.request = request
        self.sampling_seed = sampling_seed
        self.adapter = adapter
        self.arrived_s = arrived_s
        self.started_s: float | None = None
        self.serial = serial
        self.takes_best = request.constraint is None and request.sampling.takes_best
        self.token_ids = list(request.prompt_token_ids)
        self.computed = 0
        self.tables: list[BlockTable] = []
        self.restore: Restore | None = None
        self.swapped: list[HostBlock] = []
        self.digests: list[bytes] = []
        self.retained_ends: set[int] = set()
        self.expected_blocks = 0
        self.expected_tokens = 0
        self.cached_tokens: int | None = None

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens."""
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
        """Its block tables as numbers, per group."""
        return [table.block_ids for table in self.tables]

    def extra_keys(self, block_index: int) -> ExtraKeys | None:
        """Return what enters the hash of one of its blocks beside the tokens."""
        salt = salt_keys(self.request.cache_salt) if block_index == 0 else None
        if self.adapter is None:
            return salt
        return lora_keys(self.adapter.name, self.adapter.content_hash) + (salt or ())

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
            self.request_id,
            () if token is None else (token.token_id,),
            reason,
            self.cached_tokens or 0,
            error,
            () if token is None or token.logprobs is None else (token.logprobs,),
            self.started_s,
        )
