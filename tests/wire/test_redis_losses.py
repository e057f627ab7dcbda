"""An indexer whose index lies in a real Redis: what the server loses comes back from the engines."""

from __future__ import annotations

from contextlib import closing

from tests.contract.redis_server import running_redis
from tests.wire.engine_publisher import EnginePublisher, wait_until
from tests.wire.subscribe_support import Watched, block, stream


def test_what_the_server_lost_is_built_anew_from_the_engine() -> None:
    """A server that comes back empty is filled by a replay; meanwhile the index says that it is not there."""
    with running_redis() as server, EnginePublisher() as engine:
        watched = Watched(backend="redis", redis_url=server.url, hash_seed=1, redis_deadline_s=0.5)
        with closing(watched.indexer):
            watched.follow(stream(engine))
            engine.publish(block(1), block(2))
            watched.settled(2)
            assert watched.indexer.reachable
            server.stop()
            wait_until("the loss of the server shows", lambda: not watched.indexer.reachable)
            assert watched.match().cached_blocks == 0
            server.start()
            watched.settled(2)
            assert watched.indexer.reachable
            assert watched.metric("kvroute_indexer_pod_clears_total", reason="index_lost_it") >= 1


def test_a_closed_indexer_gives_its_views_back() -> None:
    """The next one need not wait for a lease to run out: it owns the pod at once."""
    with running_redis() as server, EnginePublisher() as engine:
        settings = {"backend": "redis", "redis_url": server.url, "hash_seed": 1, "redis_lease_s": 3600.0}
        engine.publish(block(1))
        for _ in range(2):
            watched = Watched(**settings, redis_deadline_s=0.5)
            with closing(watched.indexer):
                watched.follow(stream(engine))
                watched.settled(1)
                assert watched.indexer.pending() == frozenset()
