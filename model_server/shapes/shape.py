"""What makes one decoder architecture differ from another, as plain numbers, and what one rank has of it.

Of several ranks (tensor parallelism, arXiv 1909.08053) each has as many query heads, MLP columns and tokens
of the vocabulary; KV heads too, or repeated where they are fewer than ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from model_server.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
KvGroupKind = Literal["full_attention", "sliding_window"]
# Groups as long as the longest one where that pads the others by less than this share; as vLLM groups.
_PADDING_MAX = 0.25


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All wavelengths stretched by one factor (position interpolation)."""

    factor: float  # by how much
    magnitude: float = 1.0  # by how much rotated heads grow


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of long wavelengths."""

    factor: float  # by how much the longest wavelengths are stretched
    low_freq_factor: float  # wavelengths above original context / this are stretched fully
    high_freq_factor: float  # wavelengths below original context / this are left alone
    original_context: int  # context length that the model was first trained with, in tokens
    magnitude: float = 1.0  # by how much rotated heads grow


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, sections 3.2 to 3.4): long wavelengths stretched, attention sharpened."""

    theta: float  # base of the wavelengths
    factor: float  # by how much the longest wavelengths are stretched
    original_context: int  # context length that the model was first trained with, in tokens
    beta_fast: float  # pairs that turn more often than this within the original context are left alone
    beta_slow: float  # pairs that turn less often than this are stretched fully
    truncate: bool  # whether the borders between them are rounded outwards to whole pairs
    magnitude: float  # by how much rotated heads grow


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one layer."""

    theta: float  # base of the wavelengths
    scaling: Scaling | None = None  # how they are stretched for a longer context; None leaves them

    @property
    def magnitude(self) -> float:
        return 1.0 if self.scaling is None else self.scaling.magnitude


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention must know about a model."""

    heads: int  # query heads
    kv_heads: int  # heads of keys and values; a divisor of `heads`
    head_dim: int  # elements of one head
    scale: float  # factor of the scores before the softmax
    # Per layer, how many tokens a token sees, itself included; None is all before it.
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Dimensions and options of a decoder; the defaults are Llama's."""

    vocab_size: int  # token ids are below this
    hidden: int  # width of the residual stream
    heads: int  # query heads
    kv_heads: int  # heads of keys and values
    head_dim: int  # elements of one head
    intermediate: int  # width of the MLP
    max_positions: int  # longest text it was made for, in tokens
    norm_epsilon: float  # added to the mean square in norms
    tied_embeddings: bool  # whether the output head is the embedding
    # Per layer, how many tokens a token sees, itself included; None is all before it.
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]  # rotary positions of each layer
    attention_scale: float  # factor of the scores before the softmax
    qkv_bias: bool = False  # biases on the query, key and value projections
    output_bias: bool = False  # A bias on the attention's output projection
    head_norms: bool = False  # RMS norms of each query and key head before rotation
    output_norms: bool = False  # RMS norms of what attention and MLP add to the residual stream
    norm_offset: float = 0.0  # added to the weights of norms
    embedding_scale: float = 1.0  # factor of the embeddings
    activation: Activation = "silu"  # of the MLP's gate

    @property
    def layers(self) -> int:
        return len(self.windows)

    @property
    def attention(self) -> AttentionShape:
        """What the KV pool and its attention must know."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.attention_scale, self.windows)


@dataclass(frozen=True, slots=True)
class KvGroupSpec:
    """Layers that read one block table.

    A block holds the KV of one group only: the n-th layer of every group lies in the n-th plane of the pool,
    so all groups draw blocks from one pool and a block is as large as the longest group.
    """

    kind: KvGroupKind  # as KV events name it
    # A token attends to itself and the `window_tokens - 1` before it; None is all. Whatever lies further back
    # is never read again: its block may be freed, and its entry in the table may then be any valid block.
    window_tokens: int | None
    layers: tuple[int, ...]  # indices of the layers, rising


def kv_groups(windows: Sequence[int | None]) -> tuple[KvGroupSpec, ...]:
    """Divide layers, by their windows in tokens, into groups of about equal length, in their order."""
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
    """Return the groups that the engine keeps for a model, by the attention window of each layer.

    A model of windows alone keeps everything: where prompts part is told by full attention only, and readers
    of the events can place blocks of a window by those of full attention only.
    """
    groups = kv_groups(windows)
    return groups if any(group.window_tokens is None for group in groups) else undivided(len(windows))


def undivided(num_layers: int) -> tuple[KvGroupSpec, ...]:
    """Return one group of all layers: every layer keeps the whole sequence, whatever its window."""
    return (_group(None, range(num_layers)),)


def _group(window: int | None, layers: Sequence[int]) -> KvGroupSpec:
    return KvGroupSpec("full_attention" if window is None else "sliding_window", window, tuple(layers))


@dataclass(frozen=True, slots=True)
class Share:
    """A contiguous part of one dimension."""

    first: int  # where it begins
    count: int  # how long it is
    whole: int  # how long the dimension is

    @classmethod
    def all_of(cls, whole: int) -> "Share":
        return cls(0, whole, whole)

    @property
    def is_all(self) -> bool:
        return self.count == self.whole

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.count)

    def times(self, width: int) -> "Share":
        """Return the share in units of which each of these has `width`."""
        return Share(self.first * width, self.count * width, self.whole * width)


@dataclass(frozen=True, slots=True)
class Division:
    """One rank of several."""

    rank: int = 0  # from 0
    size: int = 1  # how many there are

    def heads(self, shape: DecoderShape) -> Share:
        return self._even(shape.heads)

    def kv_heads(self, shape: DecoderShape) -> Share:
        """Return the KV heads that its query heads read; with fewer heads than ranks, one of them."""
        whole = shape.kv_heads
        return Share(self.rank * whole // self.size, max(1, whole // self.size), whole)

    def intermediate(self, shape: DecoderShape) -> Share:
        return self._even(shape.intermediate)

    def vocabulary(self, shape: DecoderShape) -> Share:
        """Return its tokens: as many as `vocabulary_rows`, the last ranks' fewer or none."""
        first = min(self.rank * self.vocabulary_rows(shape), shape.vocab_size)
        return Share(first, min(self.vocabulary_rows(shape), shape.vocab_size - first), shape.vocab_size)

    def vocabulary_rows(self, shape: DecoderShape) -> int:
        """Return how many rows of the embedding each rank has room for, the same for all."""
        return -(-shape.vocab_size // self.size)

    def part_of(self, shape: DecoderShape) -> DecoderShape:
        """Return the shape of what the rank computes; its vocabulary is the whole one still."""
        return replace(
            shape,
            heads=self.heads(shape).count,
            kv_heads=self.kv_heads(shape).count,
            intermediate=self.intermediate(shape).count,
        )

    def _even(self, whole: int) -> Share:
        count = whole // self.size
        return Share(self.rank * count, count, whole)


def check_divisible(shape: DecoderShape, size: int) -> None:
    """Refuse a number of ranks that a model cannot be divided by; the ConfigError names those that do."""
    if divides(shape, size):
        return
    good = [str(number) for number in range(1, shape.heads + 1) if divides(shape, number)]
    raise ConfigError(
        f"tensor_parallel_size is {size}, but the model's {shape.heads} query heads, {shape.kv_heads} KV "
        f"heads and MLP of width {shape.intermediate} cannot be divided by it; use one of {', '.join(good)}"
    )


def divides(shape: DecoderShape, size: int) -> bool:
    """Tell whether a model can be divided among so many ranks."""
    kv_heads = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return kv_heads and shape.heads % size == 0 and shape.intermediate % size == 0


def blocks_behind(window_tokens: int | None, block_tokens: int) -> int | None:
    """Return how many blocks in front of a prefix's end a group needs to resume there; None for all.

    The next token sees the `window_tokens - 1` before it.
    """
    return None if window_tokens is None else -(-(window_tokens - 1) // block_tokens)


def blocks_bound(needs: Sequence[int | None], num_tokens: int, chunk_tokens: int, block_tokens: int) -> int:
    """Return the most blocks of all groups together that a request holds at any time, computed in chunks.

    `needs` are, per group, what `blocks_behind` tells.
    """
    blocks = -(-num_tokens // block_tokens)
    # The window, what alignment keeps in front of it, and a chunk that begins and ends within a block.
    rolling = 2 + -(-chunk_tokens // block_tokens)
    return sum(blocks if need is None else min(blocks, need + rolling) for need in needs)
