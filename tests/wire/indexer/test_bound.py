"""Pods that connect to the indexer: identity, streams, limits and rejected messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from indexer import ConfigError, ListenError, StreamState
from indexer.audit.engine_counters import EngineReading
from tests.support.indexer.bound import ConnectedEngine, declared, known, reason
from tests.support.indexer.engine_publisher import EnginePublisher, removed, wait_until
from tests.support.indexer.subscriber import OTHER, POD, TOKENS, Watched, block, stream
from tests.support.loopback import free_ports

STALE, EXACT, RECOVERING = StreamState.STALE, StreamState.EXACT, StreamState.RECOVERING
BIND = "tcp://127.0.0.1:*"


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer that pods connect to."""
    running = Watched(events_bind=BIND, replay_attempts=4, undeclared_pods=2)
    yield running
    running.indexer.close()


def rejected(watched: Watched, why: str) -> float:
    """Return the number of messages rejected for this reason."""
    return watched.metric("kvroute_indexer_rejected_total", reason=why)


def test_undeclared_pods_are_identified_by_their_topics(watched: Watched) -> None:
    """An undeclared pod is named by its topic, and is EXACT if received from its first batch on."""
    with ConnectedEngine(watched, POD) as first, ConnectedEngine(watched, OTHER) as second:
        first.publish(block(1))
        second.publish(block(1), block(2))
        second.publish(removed([2]))
        watched.settled(1)
        watched.settled(1, pod=OTHER)
        assert watched.links.count((POD, True)) == 1


def test_events_of_shared_stores_are_skipped(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    """A store of a node or of a pool is no pod: its events are counted, logged and skipped."""
    with ConnectedEngine(watched, "node:worker-1") as node, ConnectedEngine(watched, "pool:fs") as pool:
        node.publish(block(1))
        pool.publish(block(1))
        wait_until("they are counted", lambda: rejected(watched, "shared_store") == 2)
    assert not watched.indexer.engine_registry.engines
    assert "store=pool:fs" in caplog.text
    with ConnectedEngine(watched, "node:8000") as engine:
        engine.publish(block(1))
        watched.settled(1, pod="node:8000")


def test_a_models_name_may_have_any_characters(watched: Watched) -> None:
    """Everything after the second '@' of a topic is the model's name."""
    odd = "org/model@rev"
    with ConnectedEngine(watched, POD) as plain, ConnectedEngine(watched, "[fd00::1]:8000", odd) as other:
        plain.publish(block(1))
        other.publish(block(1))
        watched.settled(1)
        known(watched, POD, "[fd00::1]:8000")
        keys = watched.indexer.block_keys(odd, TOKENS)
        wait_until(
            "it is indexed",
            lambda: watched.indexer.match(keys, ["[fd00::1]:8000"])["[fd00::1]:8000"].cached_blocks == 1,
        )


def test_a_lost_connection_is_reported(watched: Watched) -> None:
    """A lost connection is reported immediately; without a replay socket the old view is dropped."""
    with ConnectedEngine(watched, POD) as engine:
        engine.publish(block(1))
        watched.settled(1)
    watched.settled(1, RECOVERING)
    wait_until("the loss is told", lambda: watched.links == [(POD, True), (POD, False)])
    with ConnectedEngine(watched, POD, first=1) as again:
        again.publish(block(2))
        wait_until("it is back", lambda: watched.match().state is STALE)
        assert watched.match().cached_blocks == 0
    with ConnectedEngine(watched, POD) as reborn:
        reborn.publish(block(1))
        watched.settled(1)


def test_what_was_sent_before_a_connection_was_lost_is_applied(watched: Watched) -> None:
    """A lost connection takes effect after its last message."""
    engine = ConnectedEngine(watched, POD)
    for number in (1, 2, 3):
        engine.publish(block(number))
    watched.settled(3)
    engine.close()
    watched.settled(3, RECOVERING)


def test_a_gap_without_replay_clears_the_view(watched: Watched) -> None:
    """A lost batch is detected by its sequence number and clears the view."""
    with ConnectedEngine(watched, POD) as engine:
        engine.publish(block(1))
        watched.settled(1)
        engine.publish(removed([1]), lost=True)
        engine.publish(block(2))
        watched.settled(0, STALE)
        assert watched.metric("kvroute_indexer_gaps_total", pod=POD) == 1


def test_a_declared_pod_has_its_declared_model_and_replay(watched: Watched) -> None:
    """The declaration overrides the topic, and a gap is repaired by the declared replay socket."""
    with EnginePublisher() as history, ConnectedEngine(watched, POD, "served-name") as engine:
        watched.follow(declared(POD, replay_endpoint=history.replay_endpoint))
        known(watched, POD)
        assert watched.match().state is RECOVERING
        for number in (1, 2):
            history.publish(block(number))
            engine.publish(block(number), lost=number == 1)
        watched.settled(2)


def test_the_simulators_first_number_can_be_declared(watched: Watched) -> None:
    """A stream that starts at 1 is EXACT if that is declared, else STALE."""
    watched.follow(declared(POD, first_sequence=1), declared(OTHER))
    known(watched, POD, OTHER)
    with ConnectedEngine(watched, POD, first=1) as first, ConnectedEngine(watched, OTHER, first=1) as second:
        first.publish(block(1))
        second.publish(block(1))
        watched.settled(1)
        watched.settled(1, STALE, pod=OTHER)
        assert reason(watched, OTHER) == "no_history"


def test_a_stream_joined_late_is_exact_once_its_view_is_full(watched: Watched) -> None:
    """A view as large as the engine's memory by its metrics is complete, although its history is missing."""
    watched.follow(declared(POD))
    known(watched, POD)
    with ConnectedEngine(watched, POD, first=1) as engine:
        engine.publish(block(1))
        watched.settled(1, STALE)
        watched.indexer.observe(POD, EngineReading(capacity_blocks=3))
        engine.publish(block(2))
        watched.settled(2)
        assert watched.metric("kvroute_indexer_stream_state", pod=POD, state="EXACT") == 1


def test_ranks_are_engines_of_their_own_behind_one_pod(watched: Watched) -> None:
    """Each rank has its own sequence and blocks; the pod has its best rank's match and worst rank's state."""
    with ConnectedEngine(watched, POD) as zero, ConnectedEngine(watched, POD) as one:
        zero.publish(block(1), rank=0)
        one.publish(block(1), block(2), rank=1)
        watched.settled(2)
        known(watched, POD, f"{POD}@dp1")
        one.publish(removed([2]), rank=1)
        watched.settled(1)
        one.publish(block(2), rank=1, lost=True)
        one.publish(block(3), rank=1)
        watched.settled(1, STALE)


def test_a_declared_pod_without_ranks_is_one_engine(watched: Watched) -> None:
    """The rank in the batches of a pod declared without ranks is ignored."""
    watched.follow(declared(POD))
    known(watched, POD)
    with ConnectedEngine(watched, POD) as engine:
        engine.publish(block(1), rank=3)
        watched.settled(1)
        known(watched, POD)


def test_pods_that_we_connect_to_are_not_taken_twice(watched: Watched) -> None:
    """Messages of a pod that we connect to are rejected at our socket."""
    with EnginePublisher() as dialled, ConnectedEngine(watched, POD) as same:
        watched.follow(stream(dialled), declared(OTHER))
        with ConnectedEngine(watched, OTHER) as connected:
            dialled.publish(block(1))
            watched.settled(1)
            same.publish(block(1), block(2))
            connected.publish(block(1), block(2), block(3))
            watched.settled(3, pod=OTHER)
            wait_until("it is passed over", lambda: rejected(watched, "followed_elsewhere") == 1)
            watched.settled(1)


def test_undeclared_pods_are_bounded(watched: Watched) -> None:
    """Above the limit undeclared pods are rejected and counted while the others are connected."""
    engines = [ConnectedEngine(watched, f"pod-{number}") for number in range(3)]
    for engine in engines[:2]:
        engine.publish(block(1))
    known(watched, "pod-0", "pod-1")
    engines[2].publish(block(1))
    wait_until("it is counted", lambda: rejected(watched, "too_many_pods") == 1)
    known(watched, "pod-0", "pod-1")
    for engine in engines:
        engine.close()


def test_a_disconnected_undeclared_pod_makes_room(watched: Watched) -> None:
    """A disconnected undeclared pod is dropped with its blocks after its time, when its place is needed."""
    watched.indexer.close()
    watched = Watched(events_bind=BIND, undeclared_pods=1, undeclared_forget_s=0.01)
    try:
        with ConnectedEngine(watched, POD) as engine:
            engine.publish(block(1))
            watched.settled(1)
        watched.settled(1, RECOVERING)
        with ConnectedEngine(watched, OTHER) as other:

            def taken() -> bool:
                other.publish(block(1))
                return OTHER in watched.indexer.engine_registry.engines

            wait_until("the other one is taken", taken)
            watched.settled(0, STALE)
    finally:
        watched.indexer.close()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"kv@pod"], "frame_count"),
        ([b"no topic", b"\0" * 8, b""], "topic"),
        ([b"kv@pod@m", b"\0" * 7, b""], "sequence"),
    ],
)
def test_broken_messages_are_counted(watched: Watched, frames: list[bytes], why: str) -> None:
    """A message without a valid topic is counted, and other streams continue."""
    with ConnectedEngine(watched, POD) as engine:
        engine.publish(block(1))
        engine.send(*frames)
        engine.publish(block(2))
        watched.settled(2)
        assert rejected(watched, why) == 1


def test_another_model_under_a_connected_name_is_refused(watched: Watched) -> None:
    """A pod cannot change its model while it is connected."""
    with ConnectedEngine(watched, POD) as engine, ConnectedEngine(watched, POD, "other") as impostor:
        engine.publish(block(1))
        watched.settled(1)
        impostor.publish(block(1), block(2))
        wait_until("it is counted", lambda: rejected(watched, "other_model") == 1)
        watched.settled(1)


@pytest.mark.parametrize("came_first", [False, True])
def test_a_pod_that_is_not_declared_any_more_leaves_nothing(watched: Watched, came_first: bool) -> None:
    """The blocks of a pod go with its declaration; it may return as an undeclared pod."""
    with ConnectedEngine(watched, POD) as engine:
        if came_first:
            engine.publish(block(1))
            known(watched, POD)
        watched.follow(declared(POD), declared(OTHER))
        known(watched, POD, OTHER)
        if not came_first:
            engine.publish(block(1))
        watched.settled(1)
        watched.follow()
        known(watched)
        assert watched.indexer.stats().blocks == 0
        engine.publish(block(2))
        known(watched, POD)
        wait_until("it lacks its beginning", lambda: watched.match().state is STALE)


def test_an_address_in_use_is_an_error(watched: Watched) -> None:
    """Two indexers cannot bind one address."""
    endpoint = watched.indexer.bound_endpoint
    with pytest.raises(ListenError, match="events_bind"):
        Watched(events_bind=endpoint)


def test_a_pod_cannot_connect_to_nowhere() -> None:
    """A stream without an endpoint needs `events_bind`."""
    running = Watched()
    with pytest.raises(ConfigError, match="events_bind"):
        running.follow(declared(POD))
    running.indexer.close()


def test_each_rank_is_followed_at_its_own_port() -> None:
    """Rank n is followed at port + n, and all ranks belong to one pod."""
    events, next_events, replay, next_replay = free_ports(4)
    running = Watched()
    try:
        with (
            EnginePublisher((events, replay)) as zero,
            EnginePublisher((next_events, next_replay)) as one,
        ):
            zero.publish(block(1))
            one.publish(block(1), block(2))
            running.follow(replace(stream(zero), ranks=2))
            running.settled(2)
            assert set(running.indexer.engine_registry.engines) == {POD, f"{POD}@dp1"}
            assert running.links == [(POD, True)]
    finally:
        running.indexer.close()
