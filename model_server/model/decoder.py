"""Decoder of all architectures: attention with rotary positions, RMS norms, gated MLP.

Weights have the names of Hugging Face checkpoints. Projections of the same input are fused into one matrix.
With tensor parallelism a rank has some heads of every layer, some columns of the MLP and some rows of the
vocabulary; the outputs of "output" and "down" projections are summed over all ranks.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from model_server.attention import Attention, StepMeta
from model_server.attention.heads import HeadNorms, Rotation, rms_norm
from model_server.model.fused_ops import TORCH_OPS
from model_server.model.lora import LoraBatch
from model_server.model.ranks import Ranks
from model_server.shapes.shape import DecoderShape, Llama3Scaling, ModelRank, Rope, Shard, YarnScaling

# Number of rows that packing optimizes for. Any number of rows works, but after packing for few rows, oneDNN
# would compute a single row by another kernel, which rounds differently.
_PACKED_FOR_ROWS = 2048


class Linear:
    """Linear projection; the bias is passed with each call."""

    __slots__ = ("_packed", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [outputs, inputs]; empty once packed
        self._packed: Tensor | None = None

    def __call__(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return inputs @ weight.T + bias, [rows, outputs]."""
        if self._packed is None:
            return functional.linear(inputs, self.weight, bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")
        return output

    def pack(self) -> None:
        """Replace the weight by a copy in oneDNN's memory layout, if the CPU supports it.

        Otherwise oneDNN reorders the weight in every call, which for 8 rows takes as long as the product.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16 and can_pack():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)
            self.weight = self.weight.new_empty(0)


@cache
def can_pack() -> bool:
    """Return whether packing works, by a trial: the operators are not part of torch's public API."""
    inputs, weight = torch.ones((1, 8), dtype=torch.bfloat16), torch.ones((8, 8), dtype=torch.bfloat16)
    trial = Linear(weight)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        trial._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        return torch.equal(trial(inputs), functional.linear(inputs, weight))  # sums of ones are exact
    except (AttributeError, RuntimeError):
        return False


@dataclass(frozen=True, slots=True)
class Weight:
    """Destination of a checkpoint tensor, or of this rank's shard of it."""

    tensor: Tensor  # memory of the shard
    shards: tuple[Shard, ...]  # shard per dimension of the checkpoint tensor

    @classmethod
    def all_of(cls, tensor: Tensor) -> "Weight":
        return cls(tensor, tuple(Shard.all_of(length) for length in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        return tuple(shard.whole for shard in self.shards)

    def write(self, whole: Tensor) -> None:
        self.tensor.copy_(whole[tuple(shard.span for shard in self.shards)])


@dataclass(frozen=True, slots=True)
class ProjectionPart:
    """Projection of the checkpoint as a part of a fused projection."""

    projection: str  # name of the fused projection
    first_row: int  # first row in the fused projection
    rows: Shard  # this rank's rows of the checkpoint tensor
    inputs: Shard  # this rank's columns of the checkpoint tensor


class DecoderLayer:
    """Weights of one decoder layer. Norms that the shape does not have are unused."""

    def __init__(
        self, shape: DecoderShape, model_rank: ModelRank, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._shape = shape
        self._parts = projection_parts(shape, model_rank)
        own = model_rank.part_of(shape)
        query_rows = own.heads * own.head_dim
        qkv_rows = query_rows + 2 * own.kv_heads * own.head_dim

        def linear(outputs: int, inputs: int, *, bias: bool = False) -> tuple[Linear, Tensor | None]:
            return Linear(empty(outputs, inputs)), empty(outputs) if bias else None

        # Projections "qkv", "output", "gate_up" and "down", each with its bias or None.
        self.projections: dict[str, tuple[Linear, Tensor | None]] = {
            "qkv": linear(qkv_rows, shape.hidden, bias=shape.qkv_bias),
            "output": linear(shape.hidden, query_rows, bias=shape.output_bias),
            "gate_up": linear(2 * own.intermediate, shape.hidden),
            "down": linear(shape.hidden, own.intermediate),
        }
        self.input_norm, self.mlp_input_norm = empty(shape.hidden), empty(shape.hidden)
        # Norms of the outputs of attention and MLP, if the shape has output norms.
        self.attention_norm, self.mlp_norm = empty(shape.hidden), empty(shape.hidden)
        self.head_norms: HeadNorms | None = None
        if shape.head_norms:
            self.head_norms = HeadNorms(empty(2, shape.head_dim), shape.norm_epsilon, shape.norm_offset)

    def weights(self) -> dict[str, Weight]:
        """Return the layer's weights by checkpoint name."""
        norms = {"input_layernorm": self.input_norm}
        if self._shape.output_norms:
            # With output norms, the name of Llama's MLP input norm belongs to the attention output norm.
            norms["post_attention_layernorm"] = self.attention_norm
            norms["pre_feedforward_layernorm"] = self.mlp_input_norm
            norms["post_feedforward_layernorm"] = self.mlp_norm
        else:
            norms["post_attention_layernorm"] = self.mlp_input_norm
        if self.head_norms is not None:
            norms["self_attn.q_norm"], norms["self_attn.k_norm"] = self.head_norms.weights
        named = {f"{name}.weight": Weight.all_of(norm) for name, norm in norms.items()}
        for name, part in self._parts.items():
            linear, bias = self.projections[part.projection]
            rows = slice(part.first_row, part.first_row + part.rows.count)
            named[f"{name}.weight"] = Weight(linear.weight[rows], (part.rows, part.inputs))
            if bias is not None:
                named[f"{name}.bias"] = Weight(bias[rows], (part.rows,))
        return named


def projection_parts(shape: DecoderShape, model_rank: ModelRank) -> dict[str, ProjectionPart]:
    """Return this rank's parts of the fused projections by checkpoint name."""
    query = model_rank.heads(shape).times(shape.head_dim)
    key = model_rank.kv_heads(shape).times(shape.head_dim)
    width = model_rank.intermediate(shape)
    hidden = Shard.all_of(shape.hidden)
    return {
        "self_attn.q_proj": ProjectionPart("qkv", 0, query, hidden),
        "self_attn.k_proj": ProjectionPart("qkv", query.count, key, hidden),
        "self_attn.v_proj": ProjectionPart("qkv", query.count + key.count, key, hidden),
        "self_attn.o_proj": ProjectionPart("output", 0, hidden, query),
        "mlp.gate_proj": ProjectionPart("gate_up", 0, width, hidden),
        "mlp.up_proj": ProjectionPart("gate_up", width.count, width, hidden),
        "mlp.down_proj": ProjectionPart("down", 0, hidden, width),
    }


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the rotation angle per position, float32 [head_dim / 2], in radians."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope.scaling:
        case float(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            keep = _llama3_keep(plain, scaling)
        case YarnScaling() as scaling:
            keep = _yarn_keep(len(plain), scaling, rope.theta)
        case None:
            return plain
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / scaling.factor


def _llama3_keep(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Return how much of each frequency to keep: 1 keeps it, 0 divides it by the factor."""
    turns = scaling.original_context * plain / (2 * math.pi)  # full rotations within the original context
    return (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)


def _yarn_keep(pairs: int, scaling: YarnScaling, theta: float) -> Tensor:
    """Return how much of each frequency to keep, as `_llama3_keep`."""

    def pair_of(turns: float) -> float:
        """Return the (fractional) pair index with this many rotations in the original context."""
        return pairs * math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    return 1.0 - (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)


class Decoder:
    """Decoder model. After construction its weights must be written into `weights()`."""

    def __init__(
        self, shape: DecoderShape, dtype: torch.dtype, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self._ranks = Ranks() if ranks is None else ranks
        model_rank = self._ranks.model_rank
        self.shape = model_rank.part_of(shape)  # this rank's part
        self.dtype = dtype
        self.device = device
        self._vocabulary = model_rank.vocabulary(shape)
        # The vocabulary is divided too, although that costs one more all-reduce per step: with many ranks and
        # few tokens, reading the output head dominates a step. Padding rows give all ranks equal parts.
        vocabulary_rows = model_rank.vocabulary_rows(shape)
        self._embedding = torch.zeros((vocabulary_rows, shape.hidden), dtype=dtype, device=device)
        self._head = Linear(self._embedding if shape.tied_embeddings else torch.zeros_like(self._embedding))
        self._norm = torch.empty(shape.hidden, dtype=dtype, device=device)
        self._layers = [DecoderLayer(shape, model_rank, dtype, device) for _ in range(shape.layers)]
        self._frequencies = {rope: frequencies(rope, shape.head_dim).to(device) for rope in set(shape.ropes)}
        self._embedding_scale = torch.tensor(shape.embedding_scale, dtype=dtype).item()
        self.ops = TORCH_OPS
        # Projections of each layer by checkpoint name; adapters may change these.
        self.projection_parts = projection_parts(shape, model_rank)

    def weights(self) -> dict[str, Weight]:
        """Return all weights by checkpoint name; write into them to load the model."""
        vocabulary, hidden = self._vocabulary, Shard.all_of(self.shape.hidden)
        named = {
            "model.embed_tokens.weight": Weight(self._embedding[: vocabulary.count], (vocabulary, hidden)),
            "model.norm.weight": Weight.all_of(self._norm),
        }
        if not self.shape.tied_embeddings:
            named["lm_head.weight"] = Weight(self._head.weight[: vocabulary.count], (vocabulary, hidden))
        for index, layer in enumerate(self._layers):
            named |= {f"model.layers.{index}.{name}": weight for name, weight in layer.weights().items()}
        return named

    def pack(self) -> None:
        """Pack all projections after loading. `weights()` must not be written afterwards."""
        for layer in self._layers:
            for linear, _ in layer.projections.values():
                linear.pack()
        if not self.shape.tied_embeddings:  # tied weights would be stored twice
            self._head.pack()

    def forward(
        self,
        token_ids: Tensor,
        rows: Tensor,
        attention: Attention,
        meta: StepMeta,
        lora: LoraBatch | None = None,
    ) -> Tensor:
        """Run the model for one step.

        Args:
            token_ids: int64 [tokens], the tokens of all sequences, concatenated.
            rows: int64 [rows], indices of the tokens for which logits are computed.
            attention: KV pool, which receives the tokens' keys and values.
            meta: Layout of the step, from `attention.prepare`.
            lora: Adapters of the rows; None if no row has one.

        Returns:
            float32 logits [rows, vocab_size]; valid on rank 0 only.
        """
        rotations = {
            rope: Rotation.of(meta.positions, frequencies, rope.magnitude, self.dtype)
            for rope, frequencies in self._frequencies.items()
        }
        hidden = self._embed(token_ids)
        normed = self._rms_norm(hidden, self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            attended = self._attend(normed, index, rotations, attention, meta, lora)
            is_last = index == len(self._layers) - 1
            if is_last:  # other rows are not needed after the last attention
                hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
                lora = None if lora is None else lora.sampled
            added = self._project(attended, index, "output", lora)
            if self.shape.output_norms:
                added = self._rms_norm(added, layer.attention_norm)
            hidden, normed = self._add_rms_norm(hidden, added, layer.mlp_input_norm)
            gate_up = self._project(normed, index, "gate_up", lora)
            added = self._project(self.ops.gate(gate_up, self.shape.activation), index, "down", lora)
            if self.shape.output_norms:
                added = self._rms_norm(added, layer.mlp_norm)
            norm = self._norm if is_last else self._layers[index + 1].input_norm
            hidden, normed = self._add_rms_norm(hidden, added, norm)
        own = self._head(normed)
        return self._ranks.gather_columns(own)[:, : self.shape.vocab_size].float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, [tokens, hidden]. Each token id belongs to one rank."""
        vocabulary = self._vocabulary
        if vocabulary.is_all:
            hidden = functional.embedding(token_ids, self._embedding)
        else:
            own = token_ids - vocabulary.first
            foreign = (own < 0) | (own >= vocabulary.count)
            hidden = functional.embedding(own.masked_fill(foreign, 0), self._embedding)
            hidden = self._ranks.sum(hidden.masked_fill(foreign[:, None], 0.0))
        return hidden if self._embedding_scale == 1.0 else hidden * self._embedding_scale

    def _attend(
        self,
        normed: Tensor,
        index: int,
        rotations: dict[Rope, Rotation],
        attention: Attention,
        meta: StepMeta,
        lora: LoraBatch | None,
    ) -> Tensor:
        """Return the attention output of a layer before its output projection, [tokens, heads * head_dim]."""
        projected = self._project(normed, index, "qkv", lora).view(len(normed), -1, self.shape.head_dim)
        rotation, norms = rotations[self.shape.ropes[index]], self._layers[index].head_norms
        query = attention.rotate_and_store(index, projected, rotation, norms, meta)
        return attention.attend(query, index, meta)

    def _project(self, inputs: Tensor, index: int, name: str, lora: LoraBatch | None) -> Tensor:
        """Project inputs; the results of "output" and "down" are summed over all ranks."""
        linear, bias = self._layers[index].projections[name]
        is_summed = name in ("output", "down")
        output = linear(inputs, None if is_summed else bias)
        if lora is not None:
            lora.add(output, inputs, index, name)
        if is_summed:
            output = self._ranks.sum(output)
        return output + bias if is_summed and bias is not None else output

    def _rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight, self.shape.norm_epsilon, self.shape.norm_offset)

    def _add_rms_norm(self, hidden: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.ops.add_rms_norm(hidden, added, weight, self.shape.norm_epsilon, self.shape.norm_offset)
