"""The weights of one decoder layer; projections that share an input are one matrix."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from model_server.shapes import DecoderShape, Division, Share

# What the packed order is made for; it serves any number of rows. Were it made for few, a single row would be
# computed by another kernel, which rounds differently.
_PACKED_FOR_ROWS = 2048


class Linear:
    """A projection without its bias."""

    __slots__ = ("_packed", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [outputs, inputs]; of no use once packed
        self._packed: Tensor | None = None

    def __call__(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return inputs @ weight.T + bias, [rows, outputs]."""
        if self._packed is None:
            return functional.linear(inputs, self.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(inputs, self._packed, bias, "none", [], "")

    def pack(self) -> None:
        """Let go of the plain weight for one in the order that oneDNN reads, where that helps.

        Else oneDNN reorders all of it in every call, which for 8 rows takes as long as the multiplication.
        """
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.bfloat16 and _can_pack():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)
            self.weight = self.weight.new_empty(0)


@cache
def _can_pack() -> bool:
    """Tell whether packing works here; runs it once to know, for the operators are private to torch."""
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
    """A tensor of the checkpoint, or the part of it that is kept here."""

    tensor: Tensor  # what is kept
    shares: tuple[Share, ...]  # per dimension of the checkpoint's tensor, which part that is

    @classmethod
    def all_of(cls, tensor: Tensor) -> "Weight":
        return cls(tensor, tuple(Share.all_of(length) for length in tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(share.whole for share in self.shares)

    def write(self, whole: Tensor) -> None:
        self.tensor.copy_(whole[tuple(share.span for share in self.shares)])


@dataclass(frozen=True, slots=True)
class ProjectionPart:
    """A projection of the checkpoint, and its place in one of the model's own."""

    projection: str  # name of the model's projection
    first_row: int  # where the part's rows begin there
    rows: Share  # those of the checkpoint's rows that are kept
    inputs: Share  # those of its columns


class DecoderLayer:
    """One layer; norms that its shape does not have are not read."""

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

        # "qkv", "output", "gate_up" and "down", with their biases or None.
        self.projections: dict[str, tuple[Linear, Tensor | None]] = {
            "qkv": linear(qkv_rows, shape.hidden, bias=shape.qkv_bias),
            "output": linear(shape.hidden, query_rows, bias=shape.output_bias),
            "gate_up": linear(2 * own.intermediate, shape.hidden),
            "down": linear(shape.hidden, own.intermediate),
        }
        self.input_norm, self.mlp_input_norm = empty(shape.hidden), empty(shape.hidden)
        # Of what attention and MLP add, if the shape has output norms.
        self.attention_norm, self.mlp_norm = empty(shape.hidden), empty(shape.hidden)
        # Of each query and key head, if the shape has head norms.
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
