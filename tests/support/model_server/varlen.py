"""torch's variable-length attention by its documentation, for any device."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def kernel_in_plain_torch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    _: None,
    max_query: int,
    max_context: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """Compute attention token by token, as the kernel's documentation defines it."""
    group = query.shape[1] // keys.shape[2]
    assert enable_gqa == (group > 1)
    assert (block_table.dtype, query_starts.dtype, seqused_k.dtype) == (torch.int32,) * 3
    output = torch.empty_like(query)
    bounds = query_starts.tolist()
    for sequence, (first, stop) in enumerate(pairwise(bounds)):
        context = int(seqused_k[sequence])
        assert stop - first <= max_query
        assert context <= max_context
        key, value = (
            pool[block_table[sequence].long()].flatten(0, 1)[:context].repeat_interleave(group, dim=1)
            for pool in (keys, values)
        )
        for row in range(first, stop):
            position = context - (stop - row)
            begin = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            seen = slice(begin, position + 1 + window_size[1])
            scores = torch.einsum("hd,khd->hk", query[row], key[seen]) * scale
            output[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), value[seen])
    return output
