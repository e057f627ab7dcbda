"""attention.varlen: its layout is correct on any device, its results on CUDA."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model_server.attention import KvLayout, SdpaAttention, Span, new_attention
from model_server.attention import varlen as varlen_module
from model_server.attention.varlen import VarlenAttention, varlen_fault
from model_server.model.weights import load_checkpoint
from model_server.shapes.shape import kv_groups, single_group
from tests.support.model_server.model import (
    BLOCK_TOKENS,
    CPU,
    reference_logits,
    save_reference,
    step,
    text_of,
)
from tests.support.model_server.varlen import kernel_in_plain_torch, needs_cuda

ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma3": {"num_hidden_layers": 7, "sliding_window": 9, "tie_word_embeddings": True},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def steps() -> Iterator[list[tuple[int, int, int]]]:
    """Yield steps of (sequence, start, length): prefills, chunks and decodes, alone and mixed."""
    yield [(0, 0, 17)]
    yield [(0, 17, 1), (1, 0, 6)]
    yield [(0, 18, 1), (1, 6, 14), (2, 0, 3)]
    yield [(2, 3, 1), (0, 19, 1), (1, 20, 1)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("grouped", [False, True])
def test_steps_are_laid_out_as_the_kernel_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, grouped: bool
) -> None:
    """With the documented arithmetic, slots, block tables, lengths and windows give exact logits."""
    monkeypatch.setattr(varlen_module, "varlen_attn", kernel_in_plain_torch)
    reference = save_reference(tmp_path, architecture, **ARCHITECTURES[architecture])
    model = load_checkpoint(tmp_path, "auto", CPU).model
    groups = kv_groups(model.shape.windows) if grouped else single_group(model.shape.layers)
    pool = VarlenAttention(model.shape, KvLayout(groups, 200, BLOCK_TOKENS), model.dtype, CPU)
    texts = [text_of(30, seed) for seed in range(3)]
    tables = [
        [[50 * text + 6 * index + n for n in range(6)] for index in range(len(groups))] for text in range(3)
    ]
    for parts in steps():
        spans = [(texts[text], Span(start, length, tables[text])) for text, start, length in parts]
        got = step(model, pool, spans)
        want = [
            reference_logits(reference, texts[text][: start + length])[start:]
            for text, start, length in parts
        ]
        torch.testing.assert_close(got, torch.cat(want), atol=5e-4, rtol=1e-4)


def test_the_cpu_and_8_bit_pools_gather(tmp_path: Path) -> None:
    """Without CUDA the kernel is not tried, and the fault says why."""
    save_reference(tmp_path)
    model = load_checkpoint(tmp_path, "auto", CPU).model
    layout = KvLayout(single_group(3), 8, BLOCK_TOKENS)
    for fp8 in (False, True):
        made = new_attention(model.shape, layout, model.dtype, CPU, fp8=fp8)
        assert isinstance(made, SdpaAttention)
    assert varlen_fault(model.shape, 16, torch.bfloat16, CPU) == "it needs CUDA, not cpu"
    on_cuda = varlen_fault(model.shape, 16, torch.float32, torch.device("cuda"))
    assert on_cuda == "it needs 16-bit floats, not torch.float32"


@needs_cuda
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("block_tokens", [16, 32, 64, 256])
def test_both_backends_agree_on_cuda(tmp_path: Path, architecture: str, block_tokens: int) -> None:
    """The kernel and gathering both give the logits of transformers."""
    reference = save_reference(tmp_path, architecture, head_dim=64, **ARCHITECTURES[architecture])
    device = torch.device("cuda")
    model = load_checkpoint(tmp_path, "bfloat16", device).model
    layout = KvLayout(single_group(model.shape.layers), 64, block_tokens)
    pools = [SdpaAttention(model.shape, layout, model.dtype, device)]
    pools.append(SdpaAttention(model.shape, layout, model.dtype, device, fp8=True))
    if varlen_fault(model.shape, block_tokens, model.dtype, device) is None:
        pools.append(VarlenAttention(model.shape, layout, model.dtype, device))  # type: ignore[arg-type]
    text, table = text_of(300), [[5, *range(8, 40)]]
    want = reference_logits(reference, text)
    for pool in pools:
        got, start = [], 0
        for length in (130, 1, 1, 168):
            got.append(step(model, pool, [(text, Span(start, length, table))]).cpu())
            start += length
        error = (torch.cat(got) - want).square().mean().sqrt() / want.std()
        assert error < 0.1


@needs_cuda
@pytest.mark.parametrize("block_tokens", [16, 256])
def test_the_kernel_is_used_where_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, block_tokens: int
) -> None:
    """On CUDA the kernel is used, or the log says why not."""
    save_reference(tmp_path, head_dim=64)
    device = torch.device("cuda")
    model = load_checkpoint(tmp_path, "bfloat16", device).model
    layout = KvLayout(single_group(3), 8, block_tokens)
    made = new_attention(model.shape, layout, model.dtype, device)
    fault = varlen_fault(model.shape, block_tokens, model.dtype, device)
    assert isinstance(made, VarlenAttention if fault is None else SdpaAttention)
    assert (fault is None) == (not caplog.records)
