"""What the indexer keeps of one followed pod: its view, and the way its payloads take into the index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from indexer.applier import Applier, DecodingApplier
from indexer.apply import PodView
from indexer.config import IndexerConfig, PodStream
from indexer.flat_applier import FlatApplier, FlatEngine
from indexer.flat_cache import FlatCache
from indexer.flat_index import FlatIndex
from indexer.hybrid import group_holder
from indexer.index import Index
from indexer.keys import BlockHasher
from indexer.pod_cache import MappedCache, PodCache


@dataclass(frozen=True, slots=True)
class PodState:
    """One followed pod.

    Attributes:
        view: Its view.
        applier: Applies its payloads to the view and the index.
    """

    view: PodView
    applier: Applier


class PodStates:
    """Makes the states of pods, as it suits the index.

    Args:
        config: Bounds of what is remembered.
        index: Where blocks go.
        hasher: Makes their keys.
    """

    def __init__(self, config: IndexerConfig, index: Index, hasher: BlockHasher) -> None:
        self._config = config
        self._index = index
        self._hasher = hasher
        self._flat: FlatEngine | None = None
        if isinstance(index, FlatIndex):
            self._flat = FlatEngine(index, hasher, config.max_payload_bytes)

    def make(self, stream: PodStream) -> PodState:
        """The state of a pod of which nothing is known yet."""
        if self._flat is not None:
            return self._on_flat(stream, self._flat)
        view = self._view(stream, self._mapped)
        return PodState(view, DecodingApplier(view, self._config.max_payload_bytes))

    def _on_flat(self, stream: PodStream, flat: FlatEngine) -> PodState:
        own = FlatCache(flat.index, stream.holder, stream.model)

        def cache(holder: str) -> FlatCache:
            # Other groups name the last index block of an engine block only.
            return own if holder == stream.holder else FlatCache(flat.index, holder, f"{stream.model}#tail")

        view = self._view(stream, cache)
        return PodState(view, FlatApplier(flat, view, own, stream.holder, stream.model))

    def _mapped(self, holder: str) -> MappedCache:
        return MappedCache(
            self._index,
            holder,
            max_held=self._config.engine_hashes_per_pod,
            max_released=self._config.released_hashes_per_pod,
        )

    def _view(self, stream: PodStream, cache: Callable[[str], PodCache]) -> PodView:
        return PodView(
            stream.model,
            cache_of=lambda group: cache(
                stream.holder if group is None else group_holder(stream.holder, group)
            ),
            tiers=self._index.tiers,
            hasher=self._hasher,
            config=self._config,
        )
