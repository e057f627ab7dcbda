"""Launching a step: no call waits for the device, and the host sends all numbers of the step in one copy."""

from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_server.attention.triton_paged import TritonAttention
from model_server.config import EngineConfig
from model_server.model.decoder import Decoder
from model_server.model.fused_ops import TORCH_OPS
from model_server.model.lora import LoraAdapter, LoraFactors
from model_server.model.ranks import Ranks
from model_server.model.weights import LoadedModel, load_checkpoint
from model_server.worker import model_runner as runner_module
from model_server.worker.model_runner import ModelRunner
from tests.support.model_server.fake_device import META, BlockingCallError, FakeDevice
from tests.support.model_server.model import CPU, VOCAB_SIZE, save_reference


class NoCopies:
    """A host tier without blocks."""

    block_bytes = 64

    def __init__(self, *_: object) -> None:
        """Take what copies are made for."""


def nothing(query: Tensor, *_: object) -> Tensor:
    """Stand in for a kernel."""
    return query


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Return a runner on the fake device, whose attention launches no kernels."""
    save_reference(tmp_path)
    shape = load_checkpoint(tmp_path, "auto", CPU).model.shape
    attention = partial(TritonAttention, shape)
    monkeypatch.setattr(runner_module, "new_attention", lambda _, *rest, fp8, backend: attention(*rest))
    monkeypatch.setattr(runner_module, "new_copies", NoCopies)
    monkeypatch.setattr(runner_module, "triton_ops", lambda: TORCH_OPS)
    for kernel in ("run_decodes", "run_prefills"):
        monkeypatch.setattr(f"model_server.attention.triton_paged.{kernel}", nothing)
    monkeypatch.setattr(
        "model_server.attention.triton_paged.run_rotate_and_store",
        lambda projected, *_: projected[:, : shape.heads],
    )
    config = EngineConfig(model=str(tmp_path), block_tokens=4, gpu_blocks=16, max_num_seqs=8)
    model = Decoder(shape, torch.bfloat16, META)
    return ModelRunner(LoadedModel(model, frozenset({0})), config, Ranks())


def step(runner: ModelRunner, lengths: list[int], loras: list[int]) -> Tensor:
    """Launch a step of sequences that begin."""
    blocks = [-(-length // 4) for length in lengths]
    spans = [
        (row, 0, length, 0, [array("i", range(count))])
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True))
    ]
    ends = torch.tensor(lengths).cumsum(0) - 1
    return runner.execute_model(array("i", [5] * sum(lengths)), array("i", ends.tolist()), spans, loras, [])


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 9], [7]])
def test_a_step_is_launched_without_waiting(runner: ModelRunner, lengths: list[int]) -> None:
    """Prefills and decodes are launched by one upload, and nothing is read from the device."""
    with FakeDevice() as device:
        logits = step(runner, lengths, [])
    assert logits.shape == (len(lengths), VOCAB_SIZE)
    assert (device.uploads, device.downloads) == (1, 0)


def test_adapters_wait_for_nothing(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of adapters, also those of the last layer, travel in the same upload."""
    factors = LoraFactors(torch.zeros((2, 32), device=META), torch.zeros((64, 2), device=META))
    adapter = LoraAdapter("hash", {(0, "qkv"): factors})
    monkeypatch.setattr(runner_module, "load_adapter", lambda *_: adapter)
    runner.load_adapter("directory", 1)
    with FakeDevice() as device:
        step(runner, [1, 1, 9], [0, 1, 1])
    assert (device.uploads, device.downloads) == (1, 0)


WAITING: dict[str, Callable[[Tensor], object]] = {
    "item": lambda tensor: tensor[0].item(),
    "tolist": lambda tensor: tensor.tolist(),
    "to the host": lambda tensor: tensor.cpu(),
    "where": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 0],
    "numbers": lambda tensor: torch.tensor([1, 2], device=META),
    "move": lambda tensor: torch.zeros(2).to(META),
    "indices": lambda tensor: tensor[[0, 1]],
    "copy": lambda tensor: tensor.copy_(torch.zeros(3)),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_fake_device_fails_on_calls_that_wait(name: str) -> None:
    """Each way to wait for a device fails the test that does it."""
    tensor = torch.zeros(3, device=META)
    with FakeDevice(), pytest.raises((BlockingCallError, RuntimeError)):
        WAITING[name](tensor)
