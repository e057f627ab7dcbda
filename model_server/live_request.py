"""One request while it lives in the engine: its tokens, how many of them have KV, and its blocks.

Plain state that the scheduler and the block manager share; it decides nothing itself.
"""

from array import array

from model_server.block_hash import ROOT_DIGEST, ExtraKeys, hash_block, salt_keys
from model_server.blocks import Block
from model_server.requests import GenerationRequest


class LiveRequest:
    """A request between submission and its last token.

    Attributes:
        request: As it was submitted.
        sampling_seed: Base of its random draws.
        token_ids: Prompt and generated tokens.
        computed: How many of them have their KV in `blocks`.
        blocks: Its block table, in chain order.
        block_ids: The same as numbers, for building tensors.
        digests: Hashes of its full blocks, as far as they were needed.
        registered: How many of `blocks` can be found by hash.
        cached_tokens: Prompt tokens found in the cache when it first ran; None before.
    """

    __slots__ = (
        "block_ids",
        "blocks",
        "cached_tokens",
        "computed",
        "digests",
        "registered",
        "request",
        "sampling_seed",
        "token_ids",
    )

    def __init__(self, request: GenerationRequest, sampling_seed: int) -> None:
        self.request = request
        self.sampling_seed = sampling_seed
        self.token_ids = list(request.prompt_token_ids)
        self.computed = 0
        self.blocks: list[Block] = []
        self.block_ids = array("i")
        self.digests: list[bytes] = []
        self.registered = 0
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

    def extra_keys(self, block_index: int) -> ExtraKeys | None:
        """Return what enters the hash of one of its blocks beside the tokens."""
        return salt_keys(self.request.cache_salt) if block_index == 0 else None

    def digests_of(self, num_blocks: int, block_tokens: int) -> list[bytes]:
        """Return the hashes of its first `num_blocks` blocks, all of whose tokens are known."""
        for index in range(len(self.digests), num_blocks):
            parent = self.digests[index - 1] if index else ROOT_DIGEST
            tokens = self.token_ids[index * block_tokens : (index + 1) * block_tokens]
            assert len(tokens) == block_tokens, "only full blocks have a hash"
            self.digests.append(hash_block(parent, tokens, self.extra_keys(index)))
        return self.digests[:num_blocks]
