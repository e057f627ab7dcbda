"""What batches brought, as the metrics tell it."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig, PodStream
from indexer.flat_index import FlatIndex
from indexer.hybrid import HybridMatcher
from indexer.ingest import Ingest
from indexer.keys import BlockHasher
from indexer.metrics import IndexerMetrics
from indexer.parity import ParityWatch
from indexer.parity_alarm import ParityAlarm
from indexer.peer_metrics import PeerMetrics
from indexer.speculate import Speculation
from indexer.stream import StreamState
from indexer.tiers import Tiers

POD = "10.0.0.1:8000"
STREAM = PodStream(POD, "m", "tcp://127.0.0.1:1")
EVENTS = "llm_d_epp_kv_cache_events_"
INDEX = "llm_d_epp_kv_cache_index_"
OURS = "kvroute_indexer_"


class Bench:
    """The sink of one pod's stream, and its metrics."""

    def __init__(self) -> None:
        config, self.registry = IndexerConfig(block_tokens=1, hash_seed=1), CollectorRegistry()
        index, parity = FlatIndex(1 << 20, Tiers()), ParityWatch()
        speculation = Speculation(index, ttl_s=1.0, max_s=1.0, max_entries=10)
        metrics = IndexerMetrics(self.registry, stats=index.stats, speculative=lambda: 0)
        self.ingest = Ingest(
            config,
            index=index,
            hasher=BlockHasher(1, 1),
            parity=parity,
            alarm=ParityAlarm(parity, metrics),
            hybrid=HybridMatcher(index, 1),
            speculation=speculation,
            metrics=metrics,
            peer_metrics=PeerMetrics(self.registry),
            on_stored=lambda *_: None,
            on_link=lambda *_: None,
            clock=lambda: 1.0,
            wall_clock=lambda: 10.0,
        )
        self.ingest.opened(STREAM)

    def apply(self, *events: dict[str, Any]) -> None:
        """The pod published a batch 2 s ago."""
        self.ingest.received(POD, 1, 0)
        self.ingest.apply(POD, [msgspec.msgpack.encode([8.0, events, None])])

    def metric(self, name: str, **labels: str) -> float | None:
        """A metric's value."""
        return self.registry.get_sample_value(name, labels)


def stored(hashes: list[int], parent: int | None = None, *, copies: bool = False) -> dict[str, Any]:
    """Blocks of one token each, or one copy more of them."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [] if copies else hashes,
        "block_size": 0 if copies else 1,
        "lora_id": None,
        "medium": "GPU",
    }


def removed(*hashes: int) -> dict[str, Any]:
    """Blocks that the pod dropped."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


def test_all_that_batches_bring_is_counted() -> None:
    """Batches, events, blocks and removals add up; the delay counts once the view is no longer built."""
    bench = Bench()
    bench.apply(stored([1, 2, 3]), stored([1], copies=True))
    assert bench.metric(OURS + "event_lag_seconds_count") == 0
    bench.ingest.state(POD, StreamState.EXACT, "")
    bench.apply(stored([4], 3), removed(1, 2, 9))
    bench.ingest.apply(POD, [b"\xc1"])
    told = {
        EVENTS + "dedup_removed_hashes_forwarded_total": 1,
        EVENTS + "dedup_removed_hashes_suppressed_total": 1,
        INDEX + "admissions_total": 4,
        INDEX + "evictions_total": 2,
        OURS + "event_lag_seconds_count": 1,
        OURS + "event_lag_seconds_sum": 2,
    }
    assert {name: bench.metric(name) for name in told} == told
    assert bench.metric(EVENTS + "messages_received_total", pod_identifier=POD) == 2
    assert bench.metric(EVENTS + "removals_skipped_total", reason="unknown_hash") == 1
    assert bench.metric(OURS + "events_total", type="BlockStored") == 3
    assert bench.metric(OURS + "events_total", type="BlockRemoved") == 1
    assert bench.metric(OURS + "rejected_total", reason="broken_batch") == 1


def test_a_pod_that_is_followed_again_is_shown_again() -> None:
    """Its series end with it; the next life begins with the number of orphans that it has then."""
    bench = Bench()
    for _ in range(2):
        assert bench.metric(OURS + "orphans", pod=POD) is None
        bench.apply(stored([2], 1))
        assert bench.metric(OURS + "orphans", pod=POD) == 1
        assert bench.metric(EVENTS + "messages_received_total", pod_identifier=POD) == 1
        bench.ingest.closed(POD)
        assert bench.metric(EVENTS + "messages_received_total", pod_identifier=POD) is None
        bench.ingest.opened(STREAM)
