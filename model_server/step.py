"""One step as whatever computes it needs it: plain numbers, the same for every rank.

In: the scheduler's chunks. Out: a flat batch of tokens with their block tables. It computes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model_server.attention import Span
from model_server.lora import LoraAdapter
from model_server.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Step:
    """A flat batch.

    Attributes:
        token_ids: Of all sequences, one after the other.
        rows: The tokens whose next one is wanted.
        spans: The sequences.
        adapters: What changes the model for each span.
    """

    token_ids: Sequence[int]
    rows: Sequence[int]
    spans: Sequence[Span]
    adapters: Sequence[LoraAdapter | None]

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "Step":
        """Put chunks, at most one per request, into one batch."""
        token_ids: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            token_ids.extend(chunk.live.token_ids[chunk.start : chunk.stop])
            if chunk.samples:
                rows.append(len(token_ids) - 1)
        return cls(
            token_ids,
            rows,
            [Span(chunk.start, chunk.length, chunk.live.block_ids) for chunk in chunks],
            [chunk.live.adapter for chunk in chunks],
        )
