"""Attention over the paged KV pool: one interface, two backends.

In: a model's shape and the pool's layout. Out: an `Attention`. A backend joins by a file beside `sdpa`.
"""

import logging

import torch

from model_server.attention.batch import Attention, KvLayout, Span, StepMeta
from model_server.attention.paged_decodes import paged_fault
from model_server.attention.paged_trial import trial_fault
from model_server.attention.sdpa import SdpaAttention
from model_server.shapes import AttentionShape

__all__ = ["Attention", "KvLayout", "SdpaAttention", "Span", "StepMeta", "new_attention"]

logger = logging.getLogger(__name__)


def new_attention(
    shape: AttentionShape, layout: KvLayout, dtype: torch.dtype, device: torch.device, *, fp8: bool = False
) -> Attention:
    """Make the KV pool and choose what attends over it.

    Args:
        shape: Of the model.
        layout: Of the pool.
        dtype: What the model computes in.
        device: Where the pool goes.
        fp8: Keep keys and values in 8-bit floats.
    """
    if fp8:
        return SdpaAttention(shape, layout, dtype, device, fp8=True)
    if device.type != "cuda":
        if (fault := paged_fault(shape, dtype, device) or trial_fault(dtype)) is not None:
            logger.warning("attention gathers blocks, because the compiled kernel cannot be used: %s", fault)
        return SdpaAttention(shape, layout, dtype, device, paged=fault is None)
    # Not before it is needed: torch's module brings its compiler, which takes longer to import than the rest.
    from model_server.attention.varlen import VarlenAttention, varlen_fault

    if (fault := varlen_fault(shape, layout.block_tokens, dtype, device)) is not None:
        logger.warning("attention gathers blocks, because torch's paged kernel cannot be used: %s", fault)
        return SdpaAttention(shape, layout, dtype, device)
    return VarlenAttention(shape, layout, dtype, device)
