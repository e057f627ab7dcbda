"""Runs one step on a torch model: chunks of requests in, one sampled token per finished chunk out.

It turns the scheduler's chunks into a flat batch and knows the model, the KV pool and the sampler; it
decides nothing about which requests run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model_server.adjust import SamplingRow
from model_server.attention import KvLayout, Span, new_attention, undivided
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
        attention: The KV pool of all its layers.
        vocab_size: Token ids are below this.
        eos_token_ids: Tokens that end a text.
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
        # One block table a request: layers with a window keep the blocks behind it too.
        layout = KvLayout(undivided(model.shape.layers), num_blocks, block_tokens)
        self.attention = new_attention(model.shape.attention, layout, model.dtype, model.device, fp8=fp8_kv)

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
            [Span(chunk.start, chunk.length, (chunk.live.block_ids,)) for chunk in ordered]
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
