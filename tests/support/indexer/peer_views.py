"""One index with the views of two pods, which can be copied from another such index as from a peer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from indexer.config import IndexerConfig, PodStream
from indexer.index.index import FlatIndex
from indexer.keys import BlockHasher, Keys
from indexer.peers.messages import read_messages, snapshot_messages
from indexer.views.applier import ApplierContext, EventApplier
from indexer.views.hybrid import group_holder
from indexer.views.view_parts import Outcome, ViewSnapshot
from indexer.wire.tiers import Tiers
from tests.support.indexer.held_copies import references

PODS = ("10.0.0.1:8000", "10.0.0.2:8000")
MODEL = "m"
TIERS = Tiers()
DIGEST = bytes(16)


class Views:
    """Views of PODS.

    Attributes:
        index: Index with their blocks.
    """

    def __init__(self, block_tokens: int = 4) -> None:
        self.index = FlatIndex(1 << 22, TIERS)
        self._block_tokens = block_tokens
        config = IndexerConfig(block_tokens=block_tokens, hash_seed=1)
        engine = ApplierContext(config, self.index, BlockHasher(block_tokens, 1))
        self.states = {
            pod: EventApplier(engine, PodStream(pod, MODEL, "tcp://127.0.0.1:1", None)) for pod in PODS
        }

    def apply(self, pod: str, payloads: Sequence[bytes]) -> Outcome:
        """Apply payloads to one pod's view."""
        return self.states[pod].apply(payloads)

    def is_listed(self, pod: str) -> bool:
        """Return whether the view of a pod can be exported."""
        return self.states[pod].view.unexportable is None

    def snapshot(self, pod: str) -> ViewSnapshot:
        """Return the snapshot of a pod's view."""
        view = self.states[pod].view
        parts = [part for part in view.parts() if part is not None]
        return ViewSnapshot(7, DIGEST, view.facts(), 0, parts)

    def take(self, pod: str, messages: Sequence[bytes]) -> None:
        """Restore a pod's view from a snapshot."""
        config = IndexerConfig(block_tokens=self._block_tokens)
        snapshot, _ = read_messages(messages, config, len(TIERS.names))
        view = self.states[pod].view
        view.restore_facts(snapshot.facts)
        for part in snapshot.parts:
            view.restore(part)

    def copy(self, other: Views, pod: str) -> None:
        """Copy another index's view of a pod without its recently removed hashes, which a snapshot lacks."""
        other.index.arrays.removed[:] = 0
        self.take(pod, list(snapshot_messages(other.snapshot(pod))))

    def held(self, pod: str, keys: Keys) -> list[list[int]]:
        """Return the tiers in which each of `keys` is held, by the pod and each of its groups."""
        return [self.index.held(keys, holder).tolist() for holder in holders(pod)]

    def copies(self, pod: str) -> dict[tuple[str, str, int], int]:
        """Return the number of copies of each block, by holder and tier."""
        return references(self.index, holders(pod))


def payload(text: tuple[int, ...], start: int = 0) -> bytes:
    """Return a batch that stores the blocks of a chain, from its `start` on."""
    hashes = chain_hashes(text)
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes[start:],
        "parent_block_hash": hashes[start - 1] if start else None,
        "token_ids": [number for number in text[start:] for _ in range(4)],
        "block_size": 4,
    }
    return msgspec.msgpack.encode([1.0, [stored], None])


def removal(text: tuple[int, ...]) -> bytes:
    """Return a batch that removes all blocks of a chain."""
    removed = {"type": "BlockRemoved", "block_hashes": chain_hashes(text), "medium": "GPU"}
    return msgspec.msgpack.encode([1.0, [removed], None])


def chain_hashes(text: tuple[int, ...]) -> list[int]:
    """Return an engine's hashes of the blocks of a chain."""
    hashes, parent = [], 1
    for number in text:
        parent = hash((parent, number)) & 0x7FFF_FFFF_FFFF_FFFF | 1
        hashes.append(parent)
    return hashes


def holders(pod: str) -> list[str]:
    """Return the pod's names in the index."""
    return [pod, *(group_holder(pod, group) for group in range(3))]


def assert_same(first: Outcome, second: Outcome) -> None:
    """Check that two indexes have the same content for a pod."""
    assert +first.events == +second.events
    assert first.rejected == second.rejected
    assert (first.emptied, first.damage) == (second.emptied, second.damage)
    assert +first.skipped == +second.skipped
    assert +first.removals == +second.removals
    assert _joined(first).tolist() == _joined(second).tolist()


def _joined(outcome: Outcome) -> Keys:
    stored = outcome.stored
    return np.concatenate(stored) if stored else np.empty(0, np.uint64)
