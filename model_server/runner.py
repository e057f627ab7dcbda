"""Runs one step on a torch model: chunks of requests in, one sampled token per finished chunk out.

It turns the scheduler's chunks into a flat batch and knows the model, the KV pool and the sampler; it
decides nothing about which requests run.
"""

from collections.abc import Sequence

import torch

from model_server.attention import SdpaAttention, Span
from model_server.live_request import LiveRequest
from model_server.models import DecoderModel
from model_server.sampler import SamplingRow, sample
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
        self, model: DecoderModel, eos_token_ids: frozenset[int], *, num_blocks: int, block_tokens: int
    ) -> None:
        shape = model.shape
        self.model = model
        self.vocab_size = shape.vocab_size
        self.eos_token_ids = eos_token_ids
        self.attention = SdpaAttention(
            num_layers=shape.layers,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=model.dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> dict[str, int]:
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
        )
        tokens = sample(logits, [self._sampling_row(chunk.live) for chunk in sampling])
        return {chunk.live.request_id: token for chunk, token in zip(sampling, tokens, strict=True)}

    def _sampling_row(self, live: LiveRequest) -> SamplingRow:
        params = live.request.sampling
        banned: frozenset[int] = frozenset()
        if live.num_generated < params.min_tokens:
            banned = params.stop_token_ids | self.eos_token_ids
        return SamplingRow(params, live.sampling_seed, live.num_generated, banned)
