"""Following several pods: the set is declared, and pods do not affect each other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from indexer import ConfigError, PodStream, StreamState
from tests.support.indexer.engine_publisher import EnginePublisher, wait_until
from tests.support.indexer.subscriber import OTHER, POD, Watched, block, started, stream

CHILD = """
import threading
from tests.support.indexer.engine_publisher import EnginePublisher
from tests.support.indexer.subscriber import block
engine = EnginePublisher()
engine.publish(block(1), block(2))
print(engine.events_port, engine.replay_port, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Start an indexer."""
    running = Watched()
    yield running
    running.indexer.close()


@pytest.fixture
def engines() -> Iterator[tuple[EnginePublisher, EnginePublisher]]:
    """Start two engines with replay sockets."""
    with EnginePublisher() as first, EnginePublisher() as second:
        yield first, second


def test_pods_are_identified_by_their_subscription(
    watched: Watched, engines: tuple[EnginePublisher, EnginePublisher]
) -> None:
    """Two engines that publish under one topic with the same hashes are two pods."""
    first, second = engines
    watched.follow(stream(first), stream(second, OTHER))
    first.publish(block(1))
    second.publish(block(1), block(2))
    watched.settled(1)
    watched.settled(2, pod=OTHER)
    assert (watched.indexer.stats().blocks, watched.indexer.stats().holdings) == (2, 3)


def test_replays_wait_for_their_turn(engines: tuple[EnginePublisher, EnginePublisher]) -> None:
    """With one replay at a time, all pods get their history one after the other."""
    watched = Watched(concurrent_replays=1)
    with closing(watched.indexer):
        for engine in engines:
            engine.publish(block(1), block(2))
        watched.follow(stream(engines[0]), stream(engines[1], OTHER))
        watched.settled(2)
        watched.settled(2, pod=OTHER)


def test_a_newly_followed_pod_is_pending_immediately(
    watched: Watched, engines: tuple[EnginePublisher, EnginePublisher]
) -> None:
    """A new pod counts as pending from the call of `follow` on."""
    watched.follow(stream(engines[0]))
    assert watched.indexer.states().keys() == {POD}
    assert watched.match().state is not StreamState.STALE


def test_models_never_meet(watched: Watched, engines: tuple[EnginePublisher, EnginePublisher]) -> None:
    """Equal tokens under equal hashes are different blocks for different models."""
    first, second = engines
    first.publish(block(1))
    second.publish(block(1), block(2))
    watched.follow(stream(first), stream(second, OTHER, model="other"))
    watched.settled(1)
    wait_until("both are indexed", lambda: watched.indexer.stats().blocks == 3)
    assert watched.match(OTHER).cached_blocks == 0


def test_a_pod_that_is_not_followed_any_more_leaves_nothing(
    watched: Watched, engines: tuple[EnginePublisher, EnginePublisher]
) -> None:
    """Blocks, state, metrics and subscription of a removed pod go; it may return."""
    first, second = engines
    first.publish(block(1))
    second.publish(block(1), block(2))
    watched.follow(stream(first), stream(second, OTHER))
    watched.settled(1)
    watched.settled(2, pod=OTHER)
    watched.follow(stream(first))
    watched.settled(0, StreamState.STALE, pod=OTHER)
    assert watched.indexer.states() == {POD: StreamState.EXACT}
    assert watched.metric("llm_d_epp_kv_cache_events_active_subscribers") == 1
    assert (
        watched.registry.get_sample_value("kvroute_indexer_stream_state", {"pod": OTHER, "state": "EXACT"})
        is None
    )
    watched.settled(1)
    watched.follow(stream(first), stream(second, OTHER))
    watched.settled(2, pod=OTHER)


def test_a_pod_with_another_address_or_model_starts_over(
    watched: Watched, engines: tuple[EnginePublisher, EnginePublisher]
) -> None:
    """A pod with another endpoint or model starts with an empty view."""
    first, second = engines
    first.publish(block(1))
    second.publish(block(1), block(2))
    watched.follow(stream(first))
    watched.settled(1)
    watched.follow(stream(second))
    watched.settled(2)
    watched.follow(stream(second, model="other"))
    watched.settled(0)


def test_a_dead_pod_does_not_disturb_a_living_one(watched: Watched) -> None:
    """A killed process is detected by its link, and the other pod is followed."""
    command = [sys.executable, "-c", CHILD]
    with started(command, stdout=subprocess.PIPE) as child, EnginePublisher() as living:
        assert child.stdout is not None
        events_port, replay_port = map(int, child.stdout.readline().split())
        dying = PodStream(OTHER, "m", f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}")
        watched.follow(stream(living), dying)
        living.publish(block(1))
        watched.settled(1)
        watched.settled(2, pod=OTHER)
        child.send_signal(signal.SIGKILL)
        wait_until("the loss is told", lambda: (OTHER, False) in watched.links)
        living.publish(block(2))
        watched.settled(2)
        assert watched.match(OTHER).state is StreamState.RECOVERING
        assert (POD, False) not in watched.links


def test_a_flood_from_one_pod_does_not_starve_another(
    watched: Watched, engines: tuple[EnginePublisher, EnginePublisher]
) -> None:
    """While thousands of batches of one pod wait, another's batch is applied after a few turns."""
    flooding, calm = engines
    watched.follow(stream(flooding), stream(calm, OTHER))
    watched.settled(0)
    watched.settled(0, pod=OTHER)
    flooding.wait_for_subscriber()
    calm.wait_for_subscriber()
    held, released = threading.Event(), threading.Event()
    flood_applied: list[int] = []

    def on_stored(pod: str) -> None:
        if not held.is_set():
            held.set()
            assert released.wait(300)
        elif pod == OTHER:
            flood_applied.append(sum(keys for stored_by, keys in watched.stored if stored_by == POD))

    watched.on_stored = on_stored
    flooding.publish(block(1))
    assert held.wait(300)
    for _ in range(3000):
        flooding.publish(block(1))
    calm.publish(block(1))
    flooding.flush()
    calm.flush()
    released.set()
    watched.settled(1, pod=OTHER)
    wait_until("the flood is over", lambda: sum(keys for _, keys in watched.stored) == 3002)
    assert flood_applied[0] < 1000


def test_more_pods_than_can_be_followed_are_refused(watched: Watched) -> None:
    """The number of pods is bounded, and a rejected set changes nothing."""
    one = PodStream(POD, "m", "tcp://127.0.0.1:1", None)
    with pytest.raises(ConfigError, match="4096"):
        watched.follow(*(replace(one, pod=f"10.0.0.1:{port}") for port in range(5000)))
    assert watched.indexer.states() == {}


def test_an_endpoint_that_is_no_address_is_reported(watched: Watched) -> None:
    """A stream with an invalid endpoint is counted, and the thread continues."""
    watched.follow(PodStream(POD, "m", "nonsense", None))
    wait_until(
        "it is counted",
        lambda: (
            watched.metric(
                "llm_d_epp_kv_cache_events_zmq_errors_total", pod_identifier=POD, operation="subscribe"
            )
            > 0
        ),
    )


def test_closing_is_final_and_may_be_repeated(engines: tuple[EnginePublisher, EnginePublisher]) -> None:
    """After close no thread runs, and indexed blocks still match."""
    engines[0].publish(block(1))
    running = Watched()
    running.follow(stream(engines[0]))
    running.settled(1)
    running.indexer.close()
    running.indexer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvroute-events"]
    assert running.match().cached_blocks == 1
