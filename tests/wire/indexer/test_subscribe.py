"""Following one engine over real sockets: history, gaps, lost links and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from indexer import StreamState
from indexer.audit.mismatch_watch import SentPrompt
from indexer.streams import recovery
from tests.support.indexer.engine_publisher import EnginePublisher, removed, wait_until
from tests.support.indexer.subscriber import POD, Watched, block, stream

STALE = StreamState.STALE


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer."""
    running = Watched(replay_attempts=2)
    yield running
    running.indexer.close()


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    """Start an engine with a replay socket."""
    with EnginePublisher() as publisher:
        yield publisher


@pytest.mark.parametrize("topic_frame", [True, False], ids=["new form", "old form"])
def test_the_first_connection_brings_the_history(watched: Watched, topic_frame: bool) -> None:
    """Batches published before the start are replayed, with both forms of answers."""
    with EnginePublisher(topic_frame=topic_frame) as engine:
        engine.publish(block(1), block(2))
        engine.publish(block(3))
        watched.follow(stream(engine))
        watched.settled(3)


def test_live_events_are_applied_and_reported(watched: Watched, engine: EnginePublisher) -> None:
    """Stores and removals are applied, and stored keys are reported in order."""
    watched.follow(stream(engine))
    watched.settled(0)
    engine.publish(block(1), block(2))
    engine.publish(block(3), block(4))
    engine.publish(removed([4]))
    watched.settled(3)
    assert watched.links == [(POD, True)]
    assert sum(keys for _, keys in watched.stored) == 4


def test_a_tier_without_removals_is_not_proven_and_expires(engine: EnginePublisher) -> None:
    """Blocks of a connector that publishes stores only expire; it is STALE and explained until a removal."""
    watched = Watched(unproven_tier_ttl_s=0.3)
    watched.follow(stream(engine))
    watched.settled(0)
    engine.publish(block(1), block(2), block(3), removed([3]))
    engine.publish(*(block(1, medium="CPU") for _ in range(999)), block(3, medium="CPU"))
    watched.settled(2, STALE)
    assert watched.indexer.engine_registry.engines[POD].reason == "tier_not_proven"
    (fault,) = watched.indexer.faults(POD)
    assert (fault.kind, "cpu" in fault.text) == ("tier_not_proven", True)
    assert watched.indexer.explain(watched.keys, [POD])[0].faults == (fault.text,)
    assert watched.match().blocks_by_tier == {"gpu": 2}
    engine.publish({**removed([1]), "medium": "CPU"})
    watched.settled(2)
    assert watched.indexer.faults(POD) == ()
    watched.indexer.close()


def test_a_gap_triggers_a_replay(
    watched: Watched, engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost batch is replayed, and all batches are applied in order."""
    # Without this a tail check may find the batch before the gap does.
    monkeypatch.setattr(recovery, "QUIET_S", 3600.0)
    watched.follow(stream(engine))
    watched.settled(0)
    engine.wait_for_subscriber()
    engine.publish(block(1))
    engine.publish(removed([1]), lost=True)
    engine.publish(block(1), block(2))
    engine.publish(removed([1]))
    wait_until(
        "both copies were removed",
        lambda: watched.metric("kvroute_indexer_events_total", type="BlockRemoved") == 2,
    )
    watched.settled(0)
    assert watched.indexer.stats().blocks == 1
    assert watched.metric("kvroute_indexer_gaps_total", pod=POD) == 1
    assert watched.metric("kvroute_indexer_pod_clears_total", reason="gap") == 0


def test_a_gap_beyond_the_replay_buffer_clears_the_view(watched: Watched, engine: EnginePublisher) -> None:
    """If the lost batch is unavailable, the view is cleared and STALE, and live events are applied."""
    watched.follow(stream(engine))
    watched.settled(0)
    engine.wait_for_subscriber()
    engine.publish(block(1), block(2))
    watched.settled(2)
    engine.publish(removed([2]), lost=True, forgotten=True)
    engine.publish(removed([1]))
    watched.settled(0, STALE)
    assert watched.indexer.stats().blocks == 0
    engine.publish(block(1))
    watched.settled(1, STALE)


def test_a_replay_socket_that_is_dead_costs_the_history_only(watched: Watched) -> None:
    """After all attempts without an answer the pod is STALE, and its live events are applied."""
    with EnginePublisher(replay=False) as engine, EnginePublisher() as gone:
        dead_endpoint = gone.replay_endpoint
        gone.close()
        engine.publish(block(1))
        endpoint = stream(engine)
        watched.follow(type(endpoint)(POD, endpoint.model, endpoint.events_endpoint, dead_endpoint))
        engine.wait_for_subscriber()
        engine.publish(block(1), block(2))
        watched.settled(2, STALE)
        assert watched.metric("kvroute_indexer_replays_total", outcome="failed") == 1


@pytest.mark.parametrize("answers", [0, 1], ids=["silent at once", "silent halfway"])
def test_a_replay_that_failed_is_tried_again_later(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent replay socket leaves the view STALE, and a later attempt makes it EXACT."""
    monkeypatch.setattr(recovery, "REPAIR_FIRST_S", 0.05)
    watched = Watched(replay_attempts=2, replay_idle_s=0.2)
    with EnginePublisher() as engine:
        for number in (1, 2, 3):
            engine.publish(block(number))
        # Two attempts of the first replay, two of the second.
        engine.silent_after, engine.silent_replays = answers, 4
        watched.follow(stream(engine))
        watched.settled(3)
        assert watched.metric("kvroute_indexer_replays_total", outcome="failed") >= 2
        assert watched.metric("kvroute_indexer_replays_total", outcome="completed") >= 1
        watched.indexer.close()


def test_a_replay_that_falls_silent_is_resumed(watched: Watched, engine: EnginePublisher) -> None:
    """The answers before the silence are kept, and the rest is requested again."""
    for number in (1, 2, 3):
        engine.publish(block(number))
    engine.silent_after = 2
    watched.follow(stream(engine))
    watched.settled(3)
    assert sum(keys for _, keys in watched.stored) == 3
    assert watched.metric("kvroute_indexer_replays_total", outcome="failed") == 0


def test_the_same_process_keeps_its_blocks_when_the_link_was_lost(
    watched: Watched, engine: EnginePublisher
) -> None:
    """After a reconnection the engine is identified, and missed batches are applied."""
    watched.follow(stream(engine))
    engine.publish(block(1))
    engine.publish(block(2))
    watched.settled(2)
    engine.cut_links()
    engine.publish(block(3))
    watched.settled(3)
    assert watched.links == [(POD, True), (POD, False), (POD, True)]
    assert watched.metric("kvroute_indexer_pod_clears_total", reason="process_changed") == 0


def test_a_restart_without_events_is_noticed(watched: Watched, engine: EnginePublisher) -> None:
    """A new process on the same port has an empty cache, even before its first event."""
    engine.publish(block(1), block(2))
    watched.follow(stream(engine))
    watched.settled(2)
    engine.close()
    wait_until("the loss is told", lambda: watched.links == [(POD, True), (POD, False)])
    with EnginePublisher(engine.ports) as reborn:
        watched.settled(0)
        assert watched.indexer.stats().blocks == 0
        reborn.publish(block(1))
        watched.settled(1)


def test_a_restart_with_more_events_than_before_is_noticed(watched: Watched, engine: EnginePublisher) -> None:
    """A new process whose sequence has passed the old one's is detected."""
    engine.publish(block(1), block(2), block(3))
    watched.follow(stream(engine))
    watched.settled(3)
    engine.close()
    with EnginePublisher(engine.ports) as reborn:
        for number in (1, 2):
            reborn.publish(block(number))
        watched.settled(2)
        assert watched.indexer.stats().blocks == 2
        assert watched.metric("kvroute_indexer_pod_clears_total", reason="process_changed") == 1


def test_a_lost_last_batch_is_found_by_the_tail_check(watched: Watched, engine: EnginePublisher) -> None:
    """A loss that no later sequence number shows is found when the stream is quiet."""
    watched.follow(stream(engine))
    engine.publish(block(1))
    watched.settled(1)
    engine.publish(block(2), lost=True)
    watched.settled(2)


def test_without_a_replay_socket_a_stream_is_exact_from_its_first_batch(watched: Watched) -> None:
    """A late start is STALE; a restart received from its first batch on is EXACT."""
    with EnginePublisher(replay=False) as engine:
        engine.publish(block(1))
        watched.follow(stream(engine))
        engine.wait_for_subscriber()
        engine.publish(block(1), block(2))
        watched.settled(2, STALE)
    with EnginePublisher(engine.ports, replay=False) as reborn:
        watched.settled(0, STALE)
        reborn.wait_for_subscriber()
        reborn.publish(block(1))
        watched.settled(1)


def test_an_engine_that_comes_later_is_waited_for(watched: Watched, engine: EnginePublisher) -> None:
    """A pod may be followed before its engine listens."""
    engine.close()
    watched.follow(stream(engine))
    wait_until("it is being waited for", lambda: watched.indexer.states() == {POD: StreamState.RECOVERING})
    with EnginePublisher(engine.ports) as late:
        late.publish(block(1))
        watched.settled(1)


def test_metrics_count_what_happened(watched: Watched, engine: EnginePublisher) -> None:
    """Stores, copies, removals, lookups, hits and lag are counted under the documented names."""
    watched.follow(stream(engine))
    watched.settled(0)
    engine.wait_for_subscriber()
    engine.publish(block(1))
    engine.publish(block(1))
    engine.publish(block(2), removed([1]), removed([2]), removed([9]))
    watched.settled(1)
    engine.publish(["AllBlocksCleared"], block(1))
    wait_until(
        "all batches were applied", lambda: watched.metric("kvroute_indexer_event_lag_seconds_count") == 4
    )
    lookups = watched.metric("llm_d_epp_kv_cache_index_lookup_requests_total")
    hits = watched.metric("llm_d_epp_kv_cache_index_lookup_hits_total")
    watched.match()
    expected = {
        "llm_d_epp_kv_cache_index_admissions_total": 4,
        "llm_d_epp_kv_cache_index_evictions_total": 2,
        "llm_d_epp_kv_cache_index_lookup_requests_total": lookups + 1,
        "llm_d_epp_kv_cache_index_lookup_latency_seconds_count": lookups + 1,
        "llm_d_epp_kv_cache_index_lookup_hits_total": hits + 1,
        "llm_d_epp_kv_cache_index_max_pod_hit_count_total": hits + 1,
        "llm_d_epp_kv_cache_events_dedup_removed_hashes_suppressed_total": 1,
        "llm_d_epp_kv_cache_events_dedup_removed_hashes_forwarded_total": 1,
        "llm_d_epp_kv_cache_events_active_subscribers": 1,
        "kvroute_indexer_blocks": 1,
        "kvroute_indexer_evicted_blocks_total": 0,
    }
    assert {name: watched.metric(name) for name in expected} == expected
    assert watched.metric("kvroute_indexer_capacity_blocks") > 0
    assert watched.metric("llm_d_epp_kv_cache_events_messages_received_total", pod_identifier=POD) == 4
    assert watched.metric("llm_d_epp_kv_cache_events_removals_skipped_total", reason="unknown_hash") == 1
    assert watched.metric("kvroute_indexer_events_total", type="BlockStored") == 4
    assert watched.metric("kvroute_indexer_stream_state", pod=POD, state="EXACT") == 1
    assert watched.metric("kvroute_indexer_orphans", pod=POD) == 0


def test_speculative_blocks_count_until_events_confirm_them(
    watched: Watched, engine: EnginePublisher
) -> None:
    """A request's blocks count for its pod immediately, until the pod's events confirm them."""
    watched.follow(stream(engine))
    watched.settled(0)
    watched.indexer.speculate("r", POD, watched.keys[:3], time.monotonic())
    assert watched.match().cached_blocks == 3
    assert dict(watched.match().blocks_by_tier) == {"speculative": 3}
    assert watched.metric("kvroute_indexer_speculative_entries") == 3
    engine.publish(block(1), block(2), block(3))
    wait_until("they are confirmed", lambda: watched.metric("kvroute_indexer_speculative_entries") == 0)
    engine.publish(removed([2]))
    watched.settled(1)


def test_confirmed_blocks_get_no_speculative_entries(watched: Watched, engine: EnginePublisher) -> None:
    """Of a prompt only blocks that the pod does not hold get speculative entries, if its stream is EXACT."""
    prompt = SentPrompt("m", None, None, np.arange(64, dtype=np.uint32), 2, held_blocks=2)
    watched.indexer.speculate("early", POD, watched.keys[:3], time.monotonic(), prompt)
    assert watched.metric("kvroute_indexer_speculative_entries") == 3
    watched.indexer.settle("early", 0.0, grace_s=0.0)
    watched.follow(stream(engine))
    engine.publish(block(1), block(2))
    watched.settled(2)
    watched.indexer.speculate("r", POD, watched.keys[:3], time.monotonic(), prompt)
    assert watched.metric("kvroute_indexer_speculative_entries") == 1
    assert watched.match().cached_blocks == 3
    watched.indexer.speculate("all", POD, watched.keys[:2], time.monotonic(), prompt)
    assert watched.metric("kvroute_indexer_speculative_entries") == 1
