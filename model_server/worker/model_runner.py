"""Model runner: one rank's share of a model with its KV pool and host memory.

All arguments are plain numbers and strings, so that rank 0 can send them to the other ranks unchanged.
"""

import os
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from model_server.attention import KvLayout, Span, new_attention
from model_server.config import TINY_MODEL, EngineConfig
from model_server.errors import ConfigError
from model_server.kv_cache.host_tier import Transfer
from model_server.model.lora import LoraAdapter, LoraBatch
from model_server.model.ranks import Ranks
from model_server.model.weights import LoadedModel, load_adapter, load_checkpoint, load_tiny, torch_device
from model_server.shapes.shape import ModelRank, pool_groups
from model_server.worker.block_copies import CompletedTransfer, new_copies

# One sequence of a step: start, length and block tables, the fields of `Span`.
SpanNumbers: TypeAlias = tuple[int, int, Sequence[Sequence[int]]]


class ModelRunner:
    """One rank of a model: runs steps and copies blocks."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, ranks: Ranks) -> None:
        self.model = loaded.model  # the decoder
        self.eos_token_ids = loaded.eos_token_ids  # end-of-sequence tokens
        self.kv_groups = pool_groups(loaded.model.shape.windows)  # layers that share a block table
        self._layout = KvLayout(self.kv_groups, config.gpu_blocks, config.block_tokens)
        self._fp8_kv = config.kv_cache_dtype == "fp8"
        self._ranks = ranks
        self._transfers: dict[int, Transfer] = {}
        self._adapters: dict[int, LoraAdapter] = {}
        self.allocate(0)
        self.block_bytes = self.copies.block_bytes  # bytes of this rank's share of a block

    def join(self, rendezvous: str) -> None:
        self._ranks.join(Path(rendezvous), self.model.device)

    @torch.inference_mode()
    def execute_model(
        self,
        token_ids: Sequence[int],
        rows: Sequence[int],
        spans: Sequence[SpanNumbers],
        lora_ids: Sequence[int],
        unloaded: Sequence[int],
    ) -> Tensor:
        """Run the forward pass of one step. The blocks are allocated.

        Args:
            token_ids: Token ids to compute, of all sequences concatenated.
            rows: Indices into `token_ids` whose logits are returned.
            spans: Sequences, in the order of `token_ids`.
            lora_ids: Adapter id per sequence, 0 for the base model; empty if none has an adapter.
            unloaded: Ids of adapters to unload first.

        Returns:
            float32 logits [rows, vocab_size]; on ranks above 0 only this rank's share of the vocabulary.
        """
        for lora_id in unloaded:
            self._adapters.pop(lora_id, None)
        device = self.model.device
        meta = self.attention.prepare([Span(*span) for span in spans])
        lora = None
        if lora_ids:
            adapters = [self._adapters[lora_id] if lora_id else None for lora_id in lora_ids]
            of_tokens = map(repeat, adapters, (length for _, length, _ in spans))
            lora = LoraBatch.of(list(chain.from_iterable(of_tokens)), device)
        return self.model.forward(
            torch.tensor(token_ids, dtype=torch.int64, device=device),
            torch.tensor(rows, dtype=torch.int64, device=device),
            self.attention,
            meta,
            lora,
        )

    def store(self, number: int, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Copy device blocks into host slots; `number` identifies the transfer for `wait_transfer`."""
        return self._track(number, self.copies.store(blocks, slots))

    def restore(self, number: int, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host slots into device blocks; `number` identifies the transfer for `wait_transfer`."""
        return self._track(number, self.copies.restore(slots, blocks))

    def wait_transfer(self, number: int) -> None:
        """Block until a transfer is done, because rank 0 already treats it as done."""
        self._transfers.pop(number).wait()

    def fence(self) -> None:
        self.copies.fence()

    def allocate(self, host_blocks: int) -> None:
        """Allocate the pool, if it is released, and `host_blocks` host slots; all are empty."""
        model = self.model
        if not hasattr(self, "attention"):
            self.attention = new_attention(
                model.shape, self._layout, model.dtype, model.device, fp8=self._fp8_kv
            )
        self.copies = new_copies(self.attention.block_tensors(), host_blocks)

    def free(self) -> None:
        """Release the memory of both tiers. No step can run until `allocate`."""
        self.copies.close()
        del self.attention, self.copies
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def load_adapter(self, directory: str, lora_id: int) -> str:
        """Load this rank's share of an adapter; return the adapter's content hash."""
        adapter = load_adapter(Path(directory), self.model)
        self._adapters[lora_id] = adapter
        return adapter.content_hash

    def _track(self, number: int, transfer: Transfer) -> Transfer:
        if not isinstance(transfer, CompletedTransfer):
            self._transfers[number] = transfer
        return transfer


def load_runner(config: EngineConfig, ranks: Ranks) -> ModelRunner:
    """Load one rank's share of a model and allocate its KV pool; may raise a ModelError or ConfigError."""
    size = ranks.model_rank.size
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    elif size > 1:
        # Ranks share the CPU cores, so divide the threads among them.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // size)))
    device = _device(config.device, ranks.model_rank)
    if config.model == TINY_MODEL:
        loaded = load_tiny(config.dtype, device, ranks)
    else:
        loaded = load_checkpoint(Path(config.model), config.dtype, device, ranks)
    loaded.model.pack()
    try:
        return ModelRunner(loaded, config, ranks)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"gpu_blocks is {config.gpu_blocks}, but {device} cannot allocate them: {error}"
        ) from error


def _device(name: str, model_rank: ModelRank) -> torch.device:
    """Return the rank's device: with several GPUs, the named one plus the rank."""
    device = torch_device(name)
    if model_rank.size > 1 and device.type == "cuda":
        device = torch_device(f"cuda:{(device.index or 0) + model_rank.rank}")
        torch.cuda.set_device(device)
    return device
