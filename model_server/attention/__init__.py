"""Attention over the paged KV pool: one interface, two backends; another joins by a file beside `sdpa`."""

import logging
from functools import cache

import torch
from torch import Tensor

from model_server.attention.cpu_kernel.decodes import paged_fault
from model_server.attention.kv_pool import Attention, KvLayout, Span, StepMeta
from model_server.attention.sdpa import SdpaAttention
from model_server.shapes import AttentionShape, single_group

__all__ = ["Attention", "KvLayout", "SdpaAttention", "Span", "StepMeta", "new_attention"]

logger = logging.getLogger(__name__)

# Heads of several parts, tokens that are no whole number of fours: all of the kernel runs.
_TRIAL_SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=64, scale=64**-0.5, windows=(None,))
_TRIAL_TABLES, _TRIAL_CONTEXTS, _TRIAL_BLOCK_TOKENS = ([4, 1], [2, 0, 3]), (7, 13), 5
_ROUNDING = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7, torch.float32: 1e-4}


def new_attention(
    shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device, *, fp8: bool = False
) -> Attention:
    """Make the KV pool and choose what attends over it."""
    if fp8:
        return SdpaAttention(shape, layout, dtype, device, fp8=True)
    if device.type != "cuda":
        if (fault := paged_fault(shape, dtype, device) or _trial_fault(dtype)) is not None:
            logger.warning("attention gathers blocks, because the compiled kernel cannot be used: %s", fault)
        return SdpaAttention(shape, layout, dtype, device, paged=fault is None)
    # Not before it is needed: torch's module brings its compiler, which takes longer to import than the rest.
    from model_server.attention.varlen import VarlenAttention, varlen_fault

    if (fault := varlen_fault(shape, layout.block_tokens, dtype, device)) is not None:
        logger.warning("attention gathers blocks, because torch's paged kernel cannot be used: %s", fault)
        return SdpaAttention(shape, layout, dtype, device)
    return VarlenAttention(shape, layout, dtype, device)


@cache
def _trial_fault(dtype: torch.dtype) -> str | None:
    """Return why the kernel for single tokens does not compute what torch does, or None if it does."""
    try:
        paged, gathered = (_attended(dtype, paged) for paged in (True, False))
    except Exception as error:  # of numba, of LLVM, or of what lies in the cache
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if not torch.allclose(paged, gathered, rtol=_ROUNDING[dtype], atol=_ROUNDING[dtype]):
        return "its numbers are not those that torch computes"
    return None


def _attended(dtype: torch.dtype, paged: bool) -> Tensor:
    """Attend the last tokens of two sequences of random numbers."""
    generator = torch.Generator().manual_seed(0)
    layout = KvLayout(single_group(1), sum(map(len, _TRIAL_TABLES)), _TRIAL_BLOCK_TOKENS)
    attention = SdpaAttention(_TRIAL_SHAPE, layout, dtype, torch.device("cpu"), paged=paged)
    size = _TRIAL_SHAPE.kv_heads, _TRIAL_SHAPE.head_dim
    for context, table in zip(_TRIAL_CONTEXTS, _TRIAL_TABLES, strict=True):
        text = torch.randn((2, context, *size), generator=generator).to(dtype)
        attention.store(0, text[0], text[1], attention.prepare([Span(0, context, [table])]))
    last = [
        Span(context - 1, 1, [table]) for context, table in zip(_TRIAL_CONTEXTS, _TRIAL_TABLES, strict=True)
    ]
    queries = torch.randn((len(last), _TRIAL_SHAPE.heads, size[1]), generator=generator).to(dtype)
    return attention.attend(queries, 0, attention.prepare(last))
