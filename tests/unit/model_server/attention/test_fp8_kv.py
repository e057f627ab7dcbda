"""The 8-bit KV pool: half the bytes, and values within 8-bit precision however a block is filled."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_server.attention import KvLayout, SdpaAttention
from model_server.attention.kv_pool import Fp8KvPool
from model_server.config import EngineConfig
from model_server.engine.build import build_engine
from model_server.model.weights import load_checkpoint
from model_server.shapes.shape import AttentionShape, single_group
from tests.support.model_server.engine import Outputs, request, run_to_end
from tests.support.model_server.model import (
    CPU,
    new_pool,
    reference_logits,
    save_reference,
    span,
    step,
    text_of,
)

SHAPE = AttentionShape(heads=4, kv_heads=2, head_dim=8, scale=0.3, windows=(None,))
LAYOUT = KvLayout(single_group(1), num_blocks=6, block_tokens=4)
# Half of the last of three bits of mantissa.
ROUNDING = 2.0**-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def written(pool: Fp8KvPool, tokens: torch.Tensor, cuts: list[int], first_slot: int = 0) -> torch.Tensor:
    """Write [tokens, kv_heads, head_dim] as keys and, negated, as values; return the keys read back."""
    start = 0
    for length in cuts:
        slots = range(first_slot + start, first_slot + start + length)
        part = tokens[start : start + length]
        pool.write(0, part, -part, pool.plan_write(np.array(slots)))
        start += length
    blocks = np.arange(first_slot // 4, -(-(first_slot + start) // 4))[None]
    rows = pool.plan_read(blocks)
    key, value = pool.read(0, rows)
    assert torch.equal(key, -value)
    return key.view(2, -1, 8).transpose(0, 1)[:start]


def test_half_the_bytes() -> None:
    """A block has half the bytes of bf16, plus scales of 4 bytes per head for keys and for values."""
    shape = AttentionShape(heads=8, kv_heads=4, head_dim=64, scale=1.0, windows=(None,) * 3)
    layout = KvLayout(single_group(3), num_blocks=10, block_tokens=16)
    pools = [SdpaAttention(shape, layout, torch.bfloat16, CPU, fp8=fp8) for fp8 in (False, True)]
    plain, small = (sum(tensor.nbytes for tensor in pool.block_tensors()) for pool in pools)
    assert small == plain / 2 + 10 * 3 * 4 * 2 * 4
    assert all(tensor.shape[:2] == (6, 10) for pool in pools for tensor in pool.block_tensors())


@given(
    cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    exponents=st.lists(st.integers(-20, 20), min_size=42, max_size=42),
    seed=st.integers(0, 1000),
)
def test_every_number_is_near_in_its_block(cuts: list[int], exponents: list[int], seed: int) -> None:
    """Tokens of any size keep 3-bit mantissa precision, or are small next to the block's maximum."""
    tokens = torch.randn((sum(cuts), 2, 8), generator=torch.Generator().manual_seed(seed))
    tokens *= torch.tensor(exponents[: sum(cuts)]).exp2()[:, None, None]
    layout = KvLayout(single_group(1), num_blocks=12, block_tokens=4)
    got = written(Fp8KvPool(SHAPE, layout, torch.float32, CPU), tokens, cuts)
    for first in range(0, len(tokens), 4):
        block, read = tokens[first : first + 4], got[first : first + 4]
        largest = block.abs().amax(dim=(0, 2))[None, :, None]
        # 448 * 2**-9 is the step of the smallest numbers where the largest is at least 224 of 448; the first
        # rounding and one at every growth of the scale may each lose half of it.
        allowed = torch.maximum(block.abs() * ROUNDING, largest * 4 * 2.0**-10 / 224)
        assert ((read - block).abs() <= allowed).all()


def test_growing_scales_do_not_round_again() -> None:
    """Values within the range of both scales read the same before and after a larger token is written."""
    pool = Fp8KvPool(SHAPE, LAYOUT, torch.float32, CPU)
    small = torch.randn((3, 2, 8), generator=torch.Generator().manual_seed(1)).clamp(0.5, 4.0)
    before = written(pool, small, [3])
    large = torch.full((1, 2, 8), 100.0)
    pool.write(0, large, -large, pool.plan_write(np.array([3])))
    key, _ = pool.read(0, pool.plan_read(np.array([[0]])))
    assert torch.equal(key.view(2, 4, 8).transpose(0, 1)[:3], before)


def test_a_block_used_again_forgets_its_scale() -> None:
    """A reused block does not keep the scale of its former content."""
    pool = Fp8KvPool(SHAPE, LAYOUT, torch.float32, CPU)
    written(pool, torch.full((4, 2, 8), 1e6), [4])
    tiny = torch.randn((4, 2, 8), generator=torch.Generator().manual_seed(2)) * 1e-4
    torch.testing.assert_close(written(pool, tiny, [1, 3]), tiny, rtol=ROUNDING, atol=1e-7)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_error_of_the_logits_is_small(tmp_path: Path, architecture: str) -> None:
    """Logits over 8-bit KV, prefilled and decoded, differ by a few percent of their spread."""
    reference = save_reference(tmp_path, architecture, head_dim=16, initializer_range=0.1)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    text, pool = text_of(60), new_pool(model, fp8=True)
    table = list(range(15))
    got = [step(model, pool, [(text, span(0, 30, table))])]
    got += [step(model, pool, [(text, span(start, 1, table))]) for start in range(30, 60)]
    want = reference_logits(reference, text)
    error = (torch.cat(got) - want).square().mean().sqrt() / want.std()
    assert 0.0005 < error < 0.05


def test_an_engine_runs_on_it() -> None:
    """With --kv-cache-dtype fp8, cached and recomputed prompts have equal answers."""
    answers = {}
    for dtype in ("auto", "fp8"):
        config = EngineConfig(kv_cache_dtype=dtype, gpu_blocks=128)  # type: ignore[arg-type]
        engine, outputs = build_engine(config), Outputs()
        for name in ("first", "again"):
            engine.add_request(request(name, text_of(70), max_tokens=16, ignore_eos=True), outputs)
            run_to_end(engine)
        assert outputs.last["again"].cached_tokens == 64
        assert outputs.tokens["first"] == outputs.tokens["again"]
        answers[dtype] = outputs.tokens["first"]
    assert answers["fp8"][0] == answers["auto"][0]
