"""The weights of one decoder layer; projections that share an input are one matrix.

In: a shape and which part of it is computed here. Out: empty tensors, under their checkpoint names and under
the model's own. It computes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.models.linear import Linear
from model_server.shapes import DecoderShape, Division, Share


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the checkpoint, or the part of it that is kept here."""

    tensor: Tensor  # what is kept
    shares: tuple[Share, ...]  # per dimension of the checkpoint's tensor, which part that is

    @classmethod
    def all_of(cls, tensor: Tensor) -> "Weight":
        """Return a tensor that is kept whole."""
        return cls(tensor, tuple(Share.all_of(length) for length in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(share.whole for share in self.shares)

    def write(self, whole: Tensor) -> None:
        """Keep the part of the checkpoint's tensor."""
        self.tensor.copy_(whole[tuple(share.span for share in self.shares)])


@dataclass(frozen=True, slots=True)
class ProjectionPart:
    """A projection of the checkpoint, and its place in one of the model's own."""

    projection: str  # name of the model's projection
    first_row: int  # where the part's rows begin there
    rows: Share  # those of the checkpoint's rows that are kept
    inputs: Share  # those of its columns


class DecoderLayer:
    """One layer.

    Attributes:
        projections: "qkv", "output", "gate_up" and "down", with their biases or None.
        input_norm: Before attention.
        mlp_input_norm: Before the MLP.
        attention_norm: Of what attention adds, if the shape has output norms.
        mlp_norm: Of what the MLP adds, likewise.
        query_norm: Of each query head, if the shape has head norms.
        key_norm: Of each key head, likewise.
    """

    __slots__ = (
        "_parts",
        "_shape",
        "attention_norm",
        "input_norm",
        "key_norm",
        "mlp_input_norm",
        "mlp_norm",
        "projections",
        "query_norm",
    )

    def __init__(
        self, shape: DecoderShape, division: Division, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._shape = shape
        self._parts = projection_parts(shape, division)
        own = division.part_of(shape)
        query_rows = own.heads * own.head_dim
        qkv_rows = query_rows + 2 * own.kv_heads * own.head_dim

        def linear(outputs: int, inputs: int, *, bias: bool = False) -> tuple[Linear, Tensor | None]:
            return Linear(empty(outputs, inputs)), empty(outputs) if bias else None

        self.projections: dict[str, tuple[Linear, Tensor | None]] = {
            "qkv": linear(qkv_rows, shape.hidden, bias=shape.qkv_bias),
            "output": linear(shape.hidden, query_rows, bias=shape.output_bias),
            "gate_up": linear(2 * own.intermediate, shape.hidden),
            "down": linear(shape.hidden, own.intermediate),
        }
        self.input_norm, self.mlp_input_norm = empty(shape.hidden), empty(shape.hidden)
        self.attention_norm, self.mlp_norm = empty(shape.hidden), empty(shape.hidden)
        self.query_norm, self.key_norm = empty(shape.head_dim), empty(shape.head_dim)

    def weights(self) -> dict[str, Weight]:
        """Return the layer's weights under their checkpoint names."""
        norms = {"input_layernorm": self.input_norm}
        if self._shape.output_norms:
            # Where what is added has norms too, the name of Llama's second norm means another place.
            norms["post_attention_layernorm"] = self.attention_norm
            norms["pre_feedforward_layernorm"] = self.mlp_input_norm
            norms["post_feedforward_layernorm"] = self.mlp_norm
        else:
            norms["post_attention_layernorm"] = self.mlp_input_norm
        if self._shape.head_norms:
            norms["self_attn.q_norm"] = self.query_norm
            norms["self_attn.k_norm"] = self.key_norm
        named = {f"{name}.weight": Weight.all_of(norm) for name, norm in norms.items()}
        for name, part in self._parts.items():
            linear, bias = self.projections[part.projection]
            rows = slice(part.first_row, part.first_row + part.rows.count)
            named[f"{name}.weight"] = Weight(linear.weight[rows], (part.rows, part.inputs))
            if bias is not None:
                named[f"{name}.bias"] = Weight(bias[rows], (part.rows,))
        return named


def projection_parts(shape: DecoderShape, division: Division) -> dict[str, ProjectionPart]:
    """Return the checkpoint's projections, and where what is kept of them lies in the model's own."""
    query = division.heads(shape).times(shape.head_dim)
    key = division.kv_heads(shape).times(shape.head_dim)
    width = division.intermediate(shape)
    hidden = Share.all_of(shape.hidden)
    return {
        "self_attn.q_proj": ProjectionPart("qkv", 0, query, hidden),
        "self_attn.k_proj": ProjectionPart("qkv", query.count, key, hidden),
        "self_attn.v_proj": ProjectionPart("qkv", query.count + key.count, key, hidden),
        "self_attn.o_proj": ProjectionPart("output", 0, hidden, query),
        "mlp.gate_proj": ProjectionPart("gate_up", 0, width, hidden),
        "mlp.up_proj": ProjectionPart("gate_up", width.count, width, hidden),
        "mlp.down_proj": ProjectionPart("down", 0, hidden, width),
    }
