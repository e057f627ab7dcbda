"""Metrics of how views are built, and of the snapshots that peers ask each other for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_OURS = "kvroute_indexer_"
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class PeerMetrics:
    """All of them, of one indexer.

    Args:
        registry: Where they are registered.

    Attributes:
        bootstraps: Views that settled, by source.
        snapshot_bytes: Of snapshots that were applied, by source.
        snapshot_s: From asking for a snapshot to its last part being applied.
        asked: Snapshots that peers were asked for, by outcome.
        told: Snapshots that peers asked us for, by outcome.
        told_bytes: Of those that were told.
        told_s: From being asked to the last message being taken.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_OURS + name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(_OURS + name, text, labels, registry=registry, buckets=_BUCKETS_S)

        self.bootstraps = counter("bootstraps", "Views built, by where they come from.", "source")
        self.snapshot_bytes = counter("snapshot_bytes", "Bytes of snapshots applied.", "source")
        self.snapshot_s = histogram("snapshot_seconds", "From asking for one to applied.", "source")
        self.asked = counter("peer_snapshots", "Snapshots asked of peers, by how it went.", "outcome")
        self.told = counter("told_snapshots", "Snapshots that peers asked for, by how it went.", "outcome")
        self.told_bytes = counter("told_snapshot_bytes", "Bytes of snapshots told to peers.")
        self.told_s = histogram("told_snapshot_seconds", "From being asked for one to told.")
