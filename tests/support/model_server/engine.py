"""Test kit of the engine: a model that checks the KV it reads, and recording callbacks."""

import threading
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from model_server.config import EngineConfig
from model_server.engine.core import EngineCore
from model_server.errors import WorkerError
from model_server.kv_cache.request import ScheduledRequest
from model_server.kv_events.events import AllBlocksCleared, BlockRemoved, KVEvent
from model_server.kv_events.hashing import event_hash
from model_server.requests import (
    ChosenToken,
    EngineCoreOutput,
    EngineCoreRequest,
    LoraRequest,
    SamplingParams,
)
from model_server.shapes.shape import blocks_bound, kv_groups
from model_server.worker.executor import LaunchedStep
from tests.support.model_server.invariants import check_engine

VOCAB_SIZE = 50
EOS = 0


class CheckingRunner:
    """Executor without arithmetic: each KV slot stores the token, position and prefix of its computation.

    The next token is a checksum of the text read from the slots, so that a wrong, stale or uncomputed block
    fails at once. An asynchronous one computes in `LaunchedStep.result`, too: a device may be that late. So
    freeing, reusing or changing anything of a launched step fails the test.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})

    block_bytes = 64

    def __init__(
        self, block_tokens: int, windows: Sequence[int | None] = (None,), polls_per_copy: int = 0
    ) -> None:
        self.kv_groups = kv_groups(windows)
        self._block_tokens = block_tokens
        self._polls_per_copy = polls_per_copy
        self._blocks: dict[int, dict[int, tuple[int, ...]]] = {}
        self._copies = SlowCopies(self._blocks, 0, polls_per_copy)
        self.chunks: list[list[tuple[str, int, int]]] = []
        self.fail_next = False
        self.fail_launch = False
        self.is_async = False
        self.log: list[object] = []  # "launch" and "result"; tests add what is sent
        self.bound: list[str] = []  # names of the threads that were bound

    def allocate(self, host_blocks: int) -> None:
        """Start with an empty host tier."""
        self._copies = SlowCopies(self._blocks, host_blocks, self._polls_per_copy)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> "LateTransfer":
        """Start copying blocks to the host tier."""
        return self._copies.store(blocks, slots)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> "LateTransfer":
        """Start copying slots to the device."""
        return self._copies.restore(slots, blocks)

    def fence(self) -> None:
        """Complete the restores."""
        self._copies.fence()

    def free(self) -> int:
        """Drop all KV slots."""
        self._blocks.clear()
        return 0

    def load_adapter(self, directory: Path, name: str, lora_id: int) -> LoraRequest:
        """Return an adapter without weights."""
        return LoraRequest(name, lora_id, "", directory)

    def check_health(self) -> None:
        """Do nothing: no rank can be lost."""

    def raise_if_fatal(self, error: Exception) -> None:
        """Raise a WorkerError again; survive everything else."""
        if isinstance(error, WorkerError):
            raise error

    def bind_thread(self) -> None:
        """Record the calling thread."""
        self.bound.append(threading.current_thread().name)

    def close(self) -> None:
        """Do nothing."""

    def launch(self, chunks: Sequence[ScheduledRequest]) -> LaunchedStep:
        """Start a step that is computed when its result is asked for."""
        self.log.append("launch")
        if self.fail_launch:
            self.fail_launch = False
            raise RuntimeError("out of luck")
        return LaunchedStep(partial(self._result, chunks))

    def _result(self, chunks: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
        self.log.append("result")
        return self.execute_model(chunks)

    def execute_model(self, chunks: Sequence[ScheduledRequest]) -> dict[str, ChosenToken]:
        """Write all slots of the step, then read the context of each request's last token."""
        self.chunks.append([(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in chunks])
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of luck")
        for chunk in chunks:
            for position in range(chunk.start, chunk.stop):
                text = (
                    *(self._read(chunk, 0, position - 1) if position else ()),
                    chunk.request.token_ids[position],
                )
                for group in range(len(self.kv_groups)):
                    block = self._blocks.setdefault(self._block_id(chunk, group, position), {})
                    block[position % self._block_tokens] = text
        tokens: dict[str, ChosenToken] = {}
        for chunk in chunks:
            self._check_context(chunk)
            if chunk.samples:
                text = self._read(chunk, 0, chunk.stop - 1)
                tokens[chunk.request.request_id] = ChosenToken(next_token(text))
        return tokens

    def _check_context(self, chunk: ScheduledRequest) -> None:
        text = tuple(chunk.request.token_ids)
        for number, group in enumerate(self.kv_groups):
            window = group.window_tokens
            first = 0 if window is None else max(0, chunk.start + 1 - window)
            for position in range(first, chunk.stop):
                read = self._read(chunk, number, position)
                assert read == text[: position + 1], "the KV is not that of the request's tokens"

    def _block_id(self, chunk: ScheduledRequest, group: int, position: int) -> int:
        return chunk.request.block_ids[group][position // self._block_tokens]

    def _read(self, chunk: ScheduledRequest, group: int, position: int) -> tuple[int, ...]:
        return self._blocks[self._block_id(chunk, group, position)][position % self._block_tokens]


class SlowCopies:
    """Copies of a CheckingRunner's blocks that complete as late as on a GPU.

    A store reads at once. A restore writes when it completes: after some polls, at a wait, or at a fence. So
    reading, reusing or announcing a block too early fails the test.
    """

    block_bytes = 64

    def __init__(self, blocks: dict[int, dict[int, tuple[int, ...]]], host_blocks: int, polls: int) -> None:
        self._device = blocks
        self._host: dict[int, dict[int, tuple[int, ...]]] = {}
        self._host_blocks = host_blocks
        self._polls = polls
        self._restores: list[LateTransfer] = []

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> "LateTransfer":
        """Read the blocks now; write the host slots later."""
        assert all(slot < self._host_blocks for slot in slots)
        read = [dict(self._device[block]) for block in blocks]
        return LateTransfer(lambda: self._host.update(zip(slots, read, strict=True)), self._polls)

    def restore(self, slots: Sequence[int], blocks: Sequence[int]) -> "LateTransfer":
        """Write the device blocks later."""

        def write() -> None:
            for slot, block in zip(slots, blocks, strict=True):
                self._device[block] = dict(self._host[slot])

        self._restores.append(LateTransfer(write, self._polls))
        return self._restores[-1]

    def fence(self) -> None:
        """Complete the restores."""
        for transfer in self._restores:
            transfer.wait()
        self._restores.clear()


class LateTransfer:
    """Transfer that completes after some polls or when awaited."""

    def __init__(self, effect: Callable[[], None], polls: int) -> None:
        self._effect: Callable[[], None] | None = effect
        self._polls = polls

    def done(self) -> bool:
        """Count a poll."""
        self._polls -= 1
        if self._polls < 0:
            self.wait()
        return self._effect is None

    def wait(self) -> None:
        """Complete now."""
        if self._effect is not None:
            self._effect()
            self._effect = None


class EventLog:
    """Records the batches and mirrors the cache by counting copies, as a subscriber must."""

    def __init__(self) -> None:
        self.batches: list[list[KVEvent]] = []
        self.mirror: dict[tuple[str | None, int | None, object], int] = {}

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Apply one step's events."""
        self.batches.append(list(events))
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
                continue
            names = [(event.medium, event.group_idx, key) for key in event.block_hashes]
            if isinstance(event, BlockRemoved):
                for name in names:
                    assert self.mirror[name] > 0, "removed what was never stored"
                    self.mirror[name] -= 1
                    if not self.mirror[name]:
                        del self.mirror[name]
            else:
                assert event.token_ids, "a store without tokens"
                if event.kv_cache_spec_kind == "full_attention":
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                for name in names:
                    self.mirror[name] = self.mirror.get(name, 0) + 1


def cached_copies(engine: EngineCore) -> dict[tuple[str | None, int | None, object], int]:
    """Return the mirror that a subscriber must have."""
    return Counter(
        (medium, content.group, event_hash(content.block_hash))
        for medium, contents in engine.kv_cache.contents().items()
        for content in contents
    )


class Outputs:
    """Output callback that records each request's tokens and last output."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.logprobs: dict[str, list[dict[int, float]]] = defaultdict(
            list
        )  # of the top tokens, if requested
        self.last: dict[str, EngineCoreOutput] = {}

    def __call__(self, output: EngineCoreOutput) -> None:
        """Record one output; none may follow the last one."""
        assert output.request_id not in self.last, "an output after the last one"
        self.tokens[output.request_id].extend(output.token_ids)
        self.logprobs[output.request_id].extend(dict(one.top) for one in output.logprobs or ())
        if output.finish_reason is not None:
            self.last[output.request_id] = output


def next_token(text: Sequence[int]) -> int:
    """Return the token that CheckingRunner generates after a text; never the end of sequence."""
    return 1 + zlib.crc32(bytes(token % 256 for token in text)) % (VOCAB_SIZE - 1)


def checking_engine(
    windows: Sequence[int | None] = (None,),
    polls_per_copy: int = 0,
    is_async: bool = False,
    **settings: object,
) -> tuple[EngineCore, CheckingRunner, EventLog]:
    """Return an engine around a CheckingRunner, with small defaults.

    Args:
        windows: Sliding windows of the model's layers in tokens; None for full attention.
        polls_per_copy: Polls until a copy between the tiers completes.
        is_async: Whether a step's events and outputs are sent during the next step.
        settings: Fields of EngineConfig.
    """
    config = EngineConfig(
        **{  # type: ignore[arg-type]
            "block_tokens": 4,
            "gpu_blocks": 16,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            **settings,
        }
    )
    runner, events = CheckingRunner(config.block_tokens, windows, polls_per_copy), EventLog()
    runner.is_async = is_async

    def blocks(num_tokens: int) -> int:
        return blocks_bound(runner.kv_groups, num_tokens, config.max_num_batched_tokens, config.block_tokens)

    longest = bisect_right(range(1 << 16), config.gpu_blocks, key=blocks) - 1
    max_model_len = config.max_model_len or longest
    # Looked up at each call, so that a test can replace it.
    return EngineCore(config, runner, lambda batch: events.publish(batch), max_model_len), runner, events


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> EngineCoreRequest:
    """Return a greedy request."""
    own = {name: fields.pop(name) for name in ("cache_salt", "priority") if name in fields}
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **fields})  # type: ignore[arg-type]
    return EngineCoreRequest(name, tuple(prompt), sampling, **own)  # type: ignore[arg-type]


def run_to_end(engine: EngineCore) -> int:
    """Step until nothing is left to do, checking block accounting after each step; return the steps."""
    steps = 0
    while engine.step():
        check_engine(engine)
        steps += 1
    return steps
