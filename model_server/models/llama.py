"""The Llama decoder: grouped-query attention, RMS norms, rotary positions, gated MLP.

In: a flat batch of token ids with its attention metadata. Out: logits of the chosen rows. It owns the
weights, names them as Hugging Face checkpoints do, and knows neither requests nor blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention import AttentionMeta, SdpaAttention
from model_server.models.hf_config import HfConfig
from model_server.models.rope import Llama3Scaling, inverse_frequencies, rotate, rotation


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Dimensions and constants of a Llama model, from its config.json."""

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied_embeddings: bool

    @classmethod
    def from_hf(cls, config: HfConfig) -> "LlamaShape":
        """Read config.json, old keys and new.

        Raises:
            ModelError: A field is missing, of the wrong type, or asks for something unsupported.
        """
        _refuse_unsupported(config)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise config.error("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
        head_dim = config.integer("head_dim", max(hidden // heads, 1))
        if head_dim % 2:
            raise config.error("head_dim", head_dim, "even, for rotary positions")
        theta, scaling = _rope(config)
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden=hidden,
            layers=config.integer("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=config.integer("intermediate_size"),
            max_positions=config.integer("max_position_embeddings", 2048),
            norm_epsilon=config.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_embeddings=config.boolean("tie_word_embeddings", False),
        )


class _Layer:
    """The weights of one layer; projections that share an input are one matrix."""

    __slots__ = ("attention_norm", "attention_out", "gate_up", "mlp_down", "mlp_norm", "qkv")

    def __init__(self, shape: LlamaShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.attention_norm = empty(shape.hidden)
        self.qkv = empty((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden)
        self.attention_out = empty(shape.hidden, shape.heads * shape.head_dim)
        self.mlp_norm = empty(shape.hidden)
        self.gate_up = empty(2 * shape.intermediate, shape.hidden)
        self.mlp_down = empty(shape.hidden, shape.intermediate)


class LlamaModel:
    """A Llama decoder whose weights are yet to be written into `tensors()`."""

    def __init__(self, config: HfConfig, dtype: torch.dtype, device: torch.device) -> None:
        shape = LlamaShape.from_hf(config)
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._embedding = torch.empty((shape.vocab_size, shape.hidden), dtype=dtype, device=device)
        self._head = self._embedding if shape.tied_embeddings else torch.empty_like(self._embedding)
        self._norm = torch.empty(shape.hidden, dtype=dtype, device=device)
        self._layers = [_Layer(shape, dtype, device) for _ in range(shape.layers)]
        frequencies = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        self._frequencies = frequencies.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """Return all weights under their checkpoint names; write into them to load the model."""
        shape = self.shape
        head_rows = [count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        named = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not shape.tied_embeddings:
            named["lm_head.weight"] = self._head
        for index, layer in enumerate(self._layers):
            query, key, value = torch.split(layer.qkv, head_rows)
            gate, up = layer.gate_up.chunk(2)
            parts = {
                "input_layernorm": layer.attention_norm,
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "self_attn.o_proj": layer.attention_out,
                "post_attention_layernorm": layer.mlp_norm,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.mlp_down,
            }
            named |= {f"model.layers.{index}.{name}.weight": tensor for name, tensor in parts.items()}
        return named

    def forward(
        self, token_ids: Tensor, rows: Tensor, attention: SdpaAttention, meta: AttentionMeta
    ) -> Tensor:
        """Run the model over one step.

        Args:
            token_ids: int64 [tokens], all sequences one after the other.
            rows: int64, the tokens whose next one is wanted.
            attention: The KV pool.
            meta: Of this step.

        Returns:
            float32 logits [rows, vocab_size].
        """
        turn = rotation(meta.positions, self._frequencies, self.dtype)
        hidden = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            query, key, value = self._project(normed, layer, turn)
            attention.store(index, key, value, meta)
            attended = attention.attend(query, index, meta)
            hidden = hidden + functional.linear(attended, layer.attention_out)
            gate, up = functional.linear(self._rms_norm(hidden, layer.mlp_norm), layer.gate_up).chunk(
                2, dim=-1
            )
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.mlp_down)
        chosen = self._rms_norm(hidden.index_select(0, rows), self._norm)
        return functional.linear(chosen, self._head).float()

    def _project(
        self, hidden: Tensor, layer: _Layer, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values, each [tokens, heads, head_dim]."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        projected = functional.linear(hidden, layer.qkv).view(hidden.shape[0], -1, self.shape.head_dim)
        rotated = rotate(projected[:, : heads + kv_heads], *turn)
        return rotated[:, :heads], rotated[:, heads:], projected[:, heads + kv_heads :]

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.shape.norm_epsilon)


def _refuse_unsupported(config: HfConfig) -> None:
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.error("hidden_act", activation, "'silu'")
    for field in ("attention_bias", "mlp_bias"):
        if config.boolean(field, False):
            raise config.error(field, True, "false: biases are not supported")
    if config.has("sliding_window"):
        raise config.error(
            "sliding_window", config.integer("sliding_window"), "null: windows are not supported"
        )


def _rope(config: HfConfig) -> tuple[float, Llama3Scaling | None]:
    """Read theta and scaling from `rope_parameters` (transformers 5) or the older two top-level fields."""
    if config.has("rope_parameters"):
        rope = config.section("rope_parameters")
        theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    else:
        rope = config.section("rope_scaling")
        theta = config.number("rope_theta", 10000.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise rope.error("rope_type", kind, "'default' or 'llama3'")
    return theta, Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context=rope.integer("original_max_position_embeddings"),
    )
