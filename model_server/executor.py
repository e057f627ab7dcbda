"""All ranks of a model, seen from rank 0: what one does, all do.

In: the scheduler's chunks, block moves, adapters. Out: tokens, and transfers. Each order is a method of
`ModelRunner` with its arguments, called here and, sent as they are, on the other ranks. Whatever goes wrong
in one that others take part in is final: ranks that have lost step would wait for each other, or worse,
compute on different things.
"""

import itertools
import logging
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from model_server.block_copies import Done, Transfer
from model_server.config import EngineConfig
from model_server.errors import AdapterError, WorkerError
from model_server.lora import LoraRequest
from model_server.model_runner import load_runner
from model_server.parallel.messages import Start
from model_server.parallel.ranks import Ranks
from model_server.parallel.workers import Workers
from model_server.requests import ChosenToken
from model_server.scheduler import Chunk
from model_server.shapes import Division
from model_server.step import choose_tokens, step_numbers


class Executor:
    """A model on one rank or several; moves blocks as `BlockCopies` tells.

    Args:
        config: Which model, how much of everything, and how many ranks.

    Attributes:
        runner: Rank 0's part.
        vocab_size: Token ids are below this.
        eos_token_ids: Tokens that end a text.
        max_positions: Longest text that the model was made for, in tokens.
        kv_groups: Layers that share a block table.
        block_bytes: Bytes of one KV block, on all ranks together.

    Raises:
        ModelError: The checkpoint cannot be loaded.
        ConfigError: A setting does not fit the model or the machine.
        WorkerError: A process that should compute a part of the model does not start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._size = size = config.tensor_parallel_size
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()  # filled by whichever thread lets go of an adapter
        ranks = Ranks(Division(0, size))
        with ExitStack() as undo:
            directory = ""
            if size > 1:
                directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvroute-ranks-"))
            undo.callback(ranks.leave)
            self._workers = Workers(size - 1, on_loss=ranks.abort)
            undo.callback(self._workers.close)
            level = logging.getLogger().getEffectiveLevel()
            self._workers.start([Start(config, Division(rank, size), level) for rank in range(1, size)])
            self.runner = load_runner(config, ranks)
            self._workers.confirm()
            if size > 1:
                self._ask("join", str(Path(directory) / "ranks"))
            self._cleanup = undo.pop_all()
        self.vocab_size = self.runner.model.shape.vocab_size
        self.eos_token_ids = self.runner.eos_token_ids
        self.max_positions = self.runner.max_positions
        self.kv_groups = self.runner.kv_groups
        self.block_bytes = self.runner.block_bytes * size

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        """Compute a step.

        Args:
            chunks: At most one per request; their blocks are allocated.

        Returns:
            The next token by request id, for each chunk that samples.

        Raises:
            WorkerError: Nothing can be computed any more.
        """
        # Single tokens first, by length: that is how attention can batch them with little padding.
        ordered = sorted(chunks, key=lambda chunk: (chunk.length > 1, chunk.stop))
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        sampling = [chunk.live for chunk in ordered if chunk.samples]
        try:
            logits = self._tell("execute", *step_numbers(ordered), dropped)
            tokens = choose_tokens(logits, sampling, self.eos_token_ids)
        except torch.AcceleratorError as error:  # told when results are read; each later step would fail, too
            raise WorkerError(f"the device failed and does not recover: {error}") from error
        return {live.request_id: token for live, token in zip(sampling, tokens, strict=True)}

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        """Copy device blocks into host slots."""
        return self._transfer("store", blocks, slots)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> Transfer:
        """Copy host slots into device blocks."""
        return self._transfer("restore", slots, blocks)

    def fence(self) -> None:
        """Let nothing computed next overtake a restore that is under way."""
        self._tell("fence")

    def settle(self, number: int) -> None:
        """Have a transfer that is done here done on all ranks before anything that is told them later."""
        self._tell("settle", number)

    def allocate_host(self, host_blocks: int) -> None:
        """Take memory for so many blocks of the host tier; they hold nothing."""
        self._ask("allocate_host", host_blocks)

    def free_kv(self) -> None:
        """Give the memory of both tiers back; nothing can run before it is taken again."""
        self._ask("free_kv")

    def allocate_kv(self) -> None:
        """Take the pool's memory again; it holds nothing."""
        self._ask("allocate_kv")

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraRequest:
        """Load an adapter on all ranks, which keep it as long as anybody has what this returns.

        Raises:
            AdapterError: It does not fit the model, or changes while it is read.
        """
        try:
            first, *others = self._ask("load_adapter", str(directory), lora_id)
            if any(content_hash != first for content_hash in others):
                raise AdapterError(f"{directory}: the files change while they are read; load it again")
        except AdapterError:
            self._dropped.append(lora_id)
            raise
        adapter = LoraRequest(name, lora_id, first)
        weakref.finalize(adapter, self._dropped.append, lora_id)
        return adapter

    def check(self) -> None:
        """Raise WorkerError if a rank is lost; called between steps, at least once a second."""
        self._workers.check()

    def close(self) -> None:
        """Stop the other ranks; may be called twice."""
        self._cleanup.close()

    def _tell(self, method: str, *args: Any) -> Any:
        """Have all ranks do the same; what comes out of it here is returned."""
        self._workers.tell(method, args)
        try:
            return getattr(self.runner, method)(*args)
        except Exception as error:
            if self._size > 1:
                raise self._workers.loss(f"failed: {error}") from error
            raise

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Have all ranks do the same and wait until they have.

        Returns:
            What comes out of it, by rank.

        Raises:
            ModelServerError: The first failure elsewhere, as this process's own.
            Exception: Whatever goes wrong here, once the others have answered.
        """
        return self._workers.ask(method, args, lambda: getattr(self.runner, method)(*args))

    def _transfer(self, method: str, *args: Sequence[int]) -> Transfer:
        number = next(self._numbers)
        own: Transfer = self._tell(method, number, *args)
        # Copies that are done when their call returns are so on all ranks.
        return own if isinstance(own, Done) else SharedTransfer(number, own, self)


class SharedTransfer:
    """A transfer on all ranks; `executor` settles it on the others once it is done here."""

    def __init__(self, number: int, own: Transfer, executor: Executor) -> None:
        self._number = number
        self._own = own
        self._executor = executor
        self._settled = False

    def done(self) -> bool:
        """Tell whether it is complete."""
        if not self._settled and self._own.done():
            self._settle()
        return self._settled

    def wait(self) -> None:
        """Block until it is."""
        self._own.wait()
        if not self._settled:
            self._settle()

    def _settle(self) -> None:
        self._settled = True
        self._executor.settle(self._number)
