"""Reference view of a pod: applies events one by one to dictionaries, as an oracle for the flat index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.errors import PayloadError
from indexer.keys import Keys
from indexer.views.block_cache import Dropped
from indexer.views.full_reports import LaterEvents
from indexer.views.pod_view import PodView
from indexer.views.view_parts import Outcome
from indexer.wire.events import EngineHash
from tests.support.indexer.decoding import EventBatch, decode_batch
from tests.support.indexer.reference_index import ReferenceIndex


def apply_batch(view: PodView, batch: EventBatch, outcome: Outcome | None = None) -> Outcome:
    """Apply a batch's events in order."""
    outcome = outcome or Outcome()
    later = LaterEvents(batch.events)
    for later.position, event in enumerate(batch.events):
        view.apply_event(event, later, outcome)
    view.end_batch(outcome)
    return outcome


@dataclass(slots=True, eq=False)
class EngineBlock:
    """Engine block.

    Attributes:
        keys: Keys of its index blocks, in order; several if the engine's blocks are longer.
        copies: Physical copies by tier, without zeros.
    """

    keys: Keys
    copies: dict[str, int] = field(default_factory=dict)


class MappedCache:
    """Reference for `BlockCache` with dictionaries: maps engine blocks, including removed ones, to keys."""

    def __init__(self, index: ReferenceIndex, holder: str) -> None:
        self._index = index
        self._holder = holder
        self._blocks: dict[EngineHash, EngineBlock] = {}

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> int:
        self._index.add(self._holder, tier, keys)
        split = len(keys) // len(hashes)
        reused = 0
        for position, engine_hash in enumerate(hashes):
            block = EngineBlock(keys[position * split : (position + 1) * split])
            known = self._blocks.get(engine_hash)
            if known is not None and known.keys.tolist() != block.keys.tolist():
                reused += bool(known.copies)
                for held_in, copies in known.copies.items():
                    for _ in range(copies):
                        self._index.remove(self._holder, held_in, known.keys)
                known = None
            block = self._blocks[engine_hash] = known or block
            self._count(block, tier, 1)
        return reused

    def copy(self, engine_hash: EngineHash, tier: str) -> bool:
        block = self._blocks.get(engine_hash)
        if block is None:
            return False
        self._index.add(self._holder, tier, block.keys)
        self._count(block, tier, 1)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        block = self._blocks.get(engine_hash)
        if block is None or tier not in block.copies:
            return None
        self._index.remove(self._holder, tier, block.keys)
        self._count(block, tier, -1)
        return Dropped.COPY if tier in block.copies else Dropped.LAST

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        split = len(keys) // len(hashes)
        for position, engine_hash in enumerate(hashes):
            block = self._blocks.get(engine_hash)
            expected = keys[position * split : (position + 1) * split]
            if block is None or tier not in block.copies or block.keys.tolist() != expected.tolist():
                return False
        return True

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        block = self._blocks.get(engine_hash)
        return None if block is None else int(block.keys[-1])

    def clear(self) -> None:
        self._blocks.clear()
        self._index.clear_pod(self._holder)

    def _count(self, block: EngineBlock, tier: str, more: int) -> None:
        block.copies[tier] = block.copies.get(tier, 0) + more
        if not block.copies[tier]:
            del block.copies[tier]


class DecodingApplier:
    """Reference for `EventApplier`: decodes each batch and applies it event by event.

    Args:
        view: The pod's view.
        max_bytes: Longer payloads are rejected.
    """

    def __init__(self, view: PodView, max_bytes: int) -> None:
        self._view = view
        self._max_bytes = max_bytes

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        """Apply payloads in order and count unreadable ones."""
        outcome = Outcome(runs=[] if with_runs else None)
        for payload in payloads:
            try:
                decoded = decode_batch(payload, self._max_bytes)
            except PayloadError as error:
                outcome.reject(error.reason)
                continue
            outcome.events.update(type(event).__name__ for event in decoded.batch.events)
            outcome.published_s.append(decoded.batch.ts)
            apply_batch(self._view, decoded.batch, outcome)
            # Rejected last: a broken event may have come before or after a clear of the same batch.
            for reason in decoded.rejected:
                outcome.reject(reason)
        return outcome
