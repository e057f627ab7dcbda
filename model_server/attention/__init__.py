"""Attention over the paged KV pool: one interface with three implementations.

Triton kernels on a GPU, a compiled kernel for decodes on a CPU, and plain torch, which the other two are
compared with.
"""

import logging
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from model_server.attention.cpu_kernel.decodes import paged_fault
from model_server.attention.heads import Rotation
from model_server.attention.kv_pool import Attention, KvLayout, Span, StepMeta, Upload
from model_server.attention.sdpa import SdpaAttention
from model_server.config import AttentionBackend
from model_server.errors import ConfigError
from model_server.shapes.shape import AttentionShape, single_group

__all__ = ["Attention", "KvLayout", "SdpaAttention", "Span", "StepMeta", "Upload", "new_attention"]

logger = logging.getLogger(__name__)

# A small case that reaches every branch of the kernels: several parts per head, tokens not a multiple of 4.
_TRIAL_SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=64, scale=64**-0.5, windows=(None, 6))
_TRIAL_TABLES, _TRIAL_CONTEXTS = ([4, 1], [2, 0, 3]), (7, 13)
_TRIAL_LAYOUT = KvLayout(single_group(2), num_blocks=5, block_tokens=5)
_ROUNDING = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7, torch.float32: 1e-4}
_FP8_CAPABILITY = (8, 9)  # the first GPUs with instructions for 8-bit floats


def new_attention(
    shape: AttentionShape,
    layout: KvLayout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fp8: bool = False,
    backend: AttentionBackend = "auto",
) -> Attention:
    """Create the KV pool with the best attention backend for the device, or with a given one.

    Raises:
        ConfigError: The given backend does not run here.
    """
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        if (fault := _triton_fault(dtype, device, fp8)) is None:
            # Imported late: the kernels need Triton, which torch brings along only with CUDA.
            from model_server.attention.triton_paged import TritonAttention

            return TritonAttention(shape, layout, dtype, device, fp8=fp8)
        if backend == "triton":
            raise ConfigError(f"attention_backend is 'triton', but it cannot run: {fault}; use 'auto'")
        logger.warning("attention falls back to gathering blocks: backend=triton error=%s", fault)
    if fp8 or backend == "torch" or device.type == "cuda":
        return SdpaAttention(shape, layout, dtype, device, fp8=fp8)
    if (fault := paged_fault(shape, dtype, device) or _cpu_kernel_fault(dtype)) is not None:
        logger.warning("attention falls back to gathering blocks: backend=cpu_kernel error=%s", fault)
    return SdpaAttention(shape, layout, dtype, device, paged=fault is None)


@cache
def _cpu_kernel_fault(dtype: torch.dtype) -> str | None:
    paged = partial(SdpaAttention, _TRIAL_SHAPE, _TRIAL_LAYOUT, dtype, torch.device("cpu"), paged=True)
    return _trial_fault(paged, dtype, torch.device("cpu"), fp8=False)


@cache
def _triton_fault(dtype: torch.dtype, device: torch.device, fp8: bool) -> str | None:
    """Return why the Triton kernels cannot be used, or None if they can."""
    try:
        import triton
    except ImportError as error:
        return f"{error}; install the package triton"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"it needs CUDA, not {device.type}; only Triton's interpreter, TRITON_INTERPRET=1, runs there"
    if fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        return "this GPU has no 8-bit floats"
    from model_server.attention.triton_paged import TritonAttention

    paged = partial(TritonAttention, _TRIAL_SHAPE, _TRIAL_LAYOUT, dtype, device, fp8=fp8)
    return _trial_fault(paged, dtype, device, fp8=fp8)


def _trial_fault(
    new: Callable[[], Attention], dtype: torch.dtype, device: torch.device, *, fp8: bool
) -> str | None:
    """Return why a backend fails its self-test against torch, or None if it passes."""
    try:
        reference = SdpaAttention(_TRIAL_SHAPE, _TRIAL_LAYOUT, dtype, device, fp8=fp8)
        tried, gathered = _attended(new(), dtype, device), _attended(reference, dtype, device)
    except Exception as error:  # from numba, LLVM, Triton, a missing compiler or a damaged cache
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if not torch.allclose(tried, gathered, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype]):
        return "its results differ from those of torch"
    return None


def _attended(attention: Attention, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the attention outputs of two random sequences, in chunks, the last of one token."""
    generator = torch.Generator().manual_seed(0)
    heads = _TRIAL_SHAPE.heads + 2 * _TRIAL_SHAPE.kv_heads
    outputs = []
    for chunks in (
        [(0, context - 1) for context in _TRIAL_CONTEXTS],
        [(context - 1, 1) for context in _TRIAL_CONTEXTS],
    ):
        spans = [Span(*chunk, [table]) for chunk, table in zip(chunks, _TRIAL_TABLES, strict=True)]
        meta = attention.prepare(spans)
        size = sum(span.length for span in spans), 1, _TRIAL_SHAPE.head_dim
        rotation = Rotation(
            torch.ones(size, dtype=dtype).to(device), torch.zeros(size, dtype=dtype).to(device)
        )
        for layer in range(len(_TRIAL_SHAPE.windows)):
            projected = torch.randn((size[0], heads, size[2]), generator=generator).to(dtype).to(device)
            query = attention.rotate_and_store(layer, projected, rotation, None, meta)
            outputs.append(attention.attend(query, layer, meta))
    return torch.cat(outputs)
