"""What the engine needs of whatever computes its steps.

In: the scheduler's chunks. Out: sampled tokens, and the means to move KV blocks. It computes nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from model_server.block_copies import BlockCopies
from model_server.requests import ChosenToken
from model_server.scheduler import Chunk
from model_server.shapes import KvGroupSpec


class Runner(Protocol):
    """What computes a step: the model, its KV pool and the sampler."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_groups: tuple[KvGroupSpec, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""

    def run(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        """Compute the chunks; return the next token by request id for each chunk that samples."""

    def block_copies(self, host_blocks: int) -> BlockCopies:
        """Return what copies blocks, with memory for this many in the host tier."""

    def free_kv(self) -> None:
        """Give the pool's memory back."""

    def allocate_kv(self) -> None:
        """Take it again; it holds nothing."""

    def check(self) -> None:
        """Raise WorkerError if a part of it is lost; called between steps, at least once a second."""

    def close(self) -> None:
        """Stop for good; nothing can run any more."""
