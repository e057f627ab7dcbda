"""One rank's part of a model with its KV pool and the host memory behind it: computes steps, moves blocks.

All it takes is plain numbers, so that whoever leads can send them to the other ranks as they are.
"""

import os
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from model_server.attention import Attention, KvLayout, Span, new_attention
from model_server.config import TINY_MODEL, EngineConfig
from model_server.errors import ConfigError
from model_server.kv_cache.host_tier import BlockCopies, Transfer
from model_server.model.lora import LoraAdapter, LoraBatch
from model_server.model.ranks import Ranks
from model_server.model.weights import LoadedModel, load_adapter, load_checkpoint, load_tiny, torch_device
from model_server.shapes import Division, pool_groups
from model_server.worker.block_copies import Done, new_copies

# One sequence's part of a step: its start, its length and its block tables, as in `Span`.
SpanNumbers: TypeAlias = tuple[int, int, Sequence[Sequence[int]]]


class ModelRunner:
    """One rank of a model."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, ranks: Ranks) -> None:
        self.model = loaded.model  # the decoder
        self.eos_token_ids = loaded.eos_token_ids  # tokens that end a text
        self.max_positions = loaded.max_positions  # longest text that the model was made for, in tokens
        self.kv_groups = pool_groups(loaded.model.shape.windows)  # layers that share a block table
        self._layout = KvLayout(self.kv_groups, config.gpu_blocks, config.block_tokens)
        self._fp8_kv = config.kv_cache_dtype == "fp8"
        self._ranks = ranks
        self._attention: Attention | None = None
        self._copies: BlockCopies | None = None  # there are these two while there is memory
        self._transfers: dict[int, Transfer] = {}
        self._adapters: dict[int, LoraAdapter] = {}
        self.allocate(0)
        self.block_bytes = self.copies.block_bytes  # of this rank's part of a block

    @property
    def attention(self) -> Attention:
        assert self._attention is not None, "the pool's memory was given back"
        return self._attention

    @property
    def copies(self) -> BlockCopies:
        assert self._copies is not None, "the memory to copy was given back"
        return self._copies

    def join(self, rendezvous: str) -> None:
        self._ranks.join(Path(rendezvous), self.model.device)

    @torch.inference_mode()
    def execute(
        self,
        token_ids: Sequence[int],
        rows: Sequence[int],
        spans: Sequence[SpanNumbers],
        lora_ids: Sequence[int],
        dropped: Sequence[int],
    ) -> Tensor:
        """Compute a step, whose blocks are allocated.

        Args:
            token_ids: Of all sequences, one after the other.
            rows: The tokens whose next one is wanted.
            spans: The sequences.
            lora_ids: Per span, 0 for the base model; empty if there are no adapters at all.
            dropped: Adapters that no request has any more.

        Returns:
            float32 logits [rows, vocab_size]; on ranks but the first those of its own part.
        """
        for lora_id in dropped:
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
        """Copy device blocks into host slots; `settle` needs the transfer's number."""
        return self._begun(number, self.copies.store(blocks, slots))

    def restore(self, number: int, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host slots into device blocks; `settle` needs the transfer's number."""
        return self._begun(number, self.copies.restore(slots, blocks))

    def settle(self, number: int) -> None:
        """Do nothing more before this transfer is done: others take it as done."""
        self._transfers.pop(number).wait()

    def fence(self) -> None:
        self.copies.fence()

    def allocate(self, host_blocks: int) -> None:
        """Take memory for the pool, if it has none, and for so many host blocks; neither holds anything."""
        model = self.model
        if self._attention is None:
            self._attention = new_attention(
                model.shape.attention, self._layout, model.dtype, model.device, fp8=self._fp8_kv
            )
        self._copies = new_copies(self._attention.block_tensors(), host_blocks)

    def free(self) -> None:
        """Give the memory of both tiers back; nothing can run before it is taken again."""
        self._attention = self._copies = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def load_adapter(self, directory: str, lora_id: int) -> str:
        """Load an adapter, or what this rank needs of it; returns the hash of its content."""
        adapter = load_adapter(Path(directory), self.model)
        self._adapters[lora_id] = adapter
        return adapter.content_hash

    def _begun(self, number: int, transfer: Transfer) -> Transfer:
        if not isinstance(transfer, Done):
            self._transfers[number] = transfer
        return transfer


def load_runner(config: EngineConfig, ranks: Ranks) -> ModelRunner:
    """Load one rank's part of a model and take memory for its KV, or raise a ModelError or a ConfigError."""
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
        return ModelRunner(loaded, config, ranks)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"gpu_blocks is {config.gpu_blocks}, but {device} has no memory for them: {error}"
        ) from error


def _device(name: str, division: Division) -> torch.device:
    """Return the rank's device: of several GPUs, the one named and those after it."""
    device = torch_device(name)
    if division.size > 1 and device.type == "cuda":
        device = torch_device(f"cuda:{(device.index or 0) + division.rank}")
        torch.cuda.set_device(device)
    return device
