"""model_server.model.decoder.Linear: packing a weight does not change its outputs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from model_server.model.decoder import Linear, can_pack
from model_server.model.weights import load_checkpoint
from tests.support.model_server.model import CPU, new_pool, save_reference, span, step, text_of

ROWS = (1, 2, 7, 33, 300)
# Kernels may sum in another order; bf16 has 8 bits of precision.
ROUNDING = 2.0**-7


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def _unpackable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a torch without the packing operators."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    can_pack.cache_clear()
    yield
    can_pack.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(96, 64), (37, 53), (129, 257)])
def test_packing_changes_no_output(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Packed outputs equal those of the plain weight, for all types and row counts, with and without bias."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    bias = torch.randn(shape[0], generator=generator).to(dtype)
    packed = Linear(weight.clone())
    packed.pack()
    for rows in ROWS:
        inputs = torch.randn((rows, shape[1]), generator=generator).to(dtype)
        for added in (None, bias):
            want = functional.linear(inputs, weight, added)
            torch.testing.assert_close(packed(inputs, added), want, rtol=ROUNDING, atol=ROUNDING)


def test_a_packed_weight_is_kept_once() -> None:
    """Packing drops the plain weight; float32 weights stay plain."""
    half, full = (Linear(torch.ones((8, 8), dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    for linear in (half, full):
        linear.pack()
    assert full.weight.shape == (8, 8)
    assert half.weight.numel() == (0 if can_pack() else 64)


@pytest.mark.usefixtures("_unpackable")
def test_a_processor_without_the_kernel_keeps_plain_weights() -> None:
    """If torch cannot pack, weights stay plain and outputs are the same."""
    plain = Linear(torch.ones((8, 8), dtype=torch.bfloat16))
    plain.pack()
    assert plain.weight.shape == (8, 8)
    assert plain(torch.ones((1, 8), dtype=torch.bfloat16)).tolist() == [[8.0] * 8]


@pytest.mark.parametrize(("architecture", "tied"), [("qwen2", False), ("gemma3", True)])
def test_a_packed_model_computes_the_same(tmp_path: Path, architecture: str, tied: bool) -> None:
    """Packing a whole model changes its logits by rounding only."""
    save_reference(tmp_path, architecture, tie_word_embeddings=tied)
    text, logits = text_of(21), []
    for packs in (False, True):
        model = load_checkpoint(tmp_path, "bfloat16", CPU).model
        if packs:
            model.pack()
        pool = new_pool(model)
        parts = [(0, 19), (19, 1), (20, 1)]
        logits.append(torch.cat([step(model, pool, [(text, span(*part, range(6)))]) for part in parts]))
    torch.testing.assert_close(*logits, rtol=8 * ROUNDING, atol=8 * ROUNDING)
