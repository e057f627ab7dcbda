"""A weight matrix that the processor can multiply by without bringing it into order first.

In: rows of inputs. Out: rows of outputs, those of `functional.linear` to within rounding. It knows no layers
and no ranks.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

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
