"""What the indexer keeps of one followed engine: its view, and the way its payloads take into the index."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.apply import PodView
from indexer.config import IndexerConfig, PodStream
from indexer.flat_applier import FlatApplier, FlatEngine
from indexer.flat_cache import FlatCache
from indexer.flat_index import FlatIndex
from indexer.hybrid import group_holder
from indexer.journal import Journal
from indexer.keys import BlockHasher


@dataclass(frozen=True, slots=True)
class PodState:
    """One followed engine.

    Attributes:
        view: Its view.
        applier: Applies its payloads to the view and the index.
        journal: Records what changes in the index.
    """

    view: PodView
    applier: FlatApplier
    journal: Journal


class PodStates:
    """Makes the states of engines.

    Args:
        config: Bounds of what is remembered.
        index: Where blocks go.
        hasher: Makes their keys.
    """

    def __init__(self, config: IndexerConfig, index: FlatIndex, hasher: BlockHasher) -> None:
        self._config = config
        self._hasher = hasher
        self._flat = FlatEngine(index, hasher, config.max_payload_bytes)

    def make(self, stream: PodStream) -> PodState:
        """Make the state of an engine of which nothing is known yet."""
        flat, journal, holder = self._flat, Journal(), stream.holder
        own = FlatCache(flat.index, holder, stream.model, journal=journal)

        def cache_of(group: int | None) -> FlatCache:
            if group is None:
                return own
            # Other groups name the last index block of an engine block only.
            model = f"{stream.model}#tail"
            return FlatCache(flat.index, group_holder(holder, group), model, group, journal)

        view = PodView(
            stream.model,
            cache_of=cache_of,
            tiers=flat.index.tiers,
            hasher=self._hasher,
            config=self._config,
        )
        return PodState(view, FlatApplier(flat, view, own, holder, stream.model), journal)
