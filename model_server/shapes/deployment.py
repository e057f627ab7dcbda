"""One model as it lies on its GPUs: bytes of weights and of KV, and what a step has to read and compute.

It counts by the engine's own groups, blocks and bounds.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from model_server.errors import ConfigError
from model_server.shapes import (
    DecoderShape,
    Division,
    KvGroupSpec,
    blocks_behind,
    blocks_bound,
    check_divisible,
    pool_groups,
)

# What is taken off each GPU for activations, the CUDA context and its libraries. 2 GB with nine tenths of the
# memory is what published sizings of 8-billion models on 80 GB come out with.
DEFAULT_UTILIZATION = 0.9
DEFAULT_RESERVE_BYTES = 2 * 10**9
_FP8_SCALE_BYTES = 4  # one float32 per block, head, and keys or values


@dataclass(frozen=True)
class Deployment:
    """A model and how it is served; a ConfigError where so many GPUs cannot share its heads."""

    shape: DecoderShape  # of the model
    weight_bytes: int = 2  # of one parameter
    # Whether the KV cache is in 8-bit floats; otherwise it is in the type of the weights.
    fp8_kv: bool = False
    tensor_parallel: int = 1  # GPUs that share each layer
    block_tokens: int = 16  # tokens in one KV block
    chunk_tokens: int = 2048  # most tokens of a prompt that one step computes

    def __post_init__(self) -> None:
        check_divisible(self.shape, self.tensor_parallel)

    @cached_property
    def parameters(self) -> int:
        return _parameters(self.shape)

    @cached_property
    def gpu_weights_bytes(self) -> int:
        division = Division(0, self.tensor_parallel)
        part = replace(division.part_of(self.shape), vocab_size=division.vocabulary_rows(self.shape))
        return _parameters(part) * self.weight_bytes

    @cached_property
    def groups(self) -> tuple[KvGroupSpec, ...]:
        """Layers that share a block table, as the engine divides them."""
        return pool_groups(self.shape.windows)

    @property
    def gpu_block_bytes(self) -> int:
        """Bytes of one KV block on each GPU: as many layers as the longest group has."""
        return max(len(group.layers) for group in self.groups) * self._gpu_layer_block_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes, on all GPUs together, that one more token of a long text takes."""
        growing = sum(group.window_tokens is None for group in self.groups)
        return growing * self.gpu_block_bytes * self.tensor_parallel / self.block_tokens

    def prefilling_blocks(self, tokens: int) -> int:
        """Return the most blocks that a text of this many tokens holds while it is computed."""
        return self._blocks(tokens, self.chunk_tokens)

    def decoding_blocks(self, tokens: int, groups: Sequence[KvGroupSpec] | None = None) -> int:
        """Return the most blocks that it holds, in all groups or some, while it grows token by token."""
        return self._blocks(tokens, 1, groups)

    def sequences(self, blocks: int, context_tokens: int) -> int:
        """Return how many sequences of a length a pool holds at once, one of them still in its prefill."""
        first = self.prefilling_blocks(context_tokens)
        return 0 if blocks < first else 1 + (blocks - first) // self.decoding_blocks(context_tokens)

    def pool_line(self, blocks: int, context_tokens: int) -> str:
        """Describe a pool of so many blocks in one line."""
        return (
            f"{blocks:,} blocks of {self.block_tokens} tokens, "
            f"{size_text(blocks * self.gpu_block_bytes * self.tensor_parallel)}, "
            f"{self.token_bytes:,.0f} bytes a token; "
            f"{self.sequences(blocks, context_tokens):,} sequences of {context_tokens:,} tokens at once"
        )

    def gpu_kv_read_bytes(self, context_tokens: int) -> float:
        """Return the bytes of KV that each GPU reads for one sequence's next token."""
        per_token = self._gpu_layer_block_bytes / self.block_tokens
        return per_token * sum(_seen(context_tokens, window) for window in self.shape.windows)

    def decode_flops(self, context_tokens: int) -> float:
        """Return the operations, on all GPUs together, of one sequence's next token."""
        seen = sum(_seen(context_tokens, window) for window in self.shape.windows)
        return 2.0 * self.parameters + self._flops_per_pair * seen

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations, on all GPUs together, of a prompt of which nothing is cached."""
        pairs = sum(_pairs(tokens, window) for window in self.shape.windows)
        return 2.0 * self.parameters * tokens + self._flops_per_pair * pairs

    @property
    def _flops_per_pair(self) -> float:
        # A product of a query with a key, and one of its weight with a value; 2 operations an element each.
        return 4.0 * self.shape.heads * self.shape.head_dim

    @property
    def _gpu_layer_block_bytes(self) -> int:
        heads = Division(0, self.tensor_parallel).kv_heads(self.shape).count
        elements = self.block_tokens * self.shape.head_dim
        head_bytes = elements + _FP8_SCALE_BYTES if self.fp8_kv else elements * self.weight_bytes
        return 2 * heads * head_bytes

    def _blocks(self, tokens: int, chunk_tokens: int, groups: Sequence[KvGroupSpec] | None = None) -> int:
        windows = [group.window_tokens for group in groups or self.groups]
        needs = [blocks_behind(window, self.block_tokens) for window in windows]
        return blocks_bound(needs, tokens, chunk_tokens, self.block_tokens)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of each GPU, and how much of it may be used."""

    memory_bytes: int  # all of it
    # Share of it for weights, reserve and KV; as vLLM's --gpu-memory-utilization.
    utilization: float = DEFAULT_UTILIZATION
    reserve_bytes: int = DEFAULT_RESERVE_BYTES  # what of that share is neither weights nor KV

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"gpu memory utilization is {self.utilization}; it must be above 0, at most 1")
        if not 0 <= self.reserve_bytes < self.usable_bytes:
            raise ConfigError(
                f"a reserve of {self.reserve_bytes / 1e9:.1f} GB does not leave any of the "
                f"{self.usable_bytes / 1e9:.1f} GB that may be used"
            )

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.utilization)


@dataclass(frozen=True, slots=True)
class Pool:
    """What is left for KV on each GPU."""

    deployment: Deployment
    budget: Budget

    @property
    def gpu_bytes(self) -> int:
        """Bytes for KV on each GPU; below 0 where the weights do not fit."""
        taken = self.budget.reserve_bytes + self.deployment.gpu_weights_bytes
        return self.budget.usable_bytes - taken

    @property
    def blocks(self) -> int:
        return max(0, self.gpu_bytes) // self.deployment.gpu_block_bytes

    @property
    def headroom(self) -> float:
        """Share of the memory for weights and KV that is left for KV; below 0 if the weights do not fit."""
        return self.gpu_bytes / (self.budget.usable_bytes - self.budget.reserve_bytes)

    def sequences(self, context_tokens: int) -> int:
        return self.deployment.sequences(self.blocks, context_tokens)

    def longest_context(self, limit: int) -> int:
        """Return how long a text fits when it is alone there, at most `limit` tokens."""
        return bisect_right(range(limit + 1), self.blocks, key=self.deployment.prefilling_blocks) - 1


def size_text(amount: float) -> str:
    """Return bytes as people read them."""
    return f"{amount / 1e9:,.2f} GB" if amount >= 1e8 else f"{amount / 1e6:,.2f} MB"


def _parameters(shape: DecoderShape) -> int:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.intermediate
    biases = shape.qkv_bias * (queries + 2 * keys) + shape.output_bias * shape.hidden
    norms = (4 if shape.output_norms else 2) * shape.hidden + shape.head_norms * 2 * shape.head_dim
    embeddings = (1 if shape.tied_embeddings else 2) * shape.vocab_size * shape.hidden
    return shape.layers * (projections + biases + norms) + embeddings + shape.hidden


def _seen(tokens: int, window: int | None) -> int:
    return tokens if window is None else min(tokens, window)


def _pairs(tokens: int, window: int | None) -> float:
    """Return how many (token, token it sees) pairs a prompt has."""
    seen = _seen(tokens, window)
    return seen * (seen + 1) / 2 + (tokens - seen) * seen
