"""Operations of the decoder that a GPU computes in one kernel each, and other devices by torch."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from model_server.attention.heads import rms_norm

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


class FusedOps(NamedTuple):
    """One implementation of the operations."""

    # (hidden, added, weight, epsilon, offset), [rows, size] both: their sum, and its RMS norm times
    # (weight + offset).
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
    # (gate and up, [rows, 2 * size], activation as in `DecoderShape`): activation(gate) * up.
    gate: Callable[[Tensor, str], Tensor]


def _add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    total = hidden + added
    return total, rms_norm(total, weight, epsilon, offset)


def _gate(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


TORCH_OPS = FusedOps(_add_rms_norm, _gate)


def triton_ops() -> FusedOps:
    """Return the Triton kernels. Imports Triton, which needs a GPU, or its interpreter."""
    from model_server.attention.gpu_kernel.elementwise import run_add_rms_norm, run_gate

    return FusedOps(run_add_rms_norm, run_gate)
