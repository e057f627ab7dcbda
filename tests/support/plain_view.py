"""A pod's view the plain way, event by event on plain dictionaries: the oracle for the flat one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.errors import PayloadError
from indexer.keys import Keys
from indexer.views.block_cache import Dropped
from indexer.views.full_reports import Ahead
from indexer.views.pod_view import PodView
from indexer.views.view_parts import Outcome
from indexer.wire.events import EngineHash
from tests.support.decoding import EventBatch, decode_batch
from tests.support.reference_index import ReferenceIndex


def apply_batch(view: PodView, batch: EventBatch, outcome: Outcome | None = None) -> Outcome:
    """Applies a batch's events in order."""
    outcome = outcome or Outcome()
    ahead = Ahead(batch.events)
    for ahead.position, event in enumerate(batch.events):
        view.apply_event(event, ahead, outcome)
    view.end_batch(outcome)
    return outcome


@dataclass(slots=True, eq=False)
class EngineBlock:
    """One engine block.

    Attributes:
        keys: Its index blocks, in order; more than one where the engine's blocks are longer than ours.
        copies: Physical copies by tier, none of them 0.
    """

    keys: Keys
    copies: dict[str, int] = field(default_factory=dict)


class MappedCache:
    """As `FlatCache`, on plain dictionaries: an index and a map of engine blocks, also of those that went."""

    def __init__(self, index: ReferenceIndex, holder: str) -> None:
        self._index = index
        self._holder = holder
        self._blocks: dict[EngineHash, EngineBlock] = {}

    def store(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> int:
        """As `FlatCache` does."""
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
        """As `FlatCache` does."""
        block = self._blocks.get(engine_hash)
        if block is None:
            return False
        self._index.add(self._holder, tier, block.keys)
        self._count(block, tier, 1)
        return True

    def drop(self, engine_hash: EngineHash, tier: str) -> Dropped | None:
        """As `FlatCache` does."""
        block = self._blocks.get(engine_hash)
        if block is None or tier not in block.copies:
            return None
        self._index.remove(self._holder, tier, block.keys)
        self._count(block, tier, -1)
        return Dropped.COPY if tier in block.copies else Dropped.LAST

    def holds_all(self, hashes: Sequence[EngineHash], keys: Keys, tier: str) -> bool:
        """As `FlatCache` does."""
        split = len(keys) // len(hashes)
        for position, engine_hash in enumerate(hashes):
            block = self._blocks.get(engine_hash)
            expected = keys[position * split : (position + 1) * split]
            if block is None or tier not in block.copies or block.keys.tolist() != expected.tolist():
                return False
        return True

    def tail_key(self, engine_hash: EngineHash) -> int | None:
        """As `FlatCache` does."""
        block = self._blocks.get(engine_hash)
        return None if block is None else int(block.keys[-1])

    def clear(self) -> None:
        """As `FlatCache` does."""
        self._blocks.clear()
        self._index.clear_pod(self._holder)

    def _count(self, block: EngineBlock, tier: str, more: int) -> None:
        block.copies[tier] = block.copies.get(tier, 0) + more
        if not block.copies[tier]:
            del block.copies[tier]


class DecodingApplier:
    """As `FlatApplier`, the plain way: decodes each batch, and applies it event by event.

    Args:
        view: The pod's view.
        max_bytes: A longer payload is not read.
    """

    def __init__(self, view: PodView, max_bytes: int) -> None:
        self._view = view
        self._max_bytes = max_bytes

    def apply(self, payloads: Sequence[bytes], *, with_runs: bool = False) -> Outcome:
        """Applies payloads in order, whatever they hold."""
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
            # After a clear in the same batch: nobody knows on which side of it a broken event was.
            for reason in decoded.rejected:
                outcome.reject(reason)
        return outcome
