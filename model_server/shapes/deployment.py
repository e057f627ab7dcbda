"""Memory and work of a model on its GPUs: bytes of weights and KV, bytes read and operations per token.

KV is counted in the engine's cache groups and blocks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from model_server.config import DType, KvCacheDType
from model_server.errors import ConfigError
from model_server.shapes.architectures import decoder_shape
from model_server.shapes.hf_config import DTYPE_BYTES, HfConfig, computed_dtype
from model_server.shapes.shape import (
    DecoderShape,
    KvGroupSpec,
    ModelRank,
    blocks_bound,
    check_divisible,
    pool_groups,
)

# Reserve per GPU for activations, the CUDA context and its libraries. 2 GB at a utilization of 0.9 matches
# published sizings of 8-billion-parameter models on 80 GB.
DEFAULT_UTILIZATION = 0.9
DEFAULT_RESERVE_BYTES = 2 * 10**9
_FP8_SCALE_BYTES = 4  # one float32 scale per block and head, for keys and for values


@dataclass(frozen=True)
class Deployment:
    """Model with its serving settings; raises a ConfigError for an unsupported tensor parallel size."""

    shape: DecoderShape
    weight_bytes: int = 2  # bytes of one parameter
    fp8_kv: bool = False  # 8-bit KV; False: the type of the weights
    tensor_parallel: int = 1  # number of GPUs
    block_tokens: int = 16  # tokens per KV block
    chunk_tokens: int = 2048  # maximum of prompt tokens per step

    def __post_init__(self) -> None:
        check_divisible(self.shape, self.tensor_parallel)

    @classmethod
    def of(cls, model: HfConfig, dtype: DType, kv_cache_dtype: KvCacheDType, **settings: int) -> "Deployment":
        """Return the deployment of a config.json with the types of flags, or raise a ModelError."""
        weight_bytes = DTYPE_BYTES[computed_dtype(model, dtype)]
        return cls(decoder_shape(model), weight_bytes, kv_cache_dtype == "fp8", **settings)

    @cached_property
    def parameters(self) -> int:
        return _parameters(self.shape)

    @cached_property
    def gpu_weights_bytes(self) -> int:
        model_rank = ModelRank(0, self.tensor_parallel)
        part = replace(model_rank.part_of(self.shape), vocab_size=model_rank.vocabulary_rows(self.shape))
        return _parameters(part) * self.weight_bytes

    @property
    def gpu_read_weights_bytes(self) -> int:
        """Bytes of weights that a step reads on each GPU: of an untied input embedding only single rows."""
        rows = ModelRank(0, self.tensor_parallel).vocabulary_rows(self.shape)
        return self.gpu_weights_bytes - self._looked_up(rows) * self.weight_bytes

    @cached_property
    def groups(self) -> tuple[KvGroupSpec, ...]:
        """KV cache groups: layers that share a block table, as in the engine."""
        return pool_groups(self.shape.windows)

    @property
    def gpu_block_bytes(self) -> int:
        """Bytes of one KV block per GPU, which has room for the layers of the longest group."""
        return max(len(group.layers) for group in self.groups) * self._gpu_layer_block_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of KV that one further token of a long sequence needs, on all GPUs together."""
        growing = sum(group.window_tokens is None for group in self.groups)
        return growing * self.gpu_block_bytes * self.tensor_parallel / self.block_tokens

    def prefilling_blocks(self, tokens: int) -> int:
        """Return the peak number of blocks of a sequence of `tokens` tokens during its prefill."""
        return blocks_bound(self.groups, tokens, self.chunk_tokens, self.block_tokens)

    def decoding_blocks(self, tokens: int, groups: Sequence[KvGroupSpec] | None = None) -> int:
        """Return the peak number of blocks of a sequence during decoding, in all or the given groups."""
        return blocks_bound(groups or self.groups, tokens, 1, self.block_tokens)

    def longest_context(self, blocks: int, limit: int) -> int:
        """Return the tokens of the longest single sequence that fits into a pool, at most `limit`."""
        return bisect_right(range(limit + 1), blocks, key=self.prefilling_blocks) - 1

    def sequences(self, blocks: int, context_tokens: int) -> int:
        """Return how many sequences fit into a pool, with one of them in its prefill."""
        first = self.prefilling_blocks(context_tokens)
        return 0 if blocks < first else 1 + (blocks - first) // self.decoding_blocks(context_tokens)

    def pool_line(self, blocks: int, context_tokens: int) -> str:
        """Return a one-line description of a pool of `blocks` blocks."""
        return (
            f"{blocks:,} blocks of {self.block_tokens} tokens, "
            f"{size_text(blocks * self.gpu_block_bytes * self.tensor_parallel)}, "
            f"{self.token_bytes:,.0f} bytes per token; "
            f"{self.sequences(blocks, context_tokens):,} concurrent sequences of {context_tokens:,} tokens"
        )

    def gpu_kv_read_bytes(self, context_tokens: int) -> float:
        """Return the bytes of KV that each GPU reads to decode one token of a sequence."""
        return self._gpu_layer_block_bytes / self.block_tokens * sum(self._attended(context_tokens))

    def decode_flops(self, context_tokens: int) -> float:
        """Return the operations to decode one token of a sequence, on all GPUs together."""
        return 2.0 * self._multiplied + self._flops_per_pair * sum(self._attended(context_tokens))

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations to prefill an uncached prompt, on all GPUs together."""
        # The first tokens attend to all before them, the others to a whole window.
        pairs = sum(many * (many + 1) / 2 + (tokens - many) * many for many in self._attended(tokens))
        return 2.0 * self._multiplied * tokens + self._flops_per_pair * pairs

    def _attended(self, tokens: int) -> list[int]:
        """Return, per layer, the number of tokens that the last of `tokens` tokens attends to."""
        return [tokens if window is None else min(tokens, window) for window in self.shape.windows]

    @property
    def _multiplied(self) -> int:
        """Parameters that a token is multiplied by."""
        return self.parameters - self._looked_up(self.shape.vocab_size)

    def _looked_up(self, rows: int) -> int:
        """Return the parameters in rows of an input embedding that is not the output matrix, too."""
        return 0 if self.shape.tied_embeddings else rows * self.shape.hidden

    @property
    def _flops_per_pair(self) -> float:
        # Query times key, and weight times value: 2 operations per element each.
        return 4.0 * self.shape.heads * self.shape.head_dim

    @property
    def _gpu_layer_block_bytes(self) -> int:
        heads = ModelRank(0, self.tensor_parallel).kv_heads(self.shape).count
        elements = self.block_tokens * self.shape.head_dim
        head_bytes = elements + _FP8_SCALE_BYTES if self.fp8_kv else elements * self.weight_bytes
        return 2 * heads * head_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of each GPU, and its usable share."""

    memory_bytes: int  # total memory
    # Shard of it for weights, reserve and KV; as vLLM's --gpu-memory-utilization.
    utilization: float = DEFAULT_UTILIZATION
    reserve_bytes: int = DEFAULT_RESERVE_BYTES  # part of the usable memory for neither weights nor KV

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"gpu memory utilization is {self.utilization}; it must be above 0, at most 1")
        if not 0 <= self.reserve_bytes < self.usable_bytes:
            raise ConfigError(
                f"a reserve of {self.reserve_bytes / 1e9:.1f} GB leaves nothing of the "
                f"{self.usable_bytes / 1e9:.1f} GB of usable memory"
            )

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.utilization)


@dataclass(frozen=True, slots=True)
class Pool:
    """KV cache memory of each GPU: its usable memory without weights and reserve."""

    deployment: Deployment
    budget: Budget

    @property
    def gpu_bytes(self) -> int:
        """Bytes for KV per GPU; negative if the weights do not fit."""
        taken = self.budget.reserve_bytes + self.deployment.gpu_weights_bytes
        return self.budget.usable_bytes - taken

    @property
    def blocks(self) -> int:
        return max(0, self.gpu_bytes) // self.deployment.gpu_block_bytes

    @property
    def headroom(self) -> float:
        """Shard of the memory for weights and KV that is left for KV; below 0 if the weights do not fit."""
        return self.gpu_bytes / (self.budget.usable_bytes - self.budget.reserve_bytes)

    def sequences(self, context_tokens: int) -> int:
        return self.deployment.sequences(self.blocks, context_tokens)

    def longest_context(self, limit: int) -> int:
        return self.deployment.longest_context(self.blocks, limit)


def size_text(amount: float) -> str:
    """Return bytes as text in GB or MB."""
    return f"{amount / 1e9:,.2f} GB" if amount >= 1e8 else f"{amount / 1e6:,.2f} MB"


def _parameters(shape: DecoderShape) -> int:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    projections = shape.hidden * (2 * queries + 2 * keys) + 3 * shape.hidden * shape.intermediate
    biases = shape.qkv_bias * (queries + 2 * keys) + shape.output_bias * shape.hidden
    norms = (4 if shape.output_norms else 2) * shape.hidden + shape.head_norms * 2 * shape.head_dim
    embeddings = (1 if shape.tied_embeddings else 2) * shape.vocab_size * shape.hidden
    return shape.layers * (projections + biases + norms) + embeddings + shape.hidden
