"""The weights of one decoder layer; projections that share an input are one matrix.

In: a shape. Out: empty tensors, under their checkpoint names and under the model's own. It computes nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.models.shape import DecoderShape


@dataclass(frozen=True, slots=True)
class ProjectionPart:
    """A projection of the checkpoint, and its place in one of the model's own.

    Attributes:
        projection: Name of the model's projection.
        inputs: Columns of both.
        first_row: Where the part's rows begin.
        rows: How many there are.
    """

    projection: str
    inputs: int
    first_row: int
    rows: int


class DecoderLayer:
    """One layer.

    Attributes:
        projections: (weight, bias or None) of "qkv", "output", "gate_up" and "down".
        input_norm: Before attention.
        mlp_input_norm: Before the MLP.
        attention_norm: Of what attention adds, if the shape has output norms.
        mlp_norm: Of what the MLP adds, likewise.
        query_norm: Of each query head, if the shape has head norms.
        key_norm: Of each key head, likewise.
    """

    __slots__ = (
        "_shape",
        "attention_norm",
        "input_norm",
        "key_norm",
        "mlp_input_norm",
        "mlp_norm",
        "projections",
        "query_norm",
    )

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        query_rows, key_rows, _ = _head_rows(shape)
        qkv_rows = query_rows + 2 * key_rows
        self._shape = shape
        self.projections: dict[str, tuple[Tensor, Tensor | None]] = {
            "qkv": (empty(qkv_rows, shape.hidden), empty(qkv_rows) if shape.qkv_bias else None),
            "output": (empty(shape.hidden, query_rows), empty(shape.hidden) if shape.output_bias else None),
            "gate_up": (empty(2 * shape.intermediate, shape.hidden), None),
            "down": (empty(shape.hidden, shape.intermediate), None),
        }
        self.input_norm, self.mlp_input_norm = empty(shape.hidden), empty(shape.hidden)
        self.attention_norm, self.mlp_norm = empty(shape.hidden), empty(shape.hidden)
        self.query_norm, self.key_norm = empty(shape.head_dim), empty(shape.head_dim)

    def tensors(self) -> dict[str, Tensor]:
        """Return the layer's weights under their checkpoint names."""
        named = {"input_layernorm.weight": self.input_norm}
        if self._shape.output_norms:
            # Where what is added has norms too, the name of Llama's second norm means another place.
            named["post_attention_layernorm.weight"] = self.attention_norm
            named["pre_feedforward_layernorm.weight"] = self.mlp_input_norm
            named["post_feedforward_layernorm.weight"] = self.mlp_norm
        else:
            named["post_attention_layernorm.weight"] = self.mlp_input_norm
        if self._shape.head_norms:
            named["self_attn.q_norm.weight"] = self.query_norm
            named["self_attn.k_norm.weight"] = self.key_norm
        for name, part in self.parts(self._shape).items():
            weight, bias = self.projections[part.projection]
            named[f"{name}.weight"] = weight.narrow(0, part.first_row, part.rows)
            if bias is not None:
                named[f"{name}.bias"] = bias.narrow(0, part.first_row, part.rows)
        return named

    @staticmethod
    def parts(shape: DecoderShape) -> dict[str, ProjectionPart]:
        """Return the checkpoint's projections and where they lie in the model's own."""
        query, key, value = _head_rows(shape)
        hidden, intermediate = shape.hidden, shape.intermediate
        return {
            "self_attn.q_proj": ProjectionPart("qkv", hidden, 0, query),
            "self_attn.k_proj": ProjectionPart("qkv", hidden, query, key),
            "self_attn.v_proj": ProjectionPart("qkv", hidden, query + key, value),
            "self_attn.o_proj": ProjectionPart("output", query, 0, hidden),
            "mlp.gate_proj": ProjectionPart("gate_up", hidden, 0, intermediate),
            "mlp.up_proj": ProjectionPart("gate_up", hidden, intermediate, intermediate),
            "mlp.down_proj": ProjectionPart("down", intermediate, 0, hidden),
        }


def _head_rows(shape: DecoderShape) -> tuple[int, int, int]:
    """Return the rows of the query, key and value projections."""
    key = shape.kv_heads * shape.head_dim
    return shape.heads * shape.head_dim, key, key
