"""What the engine's tests share: a model that checks the KV it reads, and listeners that keep what comes."""

import zlib
from collections import defaultdict
from collections.abc import Sequence

from model_server.config import EngineConfig
from model_server.engine import Engine
from model_server.events import AllBlocksCleared, BlockRemoved, KVEvent
from model_server.requests import ChosenToken, GenerationRequest, SamplingParams, TokenOutput
from model_server.scheduler import Chunk

VOCAB_SIZE = 50
EOS = 0


class CheckingRunner:
    """A model without arithmetic: each KV slot holds the token, position and prefix it was computed from.

    The next token is a checksum of the whole text, read from the slots and not from the request, so that
    a wrong, stale or never computed block fails at once.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._slots: dict[int, tuple[int, ...]] = {}
        self.chunks: list[list[tuple[str, int, int]]] = []
        self.fail_next = False

    def run(self, chunks: Sequence[Chunk]) -> dict[str, ChosenToken]:
        """Write all slots of the step, then read each sampling request's whole context."""
        self.chunks.append([(chunk.live.request_id, chunk.start, chunk.length) for chunk in chunks])
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("out of luck")
        for chunk in chunks:
            for position in range(chunk.start, chunk.stop):
                token = chunk.live.token_ids[position]
                before = self._read(chunk, position - 1) if position else ()
                self._slots[self._slot(chunk, position)] = (*before, token)
        tokens: dict[str, ChosenToken] = {}
        for chunk in chunks:
            if chunk.samples:
                text = self._read(chunk, chunk.stop - 1)
                assert list(text) == chunk.live.token_ids, "the KV is not that of the request's tokens"
                tokens[chunk.live.request_id] = ChosenToken(next_token(text))
        return tokens

    def _slot(self, chunk: Chunk, position: int) -> int:
        block_id = chunk.live.block_ids[position // self._block_tokens]
        return block_id * self._block_tokens + position % self._block_tokens

    def _read(self, chunk: Chunk, position: int) -> tuple[int, ...]:
        return self._slots[self._slot(chunk, position)]


class EventLog:
    """Keeps the batches, and mirrors the cache by counting as a listener has to."""

    def __init__(self) -> None:
        self.batches: list[list[KVEvent]] = []
        self.mirror: dict[object, int] = {}

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Apply one step's events."""
        self.batches.append(list(events))
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
            elif isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    assert self.mirror[key] > 0, "removed what was never stored"
                    self.mirror[key] -= 1
                    if not self.mirror[key]:
                        del self.mirror[key]
            else:
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                parent = event.parent_block_hash
                assert parent is None or parent in self.mirror, "a child without its parent"
                for key in event.block_hashes:
                    self.mirror[key] = self.mirror.get(key, 0) + 1


class Outputs:
    """Collects what each request's sink receives."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, TokenOutput] = {}

    def __call__(self, output: TokenOutput) -> None:
        """Take one output; nothing may follow the last one."""
        assert output.request_id not in self.last, "an output after the last one"
        self.tokens[output.request_id].extend(output.token_ids)
        if output.finish_reason is not None:
            self.last[output.request_id] = output


def next_token(text: Sequence[int]) -> int:
    """Return what CheckingRunner generates after a text (never the end of sequence)."""
    return 1 + zlib.crc32(bytes(token % 256 for token in text)) % (VOCAB_SIZE - 1)


def checking_engine(**settings: object) -> tuple[Engine, CheckingRunner, EventLog]:
    """Make an engine around a CheckingRunner, with small defaults."""
    config = EngineConfig(
        **{  # type: ignore[arg-type]
            "block_tokens": 4,
            "gpu_blocks": 16,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            **settings,
        }
    )
    runner, events = CheckingRunner(config.block_tokens), EventLog()
    max_model_len = config.max_model_len or config.gpu_blocks * config.block_tokens
    return Engine(config, runner, events, max_model_len), runner, events


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> GenerationRequest:
    """Make a greedy request."""
    salt = fields.pop("cache_salt", None)
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **fields})  # type: ignore[arg-type]
    return GenerationRequest(name, tuple(prompt), sampling, salt)  # type: ignore[arg-type]


def run_to_end(engine: Engine) -> int:
    """Step until there is nothing left to do, checking the books after each step; returns the steps."""
    steps = 0
    while engine.step():
        engine.check_invariants()
        steps += 1
    return steps
