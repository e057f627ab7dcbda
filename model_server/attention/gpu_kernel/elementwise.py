"""Elementwise work of the decoder in Triton: residual sums with RMS norms, and gated activations."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def add_rms_norm(
    hidden_ptr, added_ptr, weight_ptr, sum_ptr, normed_ptr, epsilon, offset,
    SIZE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Add a row and normalise the sum. Grid: [rows]."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    at = tl.arange(0, PAD)
    mask = at < SIZE
    total = tl.load(hidden_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(added_ptr + row + at, mask=mask, other=0.0).to(tl.float32)
    # The norm reads the sum as it is stored, like a model that computes one after the other.
    stored = total.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row + at, stored, mask=mask)
    total = stored.to(tl.float32)
    factor = tl.rsqrt(tl.sum(total * total, 0) / SIZE + epsilon)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(normed_ptr + row + at, (total * factor * weight).to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gate(gate_up_ptr, output_ptr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr):
    """Multiply the activated gate with the other half of a row. Grid: [rows, column tiles]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = at < SIZE
    gated = tl.load(gate_up_ptr + row * 2 * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # x * (1 + tanh(y)) / 2 is x * sigmoid(2 * y).
        activated = gated * tl.sigmoid(1.5957691216057308 * (gated + 0.044715 * gated * gated * gated))
    else:
        activated = gated * tl.sigmoid(gated)
    # Rounded as by a model that stores the activation.
    activated = activated.to(output_ptr.dtype.element_ty).to(tl.float32)
    tl.store(output_ptr + row * SIZE + at, (activated * up).to(output_ptr.dtype.element_ty), mask=mask)


def run_add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, epsilon: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return hidden + added, and its RMS norm times (weight + offset); [rows, size] each, contiguous."""
    rows, size = hidden.shape
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    pad = triton.next_power_of_2(size)
    warps = min(16, max(1, pad // 512))
    add_rms_norm[(rows,)](hidden, added, weight, total, normed, epsilon, offset, size, pad, num_warps=warps)
    return total, normed


def run_gate(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up of [rows, 2 * size], the gate first; `activation` as in `DecoderShape`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    columns = min(_COLUMNS, triton.next_power_of_2(size))
    gate[(rows, triton.cdiv(size, columns))](gate_up, output, size, columns, activation == "gelu_tanh")
    return output
