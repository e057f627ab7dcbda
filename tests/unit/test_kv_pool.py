"""model_server.attention.kv_pool: values summed where they lie."""

import numpy as np
import pytest
import torch

from model_server.attention import KvLayout
from model_server.attention.fp8_pool import Fp8KvPool
from model_server.attention.kv_pool import KvPool
from model_server.shapes import AttentionShape, undivided
from tests.unit.model_support import CPU

SHAPE = AttentionShape(heads=6, kv_heads=2, head_dim=8, scale=0.3, windows=(None, None))
LAYOUT = KvLayout(undivided(2), num_blocks=9, block_tokens=4)
BLOCK_IDS = np.array([[3, 8, 0], [1, 3, 0]])  # one is shared, block 0 pads


@pytest.mark.parametrize("kind", [KvPool, Fp8KvPool])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_those_of_the_values_that_are_read(
    kind: type[KvPool] | type[Fp8KvPool], dtype: torch.dtype
) -> None:
    """Each query head's weighted sum is that of its own KV head's values, in the order of its blocks."""
    generator = torch.Generator().manual_seed(0)
    pool = kind(SHAPE, LAYOUT, dtype, CPU)
    tokens = torch.randn((36, 2, 8), generator=generator).to(dtype)
    for plane in range(2):
        pool.write(plane, tokens, (plane + 1) * tokens, pool.plan_write(np.arange(36)))  # type: ignore[arg-type]
    weights = torch.rand((4, 3, 12), generator=generator).to(dtype)
    for plane in range(2):
        got = pool.sum_values(plane, weights, pool.plan_sum(BLOCK_IDS))
        values = pool.read_values(plane, pool.plan_read(BLOCK_IDS)).view(4, 12, 8)
        want = weights.double() @ values.double()
        torch.testing.assert_close(got.double(), want, rtol=2.0**-7, atol=2.0**-7)
