"""Events that an engine has published, from its replays: to wait for them, and to name causes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq

from indexer.wire.events import BlockRemoved, BlockStored, EngineHash
from tests.support.engines.door import Served
from tests.support.indexer.decoding import EventBatch, decode_batch

_TIMEOUT_MS = 30_000
# A router receives a batch up to this long after the engine's time stamp.
_LATE_S = 0.5
_Block = tuple[int, ...]


class Published:
    """Blocks that an engine has stored and removed, with times."""

    def __init__(self, replay_endpoints: Sequence[str], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._context = zmq.Context()
        self._ranks = [self._context.socket(zmq.DEALER) for _ in replay_endpoints]
        for rank, endpoint in zip(self._ranks, replay_endpoints, strict=True):
            rank.connect(endpoint)
        self._received = [0] * len(self._ranks)
        self._tokens: dict[EngineHash, _Block] = {}
        self._changes: list[tuple[float, str, _Block]] = []

    def close(self) -> None:
        """Close the connections."""
        self._context.destroy(linger=0)

    def receive_all(self) -> int:
        """Receive all that the engine has to publish; return the number of all its batches.

        Its publisher answers one replay, then publishes at most one batch: after two replays without a new
        batch nothing is queued.
        """
        for number in range(len(self._ranks)):
            empty = 0
            while empty < 2:
                batches = list(self._replayed(number))
                self._received[number] += len(batches)
                for batch in batches:
                    self._record(batch)
                empty = 0 if batches else empty + 1
        return sum(self._received)

    def cause(self, served: Served) -> str:
        """Return why a request's prediction differs from what was delivered."""
        if served.degraded is not None:
            return f"not predicted: {served.degraded}"
        first, beyond = sorted((served.predicted, served.delivered))
        length = self._block_tokens
        blocks = {tuple(served.prompt[at : at + length]) for at in range(first, beyond, length)}
        change = "evicted" if served.predicted > served.delivered else "stored"
        for at_s, what, block in self._changes:
            if served.began_s - _LATE_S < at_s < served.ended_s and what == change and block in blocks:
                return f"blocks were {change} between pick and prefill"
        where = ", perhaps on another rank" if len(self._ranks) > 1 else ""
        return f"unexplained, view {served.view}{where}"

    def _record(self, batch: EventBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                known = [self._tokens[name] for name in event.block_hashes if name in self._tokens]
                self._changes += [(batch.ts, "evicted", block) for block in known]
            # A store of a sliding window may have fewer hashes than blocks.
            elif (
                isinstance(event, BlockStored)
                and len(event.token_ids) == len(event.block_hashes) * self._block_tokens
            ):
                for at, name in enumerate(event.block_hashes):
                    block = tuple(event.token_ids[at * self._block_tokens :][: self._block_tokens])
                    self._tokens[name] = block
                    self._changes.append((batch.ts, "stored", block))

    def _replayed(self, number: int) -> Iterator[EventBatch]:
        """Yield the batches of a rank that are not received yet."""
        rank = self._ranks[number]
        rank.send_multipart([b"", self._received[number].to_bytes(8, "big")])
        while rank.poll(_TIMEOUT_MS):
            *_, payload = rank.recv_multipart()
            if not payload:
                return
            yield decode_batch(payload, 1 << 26).batch
        raise AssertionError(f"rank {number} did not finish its replay")
