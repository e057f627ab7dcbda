"""Attention over the paged KV pool: one interface, and the backends `sdpa` and `varlen`."""

import logging
from functools import cache

import torch
from torch import Tensor

from model_server.attention.cpu_kernel.decodes import paged_fault
from model_server.attention.kv_pool import Attention, KvLayout, Span, StepMeta
from model_server.attention.sdpa import SdpaAttention
from model_server.shapes.shape import AttentionShape, single_group

__all__ = ["Attention", "KvLayout", "SdpaAttention", "Span", "StepMeta", "new_attention"]

logger = logging.getLogger(__name__)

# A small case that reaches every branch of the kernel: several parts per head, tokens not a multiple of 4.
_TRIAL_SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=64, scale=64**-0.5, windows=(None,))
_TRIAL_TABLES, _TRIAL_CONTEXTS, _TRIAL_BLOCK_TOKENS = ([4, 1], [2, 0, 3]), (7, 13), 5
_ROUNDING = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7, torch.float32: 1e-4}


def new_attention(
    shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device, *, fp8: bool = False
) -> Attention:
    """Create the KV pool with the best attention backend for the device."""
    if fp8:
        return SdpaAttention(shape, layout, dtype, device, fp8=True)
    if device.type != "cuda":
        if (fault := paged_fault(shape, dtype, device) or _trial_fault(dtype)) is not None:
            logger.warning("attention falls back to gathering blocks: backend=cpu_kernel error=%s", fault)
        return SdpaAttention(shape, layout, dtype, device, paged=fault is None)
    # Imported late: torch's module imports its compiler, which takes longer than everything else.
    from model_server.attention.varlen import VarlenAttention, varlen_fault

    if (fault := varlen_fault(shape, layout.block_tokens, dtype, device)) is not None:
        logger.warning("attention falls back to gathering blocks: backend=varlen error=%s", fault)
        return SdpaAttention(shape, layout, dtype, device)
    return VarlenAttention(shape, layout, dtype, device)


@cache
def _trial_fault(dtype: torch.dtype) -> str | None:
    """Return why the compiled kernel fails its self-test against torch, or None if it passes."""
    try:
        paged, gathered = (_attended(dtype, paged) for paged in (True, False))
    except Exception as error:  # from numba, LLVM or a damaged cache
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if not torch.allclose(paged, gathered, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype]):
        return "its results differ from those of torch"
    return None


def _attended(dtype: torch.dtype, paged: bool) -> Tensor:
    """Return the attention outputs of the last tokens of two random sequences."""
    generator = torch.Generator().manual_seed(0)
    layout = KvLayout(single_group(1), sum(map(len, _TRIAL_TABLES)), _TRIAL_BLOCK_TOKENS)
    attention = SdpaAttention(_TRIAL_SHAPE, layout, dtype, torch.device("cpu"), paged=paged)
    size = _TRIAL_SHAPE.kv_heads, _TRIAL_SHAPE.head_dim
    cases = list(zip(_TRIAL_CONTEXTS, _TRIAL_TABLES, strict=True))
    for context, table in cases:
        text = torch.randn((2, context, *size), generator=generator).to(dtype)
        attention.store(0, text[0], text[1], attention.prepare([Span(0, context, [table])]))
    last = [Span(context - 1, 1, [table]) for context, table in cases]
    queries = torch.randn((len(last), _TRIAL_SHAPE.heads, size[1]), generator=generator).to(dtype)
    return attention.attend(queries, 0, attention.prepare(last))
