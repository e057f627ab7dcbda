"""Dimensions of a decoder, its KV cache groups, and its division among tensor parallel ranks.

Tensor parallelism follows arXiv 1909.08053: each rank has an equal part of the query heads, MLP columns and
vocabulary, and of the KV heads, which are replicated if there are more ranks than KV heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model_server.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
KvGroupKind = Literal["full_attention", "sliding_window"]
# Groups are as long as the longest one if that pads the others by less than this share, as in vLLM.
_PADDING_MAX = 0.25


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Scaling of long wavelengths as in Llama 3.1."""

    factor: float  # scale of the longest wavelengths
    low_freq_factor: float  # wavelengths above original_context / this are fully scaled
    high_freq_factor: float  # wavelengths below original_context / this are unscaled
    original_context: int  # context length before scaling, in tokens


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN scaling of long wavelengths (arXiv 2309.00071, sections 3.2 and 3.3)."""

    factor: float  # scale of the longest wavelengths
    original_context: int  # context length before scaling, in tokens
    beta_fast: float  # pairs with more rotations than this in the original context are unscaled
    beta_slow: float  # pairs with fewer rotations than this are fully scaled
    truncate: bool  # whether the bounds between them are rounded outwards to whole pairs


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of one layer."""

    theta: float  # base of the wavelengths
    # Scaling for a longer context; a number is the scale of all wavelengths; None: unscaled.
    scaling: float | Llama3Scaling | YarnScaling | None = None
    magnitude: float = 1.0  # scale of rotated heads (YaRN, section 3.4)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Dimensions of a model's attention."""

    heads: int  # query heads
    kv_heads: int  # heads of keys and values; a divisor of `heads`
    head_dim: int  # elements of one head
    scale: float  # factor of scores before the softmax
    # Sliding window per layer in tokens, including the token itself; None: full attention.
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DecoderShape(AttentionShape):
    """Dimensions and options of a decoder. Defaults are those of Llama."""

    vocab_size: int  # token ids are below this
    hidden: int  # width of the residual stream
    intermediate: int  # width of the MLP
    max_positions: int  # context length in tokens
    norm_epsilon: float  # epsilon of RMS norms
    tied_embeddings: bool  # whether the output head shares the embedding weights
    ropes: tuple[Rope, ...]  # rotary embedding per layer
    qkv_bias: bool = False  # biases on the query, key and value projections
    output_bias: bool = False  # bias on the attention's output projection
    head_norms: bool = False  # RMS norms of each query and key head before rotation
    output_norms: bool = False  # RMS norms of the outputs of attention and MLP
    norm_offset: float = 0.0  # added to the weights of norms
    embedding_scale: float = 1.0  # factor of the embeddings
    activation: Activation = "silu"  # activation of the MLP's gate

    @property
    def layers(self) -> int:
        return len(self.windows)


@dataclass(frozen=True, slots=True)
class KvGroupSpec:
    """KV cache group: layers that share one block table.

    A block contains the KV of one group. The n-th layer of every group uses the n-th plane of the pool, so
    all groups allocate from one pool, and a block is as large as the longest group needs.
    """

    kind: KvGroupKind  # name in KV events
    # A token attends to itself and the `window_tokens - 1` tokens before it; None: to all. Blocks before the
    # window may be freed; their entries in the block table may then be any valid block.
    window_tokens: int | None
    layers: tuple[int, ...]  # layer indices, ascending


def kv_groups(windows: Sequence[int | None]) -> tuple[KvGroupSpec, ...]:
    """Divide layers by their sliding windows into groups of about equal length."""
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    lengths = [len(layers) for layers in layers_of.values()]
    length = max(lengths) if max(lengths) < (1 + _PADDING_MAX) * min(lengths) else min(lengths)
    groups = [
        _group(window, layers[start : start + length])
        for window, layers in layers_of.items()
        for start in range(0, len(layers), length)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers))


def pool_groups(windows: Sequence[int | None]) -> tuple[KvGroupSpec, ...]:
    """Return the KV cache groups of a model, given the sliding window of each layer.

    A model with sliding windows only is one full-attention group: prefix sharing, and readers of KV events,
    need a group whose blocks form the whole prefix.
    """
    groups = kv_groups(windows)
    return groups if any(group.window_tokens is None for group in groups) else single_group(len(windows))


def single_group(num_layers: int) -> tuple[KvGroupSpec, ...]:
    """Return one full-attention group of all layers."""
    return (_group(None, range(num_layers)),)


def _group(window: int | None, layers: Sequence[int]) -> KvGroupSpec:
    return KvGroupSpec("full_attention" if window is None else "sliding_window", window, tuple(layers))


@dataclass(frozen=True, slots=True)
class Shard:
    """Contiguous part of one tensor dimension."""

    first: int  # start index
    count: int  # length of the part
    whole: int  # length of the dimension

    @classmethod
    def all_of(cls, whole: int) -> "Shard":
        return cls(0, whole, whole)

    @property
    def is_all(self) -> bool:
        return self.count == self.whole

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.count)

    def times(self, width: int) -> "Shard":
        """Return the shard in elements, if each unit has `width` elements: rows of heads, for example."""
        return Shard(self.first * width, self.count * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class ModelRank:
    """Rank of one process in tensor parallelism, and the parts of the model that it computes."""

    rank: int = 0  # from 0
    size: int = 1  # number of ranks

    def heads(self, shape: DecoderShape) -> Shard:
        return self._even(shape.heads)

    def kv_heads(self, shape: DecoderShape) -> Shard:
        """Return the KV heads of this rank's query heads: one, replicated, if there are fewer than ranks."""
        whole = shape.kv_heads
        return Shard(self.rank * whole // self.size, max(1, whole // self.size), whole)

    def intermediate(self, shape: DecoderShape) -> Shard:
        return self._even(shape.intermediate)

    def vocabulary(self, shape: DecoderShape) -> Shard:
        """Return the token ids of this rank: `vocabulary_rows` of them, fewer or none on the last ranks."""
        first = min(self.rank * self.vocabulary_rows(shape), shape.vocab_size)
        return Shard(first, min(self.vocabulary_rows(shape), shape.vocab_size - first), shape.vocab_size)

    def vocabulary_rows(self, shape: DecoderShape) -> int:
        """Return the number of embedding rows per rank, including padding on the last ranks."""
        return -(-shape.vocab_size // self.size)

    def part_of(self, shape: DecoderShape) -> DecoderShape:
        """Return the dimensions of this rank's part of the model, with the full vocabulary size."""
        return replace(
            shape,
            heads=self.heads(shape).count,
            kv_heads=self.kv_heads(shape).count,
            intermediate=self.intermediate(shape).count,
        )

    def _even(self, whole: int) -> Shard:
        count = whole // self.size
        return Shard(self.rank * count, count, whole)


def check_divisible(shape: DecoderShape, size: int) -> None:
    """Check that a model can be divided among `size` ranks; raises a ConfigError that lists valid sizes."""
    if divides(shape, size):
        return
    good = [str(number) for number in range(1, shape.heads + 1) if divides(shape, number)]
    raise ConfigError(
        f"tensor_parallel_size is {size}, but the model's {shape.heads} query heads, {shape.kv_heads} KV "
        f"heads and MLP width {shape.intermediate} are not divisible by it; use one of {', '.join(good)}"
    )


def divides(shape: DecoderShape, size: int) -> bool:
    """Return whether a model can be divided among `size` ranks."""
    kv_heads = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv_heads and shape.heads % size == 0 and shape.intermediate % size == 0


def blocks_behind(window_tokens: int | None, block_tokens: int) -> int | None:
    """Return how many blocks before the end of a cached prefix a group needs to resume there; None: all."""
    # The next token attends to the `window_tokens - 1` tokens before it.
    return None if window_tokens is None else -(-(window_tokens - 1) // block_tokens)


def blocks_bound(groups: Sequence[KvGroupSpec], num_tokens: int, chunk_tokens: int, block_tokens: int) -> int:
    """Return the peak number of blocks of a request in all groups, with chunks of `chunk_tokens` per step."""
    blocks = -(-num_tokens // block_tokens)
    # Beyond the window: one block for its alignment, and a chunk that may start and end inside a block.
    rolling = 2 + -(-chunk_tokens // block_tokens)
    needs = [blocks_behind(group.window_tokens, block_tokens) for group in groups]
    return sum(blocks if need is None else min(blocks, need + rolling) for need in needs)
