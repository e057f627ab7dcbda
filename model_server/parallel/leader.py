"""Rank 0 of a model that several processes compute: its own part, and the others behind it.

In: steps and block moves. Out: logits of the whole model. Whatever goes wrong in a step that the others take
part in is final: ranks that have lost step would wait for each other, or worse, compute on different things.
"""

import logging
import tempfile
import weakref
from collections import deque
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch import Tensor

from model_server.block_copies import BlockCopies
from model_server.config import EngineConfig
from model_server.errors import AdapterError
from model_server.lora import LoraAdapter
from model_server.parallel.copies import SharedCopies
from model_server.parallel.messages import (
    AllocateKv,
    Done,
    Failed,
    FreeKv,
    Join,
    LoadAdapter,
    NewCopies,
    Run,
    Start,
)
from model_server.parallel.ranks import Ranks
from model_server.parallel.workers import Workers
from model_server.shapes import Division
from model_server.shard import Shard, load_shard
from model_server.step import Step
from model_server.weights import LoadedModel


class LeadingShard:
    """Rank 0's part of a model and the processes with the others; see `ModelShard` for the methods.

    Args:
        own: Rank 0's part.
        workers: The others, which have loaded theirs.
        ranks: All of them, connected.
        cleanup: What is to be done at the end.

    Attributes:
        kv_groups: Layers that share a block table.
    """

    def __init__(self, own: Shard, workers: Workers, ranks: Ranks, cleanup: ExitStack) -> None:
        self.kv_groups = own.kv_groups
        self._own = own
        self._workers = workers
        self._ranks = ranks
        self._cleanup = cleanup
        self._dropped: deque[int] = deque()  # filled by whichever thread lets go of an adapter

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block, on all ranks together."""
        return self._own.block_bytes * self._ranks.division.size

    def forward(self, step: Step) -> Tensor:
        """Compute a step on all ranks; returns float32 logits [rows, vocab_size].

        Raises:
            WorkerError: Anything went wrong.
        """
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._workers.tell(Run.of(step, dropped))
        try:
            return self._own.forward(step)
        except Exception as error:
            raise self._workers.loss(f"failed: {error}") from error

    def block_copies(self, host_blocks: int) -> BlockCopies:
        """Return what copies the pools' blocks, with memory for this many in each rank's host tier."""
        own = self._workers.require(NewCopies(host_blocks), partial(self._own.block_copies, host_blocks))
        return SharedCopies(own, self._workers, self._ranks.division.size)

    def free_kv(self) -> None:
        """Give the pools' memory back."""
        self._workers.require(FreeKv(), self._own.free_kv)

    def allocate_kv(self) -> None:
        """Take it again; it holds nothing."""
        self._workers.require(AllocateKv(), self._own.allocate_kv)

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraAdapter:
        """Load an adapter on all ranks.

        Raises:
            AdapterError: It does not fit the model, or changes while it is read.
        """
        order = LoadAdapter(str(directory), name, lora_id)
        try:
            adapter, answers = self._workers.ask(
                order, partial(self._own.load_adapter, directory, name, lora_id)
            )
        except AdapterError:
            self._dropped.append(lora_id)
            raise
        # The others keep it as long as any request here has it.
        weakref.finalize(adapter, self._dropped.append, lora_id)
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, Failed):
                raise answer.error(rank)
            if answer != Done(adapter.content_hash):
                raise AdapterError(f"{directory}: the files change while they are read; load it again")
        return adapter

    def check(self) -> None:
        """Raise WorkerError if a rank is lost."""
        self._workers.check()

    def close(self) -> None:
        """Stop the other ranks; may be called twice."""
        self._cleanup.close()


def lead(config: EngineConfig) -> tuple[LoadedModel, LeadingShard]:
    """Start the other ranks' processes and load the model with them.

    Args:
        config: Which model, how much of everything, and how many ranks.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        ConfigError: A setting does not fit the model or the machine.
        WorkerError: A process does not start.
    """
    size = config.tensor_parallel_size
    ranks = Ranks(Division(0, size))
    with ExitStack() as undo:
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-ranks-"))
        undo.callback(ranks.leave)
        workers = Workers(size - 1, on_loss=ranks.abort)
        undo.callback(workers.close)
        level = logging.getLogger().getEffectiveLevel()
        workers.tell([Start(config, Division(rank, size), level) for rank in range(1, size)])
        loaded, own = load_shard(config, ranks)
        workers.confirm()
        rendezvous = Path(directory) / "ranks"
        workers.require(Join(str(rendezvous)), partial(ranks.join, rendezvous, own.model.device))
        return loaded, LeadingShard(own, workers, ranks, undo.pop_all())
