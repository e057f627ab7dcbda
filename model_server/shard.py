"""A model, or one rank's part of it, with its KV pool: computes steps, moves blocks.

In: steps as plain numbers. Out: logits, and what copies blocks. It knows neither requests nor samplers.
"""

import os
from itertools import chain, repeat
from pathlib import Path

import torch
from torch import Tensor

from model_server.attention import Attention, KvLayout, new_attention
from model_server.block_copies import BlockCopies, bytes_of_block, new_copies
from model_server.config import TINY_MODEL, EngineConfig
from model_server.errors import ConfigError
from model_server.lora import LoraAdapter, LoraBatch
from model_server.lora_loading import load_adapter
from model_server.models import Decoder
from model_server.parallel.ranks import Ranks
from model_server.shapes import Division, pool_groups
from model_server.step import Step
from model_server.tiny import load_tiny
from model_server.weights import LoadedModel, load_checkpoint, torch_device


class Shard:
    """A model with its KV pool.

    Attributes:
        model: The decoder.
        kv_groups: Layers that share a block table.
    """

    def __init__(self, model: Decoder, *, num_blocks: int, block_tokens: int, fp8_kv: bool = False) -> None:
        self.model = model
        self.kv_groups = pool_groups(model.shape.windows)
        self._layout = KvLayout(self.kv_groups, num_blocks, block_tokens)
        self._fp8_kv = fp8_kv
        self._attention: Attention | None = self._new_attention()

    @property
    def attention(self) -> Attention:
        """The KV pool of all layers."""
        assert self._attention is not None, "the pool's memory was given back"
        return self._attention

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return bytes_of_block(self.attention.block_tensors())

    @torch.inference_mode()
    def forward(self, step: Step) -> Tensor:
        """Compute a step, whose blocks are allocated; returns float32 logits [rows, vocab_size]."""
        device = self.model.device
        meta = self.attention.prepare(step.spans)
        lora = None
        if any(step.adapters):
            of_tokens = map(repeat, step.adapters, (span.length for span in step.spans))
            lora = LoraBatch.of(list(chain.from_iterable(of_tokens)), device)
        return self.model.forward(
            torch.tensor(step.token_ids, dtype=torch.int64, device=device),
            torch.tensor(step.rows, dtype=torch.int64, device=device),
            self.attention,
            meta,
            lora,
        )

    def block_copies(self, host_blocks: int) -> BlockCopies:
        """Return what copies the pool's blocks, with memory for this many in the host tier."""
        return new_copies(self.attention.block_tensors(), host_blocks)

    def free_kv(self) -> None:
        """Give the pool's memory back; nothing can run before `allocate_kv`."""
        self._attention = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def allocate_kv(self) -> None:
        """Take memory for the pool again; it holds nothing."""
        self._attention = self._new_attention()

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraAdapter:
        """Load an adapter, or what this rank needs of it.

        Raises:
            AdapterError: It does not fit the model.
        """
        return load_adapter(directory, name, lora_id, self.model)

    def check(self) -> None:
        """Do nothing: alone there is nobody who could be missing."""

    def close(self) -> None:
        """Do nothing: alone there is nobody to stop."""

    def _new_attention(self) -> Attention:
        model = self.model
        return new_attention(model.shape.attention, self._layout, model.dtype, model.device, fp8=self._fp8_kv)


def load_shard(config: EngineConfig, ranks: Ranks) -> tuple[LoadedModel, Shard]:
    """Load one rank's part of a model and take memory for its KV.

    Args:
        config: Which model, and how much of everything.
        ranks: Who computes it.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        ConfigError: A setting does not fit the model or the machine.
    """
    size = ranks.division.size
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    elif size > 1:
        # Ranks that share the cores must not wait for each other's threads.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // size)))
    device = _device(config.device, ranks.division)
    if config.model == TINY_MODEL:
        loaded = load_tiny(config.dtype, device, ranks)
    else:
        loaded = load_checkpoint(Path(config.model), config.dtype, device, ranks)
    loaded.model.pack()
    try:
        shard = Shard(
            loaded.model,
            num_blocks=config.gpu_blocks,
            block_tokens=config.block_tokens,
            fp8_kv=config.kv_cache_dtype == "fp8",
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"gpu_blocks is {config.gpu_blocks}, but {device} has no memory for them: {error}"
        ) from error
    return loaded, shard


def _device(name: str, division: Division) -> torch.device:
    """Return the rank's device: of several GPUs, the one named and those after it."""
    device = torch_device(name)
    if division.size > 1 and device.type == "cuda":
        device = torch_device(f"cuda:{(device.index or 0) + division.rank}")
        torch.cuda.set_device(device)
    return device
