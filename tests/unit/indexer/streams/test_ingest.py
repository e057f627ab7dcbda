"""Effects of applied batches, as shown by the metrics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from indexer.audit.mismatch_watch import EVENTS_LATE_MAX_S, TRUSTED_AFTER
from indexer.config import IndexerConfig, PodStream
from indexer.index.contract import StreamState
from indexer.streams.ingest import Ingest

POD = "10.0.0.1:8000"
STREAM = PodStream(POD, "m", "tcp://127.0.0.1:1")
EVENTS = "llm_d_epp_kv_cache_events_"
INDEX = "llm_d_epp_kv_cache_index_"
OURS = "kvroute_indexer_"


class Bench:
    """Ingest of one pod's stream, with its metrics."""

    def __init__(self) -> None:
        config, self.registry = IndexerConfig(block_tokens=1, hash_seed=1), CollectorRegistry()
        ignore, clock = lambda *_: None, lambda: 1.0
        self.ingest = Ingest(config, self.registry, ignore, ignore, clock, wall_clock=lambda: 10.0)
        self.hasher, self.mismatches = self.ingest.hasher, self.ingest.mismatches
        self.ingest.opened(STREAM)

    def apply(self, *events: dict[str, Any]) -> None:
        """Apply a batch that was published 2 s ago."""
        self.ingest.records.received(POD, 1, 0)
        self.ingest.apply(POD, [msgspec.msgpack.encode([8.0, events, None])])

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the value of a metric."""
        return self.registry.get_sample_value(name, labels)


def stored(hashes: list[int], parent: int | None = None, *, copies: bool = False) -> dict[str, Any]:
    """Return stores of blocks of one token each, or of one more copy of them."""
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
    """Return removals of blocks."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


def test_all_that_batches_bring_is_counted() -> None:
    """Batches, events, blocks and removals are counted; the delay counts once the view is not RECOVERING."""
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
    """A pod's series end with it, and start with its present number of pending stores when it returns."""
    bench = Bench()
    for _ in range(2):
        assert bench.metric(OURS + "orphans", pod=POD) is None
        bench.apply(stored([2], 1))
        assert bench.metric(OURS + "orphans", pod=POD) == 1
        assert bench.metric(EVENTS + "messages_received_total", pod_identifier=POD) == 1
        bench.ingest.closed(POD)
        assert bench.metric(EVENTS + "messages_received_total", pod_identifier=POD) is None
        bench.ingest.opened(STREAM)


def state_of(bench: Bench) -> tuple[StreamState, str]:
    """Return the reported state and reason of the pod's view."""
    engine = bench.ingest.engine_registry.engines[POD]
    assert bench.ingest.engine_registry.states[POD] is engine.state
    shown = [state for state in StreamState if bench.metric(OURS + "stream_state", pod=POD, state=state)]
    assert shown == [engine.state]
    return engine.state, engine.reason


def test_a_pod_with_other_tokens_is_stale_until_they_are_right() -> None:
    """A mismatch makes an EXACT view STALE; requests in a row that match make it EXACT again."""
    bench = Bench()
    bench.ingest.state(POD, StreamState.EXACT, "")
    root = bench.hasher.root("m", None, None)

    def send(number: int, prompt: list[int], engine_sees: list[int]) -> None:
        keys = bench.hasher.chain(root, prompt)
        bench.mismatches.expect(number, POD, "m", root, keys, np.array(prompt[:1], np.uint32))
        bench.apply(stored(engine_sees))
        bench.mismatches.settle(number, 0.0)
        bench.mismatches.judge(EVENTS_LATE_MAX_S)
        bench.ingest.reconsider(POD)

    send(0, [1, 2], [1001, 1002])
    assert state_of(bench) == (StreamState.STALE, "other_tokens")
    for number in range(1, TRUSTED_AFTER):
        send(number, [10 * number], [10 * number])
    assert state_of(bench) == (StreamState.STALE, "other_tokens")
    send(TRUSTED_AFTER, [5], [5])
    assert state_of(bench) == (StreamState.EXACT, "")


def test_a_mismatch_does_not_hide_the_streams_own_reason() -> None:
    """A view that is STALE or RECOVERING keeps its own reason; a mismatch shows once it is EXACT."""
    bench = Bench()
    bench.ingest.state(POD, StreamState.EXACT, "")
    bench.apply(stored([1]))
    # A recognised full report: later stores may be reports, too.
    bench.apply(stored([1]), stored([2], 1))
    bench.apply(stored([1, 2]))
    bench.apply(removed(2))
    assert state_of(bench) == (StreamState.STALE, "ambiguous_copies")
    bench.ingest.state(POD, StreamState.RECOVERING, "gap")
    assert state_of(bench) == (StreamState.RECOVERING, "gap")
    bench.ingest.state(POD, StreamState.EXACT, "")
    assert state_of(bench) == (StreamState.STALE, "ambiguous_copies")
    bench.apply(removed(2))
    assert state_of(bench) == (StreamState.EXACT, "")
