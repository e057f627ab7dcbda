"""Views built from snapshots over real sockets: late starts, gaps, restarts and invalid answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from indexer import PodStream, StreamState
from indexer.audit.engine_counters import EngineReading, Finding
from indexer.streams import recovery
from tests.support.indexer.engine_publisher import EnginePublisher, batch, removed, wait_until
from tests.support.indexer.snapshots import SnapshotServer, body
from tests.support.indexer.subscriber import POD, Watched, block, stream

STALE, RECOVERING = StreamState.STALE, StreamState.RECOVERING


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer."""
    running = Watched(replay_attempts=2, snapshot_max_bytes=10_000, snapshot_total_s=20.0)
    yield running
    running.indexer.close()


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    """Start an engine without a replay socket."""
    with EnginePublisher(replay=False) as publisher:
        yield publisher


def with_snapshots(engine: EnginePublisher, server: SnapshotServer) -> PodStream:
    """Return the engine's stream, with snapshots from this server."""
    return replace(stream(engine), snapshot_url=server.url)


def outcome(watched: Watched, name: str) -> float:
    """Return the number of snapshots with this outcome."""
    return watched.metric("kvroute_indexer_snapshots_total", outcome=name)


def test_a_late_start_is_exact_from_a_snapshot(watched: Watched, engine: EnginePublisher) -> None:
    """A snapshot has the batches published before the start; later ones are applied to it."""
    engine.publish(block(1))
    engine.publish(block(2))
    with SnapshotServer(lambda _: (200, body(2, batch(block(1)), batch(block(2))))) as server:
        watched.follow(with_snapshots(engine, server))
        watched.settled(2)
        assert watched.indexer.ready()
        engine.publish(removed([2]))
        watched.settled(1)
        assert outcome(watched, "completed") == 1


def test_batches_that_are_in_the_snapshot_are_not_applied_twice(
    watched: Watched, engine: EnginePublisher
) -> None:
    """Live batches wait for the snapshot; those that it includes are dropped, later ones applied."""

    def answer(_: int) -> tuple[int, bytes]:
        for number in (1, 2, 3):
            engine.publish(block(number))
        return 200, body(2, batch(block(1), block(2)))

    with SnapshotServer(answer) as server:
        watched.follow(with_snapshots(engine, server))
        watched.settled(3)
        engine.publish(removed([1]))
        watched.settled(0)
        engine.publish(removed([2, 3]))
        wait_until("all copies are gone", lambda: watched.indexer.stats().blocks == 0)


def test_a_gap_without_replay_triggers_a_snapshot(watched: Watched, engine: EnginePublisher) -> None:
    """A new snapshot repairs a gap, and the pod is EXACT afterwards."""
    bodies = [body(0), body(3, batch(block(1), block(2), block(3)))]
    with SnapshotServer(lambda number: (200, bodies[number])) as server:
        watched.follow(with_snapshots(engine, server))
        watched.settled(0)
        engine.wait_for_subscriber()
        engine.publish(block(1))
        watched.settled(1)
        engine.publish(block(2), lost=True)
        engine.publish(block(3))
        watched.settled(3)
        assert watched.metric("kvroute_indexer_pod_clears_total", reason="gap") == 1


def test_a_lost_link_triggers_a_new_snapshot(watched: Watched, engine: EnginePublisher) -> None:
    """After a lost link without a replay socket the old process's view is dropped."""
    bodies = [body(1, batch(block(1), block(2))), body(1, batch(block(1)))]
    with SnapshotServer(lambda number: (200, bodies[number])) as server:
        watched.follow(with_snapshots(engine, server))
        watched.settled(2)
        engine.close()
        with EnginePublisher(engine.ports, replay=False):
            watched.settled(1)
            assert watched.indexer.stats().blocks == 1


def test_without_a_snapshot_the_history_is_replayed(watched: Watched) -> None:
    """An engine without snapshots is followed by replay."""
    with EnginePublisher() as engine, SnapshotServer(lambda _: (404, b"")) as server:
        engine.publish(block(1))
        watched.follow(with_snapshots(engine, server))
        watched.settled(1)
        assert outcome(watched, "not_offered") == 1


@pytest.mark.parametrize(
    ("status", "data", "reason"),
    [
        (404, b"", "not_offered"),
        (500, b"", "refused"),
        (302, b"", "refused"),
        (200, b"", "broken"),
        (200, b"<html>", "broken"),
        (200, body(1, batch(block(1)))[:-1], "broken"),
        (200, body(1, schema=2), "schema"),
        (200, body(-1), "sequence"),
        (200, body(1, batches=["text"]), "broken"),
        (200, b"x" * 10_001, "too_large"),
    ],
)
def test_an_invalid_snapshot_leaves_the_pod_stale(
    watched: Watched, engine: EnginePublisher, status: int, data: bytes, reason: str
) -> None:
    """An invalid answer is counted by its reason and not used; live events are applied."""
    with SnapshotServer(lambda _: (status, data)) as server:
        engine.publish(block(1))
        watched.follow(with_snapshots(engine, server))
        watched.settled(0, STALE)
        engine.publish(block(1))
        watched.settled(1, STALE)
        assert outcome(watched, reason) == 1


def test_a_broken_batch_in_a_snapshot_makes_the_view_stale(watched: Watched, engine: EnginePublisher) -> None:
    """The readable batches of a snapshot are applied, and the view is STALE."""
    with SnapshotServer(lambda _: (200, body(0, b"\xc1", batch(block(1))))) as server:
        watched.follow(with_snapshots(engine, server))
        watched.settled(1, STALE)


def test_a_silent_server_delays_no_other_pod(watched: Watched, engine: EnginePublisher) -> None:
    """While one pod waits for its snapshot it is RECOVERING, and the others are followed."""
    with SnapshotServer(lambda _: (200, None)) as server, EnginePublisher() as other:
        watched.follow(with_snapshots(engine, server), replace(stream(other), pod="10.0.0.3:1"))
        wait_until("it is asked", lambda: server.asked == 1)
        assert watched.match().state is RECOVERING
        assert watched.indexer.pending() >= {POD}
        other.publish(block(1))
        watched.settled(1, pod="10.0.0.3:1")


def test_readiness_waits_no_longer_than_the_deadline(engine: EnginePublisher) -> None:
    """A pod whose view cannot be built delays readiness up to the deadline only."""
    running = Watched(bootstrap_s=0.2)
    with SnapshotServer(lambda _: (200, None)) as server:
        running.follow(with_snapshots(engine, server))
        wait_until("its time is over", running.indexer.ready)
        assert running.match().state is RECOVERING
        running.indexer.close()


def test_a_stale_view_is_repaired_by_a_later_snapshot(
    watched: Watched, engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A STALE view is used until a later snapshot repairs it."""
    monkeypatch.setattr(recovery, "REPAIR_FIRST_S", 0.01)
    answers = [(500, b""), (500, b""), (200, body(2, batch(block(1), block(2))))]
    with SnapshotServer(lambda number: answers[min(number, 2)]) as server:
        engine.publish(block(1))
        watched.follow(with_snapshots(engine, server))
        watched.settled(0, STALE)
        engine.publish(block(1))
        watched.settled(2)


def test_an_invalid_view_is_rebuilt(watched: Watched, engine: EnginePublisher) -> None:
    """A view reported as wrong is dropped, counted by its reason, and rebuilt."""
    with SnapshotServer(lambda number: (200, body(0, batch(block(1), *([block(2)] * number))))) as server:
        watched.follow(with_snapshots(engine, server))
        watched.settled(1)
        watched.indexer.invalidate(POD, "overfull")
        watched.settled(2)
        assert watched.metric("kvroute_indexer_pod_clears_total", reason="overfull") == 1


def test_a_cache_that_was_dropped_silently_is_empty_until_the_engine_says_so(watched: Watched) -> None:
    """The view is cleared and STALE, and EXACT again with AllBlocksCleared."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(block(1))
        watched.settled(1)
        watched.indexer.invalidate(POD, "asleep", emptied=True)
        watched.settled(0, STALE)
        engine.publish(["AllBlocksCleared"], block(1))
        watched.settled(1)


@pytest.mark.parametrize("before", [[block(2)], []], ids=["in one batch with a store", "alone"])
def test_an_engine_that_said_asleep_that_its_cache_is_empty_stays_exact(
    watched: Watched, before: list[object]
) -> None:
    """A clear published during sleep (vLLM does so when a request is aborted) is not awaited again."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(block(1))
        watched.settled(1)
        engine.publish(*before, ["AllBlocksCleared"])
        watched.settled(0)
        reading = EngineReading(asleep=True, asked_s=time.monotonic())
        assert watched.indexer.observe(POD, reading) is Finding.ASLEEP
        engine.publish(block(1))
        watched.settled(1)
        assert watched.metric("kvroute_indexer_pod_clears_total", reason="asleep") == 0


def test_a_page_that_is_older_than_what_the_engine_published_changes_nothing(watched: Watched) -> None:
    """A metrics page older than the view's last batch does not clear the view."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(block(1))
        watched.settled(1)
        asked_s = time.monotonic()
        engine.publish(["AllBlocksCleared"], block(1), block(2))
        watched.settled(2)
        assert watched.indexer.observe(POD, EngineReading(asleep=True, asked_s=asked_s)) is Finding.ASLEEP
        engine.publish(block(3))
        watched.settled(3)
        reading = EngineReading(asleep=True, asked_s=time.monotonic())
        assert watched.indexer.observe(POD, reading) is Finding.ASLEEP
        watched.settled(0, STALE)


def test_an_engines_counters_are_compared_with_its_view(watched: Watched) -> None:
    """A sleeping engine's view is cleared, a new process's is rebuilt; both are counted."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(block(1))
        watched.settled(1)
        reading = EngineReading(started_s=1.0, hit_tokens=0.0)
        assert watched.indexer.observe(POD, reading) is None
        assert watched.indexer.observe(POD, replace(reading, started_s=2.0)) is Finding.PROCESS_CHANGED
        wait_until(
            "it is cleared",
            lambda: watched.metric("kvroute_indexer_pod_clears_total", reason="process_changed") == 1,
        )
        watched.settled(1)
        assert watched.indexer.observe(POD, replace(reading, started_s=2.0, asleep=True)) is Finding.ASLEEP
        watched.settled(0, STALE)
        assert watched.metric("kvroute_indexer_findings_total", finding="asleep") == 1


def test_an_overfull_view_is_rebuilt(watched: Watched) -> None:
    """A view with more blocks than its engine has lost removals, and is rebuilt."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(*(block(number) for number in range(1, 7)))
        watched.settled(6)
        assert watched.indexer.observe(POD, EngineReading()) is None
        assert watched.indexer.observe(POD, EngineReading(capacity_blocks=5)) is Finding.OVERFULL
        wait_until(
            "it is cleared",
            lambda: watched.metric("kvroute_indexer_pod_clears_total", reason="overfull") == 1,
        )
        watched.settled(6)


def test_blocks_beyond_the_device_are_no_excess(watched: Watched) -> None:
    """Blocks in host memory do not count against the capacity of device memory."""
    with EnginePublisher() as engine:
        watched.follow(stream(engine))
        engine.publish(*(block(number) for number in range(1, 3)))
        engine.publish(*(block(number, medium="CPU") for number in range(3, 7)))
        watched.settled(6)
        assert watched.indexer.observe(POD, EngineReading(capacity_blocks=2)) is None
        assert watched.match().cached_blocks == 6


@pytest.mark.parametrize("admin", [True, False])
def test_the_token_goes_to_administration_ports_alone(engine: EnginePublisher, admin: bool) -> None:
    """The token is sent only to a pod's administration port."""
    with (
        SnapshotServer(lambda _: (200, body(1, batch(block(1))))) as server,
        closing(Watched(admin_token="s3cret").indexer) as indexer,
    ):
        indexer.follow([replace(stream(engine), snapshot_url=server.url, snapshot_admin=admin)])
        wait_until("the snapshot is taken over", lambda: indexer.states() == {POD: StreamState.EXACT})
        assert server.secrets == ["Bearer s3cret" if admin else None]
