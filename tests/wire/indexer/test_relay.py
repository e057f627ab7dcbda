"""Views in a real Redis: for routers that cannot reach an engine, and for those that start late."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from indexer import PodStream, StreamState
from indexer.streams import relayed
from tests.support.indexer.engine_publisher import EnginePublisher, removed, stored, wait_until
from tests.support.indexer.peers import indexer
from tests.support.indexer.subscriber import MODEL, POD, ROOT, Watched, block, stream
from tests.support.loopback import free_port
from tests.support.redis_server import RedisServer, running_redis

EXACT = StreamState.EXACT

_HOLDER = """
import sys, time
from prometheus_client import CollectorRegistry
from indexer import IndexerConfig, KvIndexer, PodStream
config = IndexerConfig(
    block_tokens=4, backend="redis", redis_url=sys.argv[1], hash_seed=7, redis_lease_s=1.0
)
indexer = KvIndexer(config, registry=CollectorRegistry())
indexer.start()
indexer.follow([PodStream(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5])])
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _followed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow disconnected engines through the relay immediately."""
    monkeypatch.setattr(relayed, "UNLINKED_S", 0.0)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Start a Redis server of the test's own."""
    with running_redis() as running:
        yield running


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    """Start an engine whose replay buffer has almost no room."""
    with EnginePublisher(history=2) as publisher:
        yield publisher


@contextmanager
def router(server: RedisServer, **settings: Any) -> Iterator[Watched]:
    """Start a router's indexer with the redis backend."""
    shared = {"backend": "redis", "redis_url": server.url, "redis_lease_s": 1.0}
    with indexer(**{**shared, **settings}) as watched:
        yield watched


def unreachable(pod: str = POD) -> PodStream:
    """Return the stream of a pod at a closed port."""
    return PodStream(pod, MODEL, f"tcp://127.0.0.1:{free_port()}", None)


def followed_from_the_start(engine: EnginePublisher, watched: Watched, blocks: int = 3) -> None:
    """Let the router receive all batches of an engine, more than its replay buffer has room for."""
    watched.follow(stream(engine))
    watched.settled(0)
    engine.wait_for_subscriber()
    for number in range(1, blocks + 1):
        engine.publish(block(number))
    watched.settled(blocks)


def epochs(server: RedisServer) -> list[int]:
    """Return the epochs of all entries on the server, in order."""
    with closing(server.client()) as client:
        (name,) = client.keys("*:stream")
        return [int(place.partition(b"-")[0]) for place, _ in client.xrange(name)]


def written(server: RedisServer) -> bool:
    """Return whether a view is on the server."""
    with closing(server.client()) as client:
        return bool(client.keys("*:view"))


def test_a_router_follows_an_engine_that_it_cannot_reach(
    server: RedisServer, engine: EnginePublisher
) -> None:
    """A relayed view has the same blocks as the writer's: earlier ones, later ones, removals and clears."""
    with router(server) as reaches, router(server) as follows:
        followed_from_the_start(engine, reaches)
        follows.follow(unreachable())
        follows.settled(3)
        follows.built("redis")
        engine.publish(block(4))
        follows.settled(4)
        engine.publish(removed([4]), removed([3]))
        follows.settled(2)
        engine.publish({"type": "AllBlocksCleared"}, block(1))
        follows.settled(1)
        assert (POD, 1) in follows.stored


def test_a_tier_that_is_not_proven_is_so_for_followers(server: RedisServer, engine: EnginePublisher) -> None:
    """A relayed view is STALE while its writer's is, by a tier without removals, and EXACT again with it."""
    with router(server) as reaches, router(server) as follows:
        followed_from_the_start(engine, reaches)
        follows.follow(unreachable())
        follows.settled(3)
        engine.publish(removed([3]), *(block(1, medium="CPU") for _ in range(1000)))
        for watched in (reaches, follows):
            watched.settled(2, StreamState.STALE)
            assert watched.indexer.faults(POD)[0].kind == "tier_not_proven"
        engine.publish({**removed([1]), "medium": "CPU"})
        for watched in (reaches, follows):
            watched.settled(2)


def test_no_token_is_on_the_server(server: RedisServer) -> None:
    """Token ids are prompts: neither a view nor an entry contains them."""
    tokens = [0x0BADF00D + number for number in range(8)]
    with EnginePublisher() as engine, router(server) as watched:
        engine.publish(stored([1], tokens[:4]))
        watched.follow(stream(engine))
        wait_until("the view lies there", lambda: written(server))
        engine.publish(stored([2], tokens[4:], parent=1))
        with closing(server.client()) as client:
            (name,) = client.keys("*:stream")
            wait_until("an entry lies there", lambda: client.xlen(name) >= 2)
            (view,) = client.keys("*:view")
            texts = [*client.hgetall(view).values()]
            texts += [value for _, entry in client.xrange(name) for value in entry.values()]
    for token in tokens:
        for order in ("big", "little"):
            assert not any(token.to_bytes(4, order) in text for text in texts)


def test_a_late_router_is_exact_from_the_server(server: RedisServer, engine: EnginePublisher) -> None:
    """A view beyond the engine's replay buffer is restored from the server, even if its writer has ended."""
    with router(server) as first:
        followed_from_the_start(engine, first, blocks=4)
        wait_until("the view lies there", lambda: written(server))
        engine.publish(block(5))
        first.settled(5)
        wait_until("so does the entry", lambda: len(epochs(server)) > 1)
    with router(server) as second:
        second.follow(stream(engine))
        second.settled(5)
        second.built("redis")
        engine.publish(removed([5]))
        second.settled(4)


def test_a_view_of_an_earlier_process_is_rejected(server: RedisServer) -> None:
    """A view from the server must be verified to be of the engine's present process, like a peer's view."""
    with EnginePublisher(history=2) as engine, router(server) as first:
        followed_from_the_start(engine, first)
        wait_until("the view lies there", lambda: written(server))
    with EnginePublisher() as restarted, router(server) as second:
        restarted.publish(block(1))
        second.follow(stream(restarted))
        second.settled(1)
        second.built("replay")


def test_a_router_whose_lease_expired_writes_nothing(server: RedisServer) -> None:
    """A router that resumes after its lease expired writes no entries."""
    with EnginePublisher() as engine, router(server) as next_holder, router(server) as follows:
        engine.publish(block(1))
        command = [sys.executable, "-c", _HOLDER, server.url, POD, MODEL]
        command += [engine.events_endpoint, str(engine.replay_endpoint)]
        with subprocess.Popen(command, cwd=ROOT) as holder:
            try:
                wait_until("it writes", lambda: written(server))
                (first,) = set(epochs(server))
                holder.send_signal(signal.SIGSTOP)
                next_holder.follow(stream(engine))
                wait_until("another writes", lambda: epochs(server)[-1] > first)
                engine.publish(block(2))
                follows.follow(unreachable())
                follows.settled(2)
                holder.send_signal(signal.SIGCONT)
                for number in (3, 4, 5):
                    engine.publish(block(number))
                    follows.settled(number)
                found = epochs(server)
                assert found == sorted(found)
                assert found[-1] > first
            finally:
                holder.kill()


def test_the_next_router_writes_when_one_ends(server: RedisServer) -> None:
    """A lease is released at the end, and readers continue with the next router's entries."""
    settings = {"redis_lease_s": 3600.0}
    with (
        EnginePublisher() as engine,
        router(server, **settings) as second,
        router(server, **settings) as first,
        router(server) as follows,
    ):
        followed_from_the_start(engine, first)
        follows.follow(unreachable())
        follows.settled(3)
        before = epochs(server)[-1]
        second.follow(stream(engine))
        second.settled(3)
        first.indexer.close()
        wait_until("another writes", lambda: epochs(server)[-1] > before)
        engine.publish(block(4))
        follows.settled(4)


def test_a_flushed_server_is_filled_again(server: RedisServer) -> None:
    """After a flush of the server leases, entries and views are written again, and readers become EXACT."""
    with EnginePublisher() as engine, router(server) as reaches, router(server) as follows:
        followed_from_the_start(engine, reaches)
        follows.follow(unreachable())
        follows.settled(3)
        with closing(server.client()) as client:
            client.flushall()
        engine.publish(block(4))
        reaches.settled(4)
        follows.settled(4)
        engine.publish(removed([4]))
        follows.settled(3)


def test_a_dead_server_costs_nothing_while_engines_are_reached(server: RedisServer) -> None:
    """Views stay EXACT without the server; the metric reports it; a returning server is filled again."""
    with EnginePublisher() as engine, router(server) as reaches, router(server) as follows:
        followed_from_the_start(engine, reaches)
        wait_until("the view lies there", lambda: written(server))
        server.stop()
        engine.publish(block(4))
        reaches.settled(4)
        wait_until("it shows", lambda: reaches.metric("kvroute_indexer_redis_up", link="write") == 0)
        assert reaches.match().state is EXACT
        server.start()
        follows.follow(unreachable())
        follows.settled(4)
        assert reaches.metric("kvroute_indexer_redis_up", link="write") == 1


def test_a_connected_engine_replaces_its_relayed_view(server: RedisServer) -> None:
    """After a reconnection the view follows the engine's own batches."""
    ports = free_port(), free_port()
    with EnginePublisher() as engine, router(server) as reaches, router(server) as follows:
        followed_from_the_start(engine, reaches)
        there = PodStream(POD, MODEL, f"tcp://127.0.0.1:{ports[0]}", f"tcp://127.0.0.1:{ports[1]}")
        follows.follow(there)
        follows.settled(3)
        with EnginePublisher(ports) as reached:
            reached.publish(block(1))
            follows.settled(1)
            assert follows.metric("kvroute_indexer_pod_clears_total", reason="relay_ended") == 1
            reached.publish(block(2))
            follows.settled(2)


@pytest.mark.parametrize("part", ["stream", "view"])
def test_invalid_data_on_the_server_is_rejected(server: RedisServer, part: str) -> None:
    """Invalid data on the server never gives an EXACT view, and the next epoch is followed."""
    with EnginePublisher() as engine, router(server) as reaches, router(server) as follows:
        followed_from_the_start(engine, reaches)
        wait_until("the view lies there", lambda: written(server))
        with closing(server.client()) as client:
            if part == "stream":
                (name,) = client.keys("*:stream")
                (place, _), *_ = client.xrevrange(name, count=1)
                epoch, _, number = place.partition(b"-")
                client.xadd(name, {"entry": b"rubbish"}, id=b"%s-%d" % (epoch, int(number) + 1))
            else:
                (name,) = client.keys("*:view")
                client.hset(name, "view", b"rubbish")
            follows.follow(unreachable())
            stale = StreamState.STALE
            wait_until("it is not believed", lambda: follows.match().state is stale)
            client.flushall()
        follows.settled(3)
