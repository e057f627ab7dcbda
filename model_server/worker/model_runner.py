"""Model runner: one rank's share of a model with its KV pool and host memory.

All arguments are plain numbers and strings, so that rank 0 can send them to the other ranks unchanged.
"""

import os
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_server.attention import Attention, KvLayout, Span, new_attention
from model_server.config import TINY_MODEL, EngineConfig
from model_server.errors import ConfigError
from model_server.kv_cache.host_tier import BlockCopies, Transfer
from model_server.model.fused_ops import triton_ops
from model_server.model.lora import LoraAdapter, LoraBatch
from model_server.model.ranks import Ranks
from model_server.model.weights import LoadedModel, load_adapter, load_checkpoint, load_tiny, torch_device
from model_server.shapes.shape import ModelRank, pool_groups
from model_server.worker.block_copies import STAGING_BYTES, CompletedTransfer, new_copies
from model_server.worker.block_tables import BlockTables, SpanNumbers
from model_server.worker.cuda_graphs import Capture, DecodeGraphs, cuda_capture
from model_server.worker.memory import SAMPLING_BYTES, free_host_bytes, peak_cuda_bytes, pool_blocks
from model_server.worker.step_arena import StepArena, arena_bytes


class ModelRunner:
    """One rank of a model: runs steps and copies blocks."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, ranks: Ranks) -> None:
        self.model = loaded.model  # the decoder
        self.eos_token_ids = loaded.eos_token_ids  # end-of-sequence tokens
        self.kv_groups = pool_groups(loaded.model.shape.windows)  # layers that share a block table
        self._config = config
        self._ranks = ranks
        self._transfers: dict[int, Transfer] = {}
        self._adapters: dict[int, LoraAdapter] = {}
        groups, blocks = len(self.kv_groups), self.model.shape.max_positions // config.block_tokens + 1
        self._tables = BlockTables(groups, config.max_num_seqs, blocks)
        self._padding = Span(-1, 1, np.zeros((groups, 1), np.int32))
        self.graphs: DecodeGraphs | None = None
        self._arena: StepArena | None = None
        self._num_blocks = 0
        self.attention: Attention
        self.copies: BlockCopies
        self.bind_thread()
        self.allocate(1, 0)
        self.block_bytes = self.copies.block_bytes  # bytes of this rank's share of a block
        if self.attention.is_capturable:
            self.model.ops = triton_ops()
            size = arena_bytes(
                tokens=config.max_num_batched_tokens,
                sequences=config.max_num_seqs,
                groups=groups,
                blocks=blocks,
            )
            self._arena = StepArena(size, self.model.device)

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
            spans: Sequences, in the order of `token_ids`; those of one token come first.
            lora_ids: Adapter id per sequence, 0 for the base model; empty if none has an adapter.
            unloaded: Ids of adapters to unload first.

        Returns:
            float32 logits [rows, vocab_size]; on ranks above 0 only this rank's share of the vocabulary.
        """
        for lora_id in unloaded:
            self._adapters.pop(lora_id, None)
        applied = [self._tables.apply(span) for span in spans]
        size = None
        if self.graphs is not None and not lora_ids and len(token_ids) == len(rows) == len(spans):
            size = self.graphs.size_for(len(spans))
        if self.graphs is None or size is None:
            return self._forward(token_ids, rows, applied, lora_ids)()
        padding = size - len(spans)
        self._forward([*token_ids, *[0] * padding], range(size), applied + [self._padding] * padding)
        return self.graphs.replay(size)[: len(spans)]

    def _forward(
        self,
        token_ids: Sequence[int],
        rows: Sequence[int],
        spans: Sequence[Span],
        lora_ids: Sequence[int] = (),
    ) -> Callable[[], Tensor]:
        """Upload the numbers of a step, and return the function that computes its logits from them."""
        upload = self._upload if self._arena is None else self._arena.put
        if self._arena is not None:
            self._arena.begin()
        ids, sampled = upload(np.asarray(token_ids, np.int32)), upload(np.asarray(rows, np.int32))
        meta, lora = self.attention.prepare(spans, upload), None
        if lora_ids:
            adapters = [self._adapters[lora_id] if lora_id else None for lora_id in lora_ids]
            of_tokens = map(repeat, adapters, (span.length for span in spans))
            lora = LoraBatch.of(list(chain.from_iterable(of_tokens)), rows, upload)
        if self._arena is not None:
            self._arena.upload()
        return lambda: self.model.forward(ids, sampled, self.attention, meta, lora)

    def capture_graphs(self, capture: Capture) -> None:
        """Capture decode steps; they are replayed until the pool is freed."""

        def prepare(size: int) -> Callable[[], Tensor]:
            return self._forward([0] * size, range(size), [self._padding] * size)

        with torch.inference_mode():
            self.graphs = DecodeGraphs(self._config.max_num_seqs, prepare, capture)

    def _upload(self, numbers: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers).to(self.model.device)

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

    def profile(self) -> int:
        """Return how many blocks this rank's device has memory for; raises a ConfigError if none fits."""
        device, utilization = self.model.device, self._config.gpu_memory_utilization
        assert utilization is not None, "the number of blocks is given"
        taken = 0
        if device.type == "cuda":
            total, taken = peak_cuda_bytes(device, self.warm_up)
            taken += SAMPLING_BYTES * self._config.max_num_seqs * self.model.shape.vocab_size
            if self._config.cpu_blocks or self._config.cpu_gib:
                taken += STAGING_BYTES
        else:
            total = free_host_bytes() // self._ranks.model_rank.size
        return pool_blocks(
            usable_bytes=int(total * utilization), taken_bytes=taken, block_bytes=self.block_bytes
        )

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        """Allocate a pool and `host_blocks` host slots, all empty, and prepare the device for the first step.

        Raises:
            ConfigError: The memory does not suffice.
        """
        model, config = self.model, self._config
        try:
            if not hasattr(self, "attention") or self._num_blocks != num_blocks:
                self._num_blocks = num_blocks
                self.attention = new_attention(
                    model.shape,
                    KvLayout(self.kv_groups, num_blocks, config.block_tokens),
                    model.dtype,
                    model.device,
                    fp8=config.kv_cache_dtype == "fp8",
                    backend=config.attention_backend,
                )
            self.copies = new_copies(self.attention.block_tensors(), host_blocks)
            self._host_blocks = host_blocks
            if self._arena is not None and model.device.type == "cuda":
                self.warm_up()
                if not config.enforce_eager:
                    self.capture_graphs(cuda_capture())
        except (RuntimeError, MemoryError) as error:
            if model.device.type == "cuda" and "out of memory" not in str(error):
                raise  # the device has failed
            raise ConfigError(
                f"{model.device} cannot allocate {num_blocks} blocks, and {host_blocks} on the host: {error}"
            ) from error

    def free(self) -> int:
        """Release both tiers and graphs; return their bytes. No step can run until `allocate`."""
        device = self.model.device
        host_bytes: int = self._host_blocks * self.block_bytes
        freed: int = sum(tensor.nbytes for tensor in self.attention.block_tensors())
        before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self.graphs = None
        self.copies.close()
        del self.attention, self.copies
        if device.type == "cuda":
            torch.cuda.empty_cache()
            freed = before - torch.cuda.memory_reserved(device)
        return freed + host_bytes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the largest step: as many tokens and sequences as there may be, all but one or few decoding."""
        tokens, most = self._config.max_num_batched_tokens, self._config.max_num_seqs
        longest = min(tokens - most + 1, self.model.shape.max_positions)
        prefills = min(most, (tokens - most + 1) // longest)
        # All write to block 0, which is empty, like all others.
        tables = np.zeros((len(self.kv_groups), longest // self._config.block_tokens + 1), np.int32)
        lengths = [1] * (most - prefills) + [longest] * prefills
        rows = np.cumsum(lengths) - 1
        self._forward([0] * sum(lengths), rows.tolist(), [Span(0, length, tables) for length in lengths])()

    def bind_thread(self) -> None:
        """Make the model's GPU current on a thread that loads or runs it; GPU 0 is current otherwise."""
        if self.model.device.type == "cuda" and self.model.device.index is not None:
            torch.cuda.set_device(self.model.device)

    def load_adapter(self, directory: str, lora_id: int) -> str:
        """Load this rank's share of an adapter; return the adapter's content hash."""
        self.bind_thread()
        adapter = load_adapter(Path(directory), self.model)
        self._adapters[lora_id] = adapter
        return adapter.content_hash

    def _track(self, number: int, transfer: Transfer) -> Transfer:
        if not isinstance(transfer, CompletedTransfer):
            self._transfers[number] = transfer
        return transfer


def load_runner(config: EngineConfig, ranks: Ranks) -> ModelRunner:
    """Load one rank's share of a model; may raise a ModelError or ConfigError."""
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
    return ModelRunner(loaded, config, ranks)


def _device(name: str, model_rank: ModelRank) -> torch.device:
    """Return the rank's device: with several GPUs, the named one plus the rank."""
    device = torch_device(name)
    if model_rank.size > 1 and device.type == "cuda":
        device = torch_device(f"cuda:{(device.index or 0) + model_rank.rank}")
    return device
