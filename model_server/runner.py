"""Runs one step on a torch model: chunks of requests in, one sampled token per finished chunk out.

It turns the scheduler's chunks into a flat batch and knows the sampler; the model with its KV pool is behind
`ModelShard`. It decides nothing about which requests run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from model_server.adjust import SamplingRow
from model_server.block_copies import BlockCopies
from model_server.live_request import LiveRequest
from model_server.logprobs import log_probabilities, read_logprobs
from model_server.lora import LoraAdapter
from model_server.requests import ChosenToken
from model_server.sampler import best, sample
from model_server.scheduler import Chunk
from model_server.shapes import KvGroupSpec
from model_server.step import Step


class ModelShard(Protocol):
    """A model with its KV pool: all of it, or rank 0's part with the other ranks behind it."""

    @property
    def kv_groups(self) -> tuple[KvGroupSpec, ...]:
        """Layers that share a block table."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, on all ranks together."""

    def forward(self, step: Step) -> Tensor:
        """Compute a step; returns float32 logits [rows, vocab_size]."""

    def block_copies(self, host_blocks: int) -> BlockCopies:
        """Return what copies blocks, with memory for this many in the host tier."""

    def free_kv(self) -> None:
        """Give the pool's memory back."""

    def allocate_kv(self) -> None:
        """Take it again; it holds nothing."""

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraAdapter:
        """Load an adapter."""

    def check(self) -> None:
        """Raise WorkerError if a rank is lost."""

    def close(self) -> None:
        """Stop the other ranks."""


class TorchRunner:
    """A model with a sampler; see `Runner` for the methods.

    Args:
        shard: The model.
        vocab_size: Token ids are below this.
        eos_token_ids: Tokens that end a text.

    Attributes:
        shard: See above.
        vocab_size: See above.
        eos_token_ids: See above.
        kv_groups: Layers that share a block table.
    """

    def __init__(self, shard: ModelShard, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.shard = shard
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.kv_groups = shard.kv_groups

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        return self.shard.block_bytes

    def block_copies(self, host_blocks: int) -> BlockCopies:
        """Return what copies the pool's blocks, with memory for this many in the host tier."""
        return self.shard.block_copies(host_blocks)

    def free_kv(self) -> None:
        """Give the pool's memory back; nothing can run before `allocate_kv`."""
        self.shard.free_kv()

    def allocate_kv(self) -> None:
        """Take memory for the pool again; it holds nothing."""
        self.shard.allocate_kv()

    def check(self) -> None:
        """Raise WorkerError if a process that computes a part of the model is lost."""
        self.shard.check()

    def close(self) -> None:
        """Stop the processes that compute parts of the model."""
        self.shard.close()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        """Compute a step.

        Args:
            chunks: At most one per request; their blocks are allocated.

        Returns:
            The next token by request id, for each chunk that samples.
        """
        # Single tokens first, by length: that is how attention can batch them with little padding.
        ordered = sorted(chunks, key=lambda chunk: (chunk.length > 1, chunk.stop))
        logits = self.shard.forward(Step.of(ordered))
        sampling = [chunk.live for chunk in ordered if chunk.samples]
        if all(live.takes_best for live in sampling):
            chosen = list(map(ChosenToken, best(logits)))
        else:
            chosen = self._choose(logits, sampling)
        return {live.request_id: token for live, token in zip(sampling, chosen, strict=True)}

    def _choose(self, logits: Tensor, requests: Sequence[LiveRequest]) -> list[ChosenToken]:
        counts = [live.request.sampling.logprobs for live in requests]
        logprobs = log_probabilities(logits, counts)
        tokens = sample(logits, [self._sampling_row(live) for live in requests])
        for live, token in zip(requests, tokens, strict=True):
            if live.request.constraint is not None:
                live.request.constraint.accept(token)
        told = read_logprobs(logprobs, counts, tokens)
        return [ChosenToken(token, entry) for token, entry in zip(tokens, told, strict=True)]

    def _sampling_row(self, live: LiveRequest) -> SamplingRow:
        params = live.request.sampling
        banned: frozenset[int] = frozenset()
        if live.num_generated < params.min_tokens:
            banned = params.stop_token_ids | self.eos_token_ids
        constraint = live.request.constraint
        return SamplingRow(
            params,
            live.sampling_seed,
            live.num_generated,
            banned,
            live.token_ids,
            None if constraint is None else constraint.allowed_bits(),
        )
