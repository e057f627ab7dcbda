"""What makes one decoder architecture differ from another, as plain numbers and switches.

Read from config.json by `architectures`, computed by the decoder; it knows neither files nor tensors.
"""

from dataclasses import dataclass
from typing import Literal

from model_server.shapes.rope import Rope

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention must know about a model.

    Attributes:
        heads: Query heads.
        kv_heads: Heads of keys and values; a divisor of `heads`.
        head_dim: Elements of one head.
        scale: Factor of the scores before the softmax.
        windows: Per layer, how many tokens a token sees, itself included; None is all before it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Dimensions and options of a decoder; the defaults are Llama's.

    Attributes:
        vocab_size: Token ids are below this.
        hidden: Width of the residual stream.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Elements of one head.
        intermediate: Width of the MLP.
        max_positions: Longest text it was made for, in tokens.
        norm_epsilon: Added to the mean square in norms.
        tied_embeddings: Whether the output head is the embedding.
        windows: Per layer, how many tokens a token sees, itself included; None is all before it.
        ropes: Rotary positions of each layer.
        attention_scale: Factor of the scores before the softmax.
        qkv_bias: Biases on the query, key and value projections.
        output_bias: A bias on the attention's output projection.
        head_norms: RMS norms of each query and key head before rotation.
        output_norms: RMS norms of what attention and MLP add to the residual stream.
        norm_offset: Added to the weights of norms.
        embedding_scale: Factor of the embeddings.
        activation: Of the MLP's gate.
    """

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    norm_epsilon: float
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    output_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    activation: Activation = "silu"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.windows)

    @property
    def attention(self) -> AttentionShape:
        """What the KV pool and its attention must know."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.attention_scale, self.windows)
