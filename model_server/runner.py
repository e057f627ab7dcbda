"""Runs one step on a torch model: chunks of requests in, one sampled token per finished chunk out.

It turns the scheduler's chunks into a flat batch and knows the model, the KV pool and the sampler; it
decides nothing about which requests run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.adjust import SamplingRow
from model_server.attention import Attention, KvGroupSpec, KvLayout, Span, new_attention, undivided
from model_server.block_copies import BlockCopies, bytes_of_block, new_copies
from model_server.live_request import LiveRequest
from model_server.logprobs import log_probabilities, read_logprobs
from model_server.lora import LoraBatch
from model_server.models import Decoder
from model_server.requests import ChosenToken
from model_server.sampler import sample
from model_server.scheduler import Chunk


class TorchRunner:
    """A model with its KV pool.

    Attributes:
        model: The decoder.
        vocab_size: Token ids are below this.
        eos_token_ids: Tokens that end a text.
        kv_groups: Layers that share a block table.
    """

    def __init__(
        self,
        model: Decoder,
        eos_token_ids: frozenset[int],
        *,
        num_blocks: int,
        block_tokens: int,
        fp8_kv: bool = False,
    ) -> None:
        self.model = model
        self.vocab_size = model.shape.vocab_size
        self.eos_token_ids = eos_token_ids
        self.kv_groups = layer_groups(model)
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
        token_ids: list[int] = []
        last_rows: list[int] = []
        sampling: list[Chunk] = []
        for chunk in ordered:
            token_ids.extend(chunk.live.token_ids[chunk.start : chunk.stop])
            if chunk.samples:
                last_rows.append(len(token_ids) - 1)
                sampling.append(chunk)
        meta = self.attention.prepare(
            [Span(chunk.start, chunk.length, chunk.live.block_ids) for chunk in ordered]
        )
        device = self.model.device
        logits = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(last_rows, dtype=torch.int64, device=device),
            self.attention,
            meta,
            LoraBatch.of([chunk.live.adapter for chunk in ordered for _ in range(chunk.length)], device),
        )
        chosen = self._choose(logits, [chunk.live for chunk in sampling])
        return {chunk.live.request_id: token for chunk, token in zip(sampling, chosen, strict=True)}

    def _choose(self, logits: Tensor, requests: Sequence[LiveRequest]) -> list[ChosenToken]:
        counts = [live.request.sampling.logprobs for live in requests]
        logprobs = log_probabilities(logits, counts)
        tokens = sample(logits, [self._sampling_row(live) for live in requests])
        for live, token in zip(requests, tokens, strict=True):
            if live.request.constraint is not None:
                live.request.constraint.accept(token)
        told = read_logprobs(logprobs, counts, tokens)
        return [ChosenToken(token, entry) for token, entry in zip(tokens, told, strict=True)]

    def _new_attention(self) -> Attention:
        model = self.model
        return new_attention(model.shape.attention, self._layout, model.dtype, model.device, fp8=self._fp8_kv)

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


def layer_groups(model: Decoder) -> tuple[KvGroupSpec, ...]:
    """Return the model's layers by what they keep.

    A model of windows alone keeps everything: where prompts part is told by full attention only, and readers
    of the events can place blocks of a window by those of full attention only.
    """
    groups = model.kv_groups
    return groups if any(group.window_tokens is None for group in groups) else undivided(model.shape.layers)
