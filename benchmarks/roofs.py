"""Peak speeds of a device: the data sheet's for known cards, measured ones for other cards and CPUs."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch.nn.functional import linear

from benchmarks.device_time import wall_s
from planning.presets import CUSTOM, GPUS, Gpu

_REPEATS = 5
# Names that CUDA reports -> keys of `GPUS`.
_CARDS = {
    "AMD Instinct MI300X": "mi300x",
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
}


def roof_of(device: torch.device, *, quick: bool = False) -> Gpu:
    """Return the data sheet's peaks of a known card, else measured ones."""
    known = _CARDS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return measured_roof(device, quick=quick) if known is None else GPUS[known]


def measured_roof(device: torch.device, *, quick: bool = False) -> Gpu:
    """Measure a device: the best rate of reading memory, and of multiplying bf16 or float32 matrices."""
    if device.type == "cuda":
        memory_bytes, name = torch.cuda.get_device_properties(device).total_memory, "measured card"
    else:
        memory_bytes, name = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "measured CPU"
    return replace(
        CUSTOM,
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=_read_bytes_per_s(device, quick=quick),
        flops_per_s=max(
            _flops_per_s(device, dtype, quick=quick) for dtype in (torch.bfloat16, torch.float32)
        ),
    )


def _read_bytes_per_s(device: torch.device, *, quick: bool) -> float:
    rows = torch.rand((1 << 10 if quick else 1 << 16, 1 << 13), device=device)  # 2 GiB, above any cache
    vector = torch.rand(rows.shape[1], device=device)
    works = (rows.sum, lambda: rows @ vector)
    return rows.nbytes / min(wall_s(work, device) for work in works for _ in range(_REPEATS))


def _flops_per_s(device: torch.device, dtype: torch.dtype, *, quick: bool) -> float:
    size = 512 if quick else 8192 if device.type == "cuda" else 2048
    matrix = torch.rand((size, size), device=device).to(dtype)
    return 2 * size**3 / min(wall_s(lambda: linear(matrix, matrix), device) for _ in range(_REPEATS))
