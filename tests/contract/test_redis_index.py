"""What the shared index does besides the contract: several writers, and a server that is not at its best."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from indexer.redis_index import RedisIndex
from tests.contract.index_backends import keys, redis_index
from tests.contract.redis_server import RedisServer, wait_until

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
CHAIN = keys(range(101, 111))

_OWNER = """
import sys, time
import numpy as np
from prometheus_client import CollectorRegistry
from indexer.redis_index import RedisIndex, RedisSettings
from indexer.tiers import Tiers
settings = RedisSettings(sys.argv[1], 1, 1000, 1000, namespace="crash", deadline_s=60.0, lease_s=2.0)
index = RedisIndex(settings, Tiers(), registry=CollectorRegistry())
index.add("10.0.0.1:8000", "gpu", np.arange(101, 111, dtype=np.uint64))
print("added", flush=True)
time.sleep(600)
"""


class Replicas:
    """Indexes of several processes on one server, as far as the server can tell."""

    def __init__(self, server: RedisServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.made: list[RedisIndex] = []

    def one(self, **settings: object) -> RedisIndex:
        """One more replica."""
        settings.setdefault("namespace", self.namespace)
        self.made.append(redis_index(self.server, **settings))
        return self.made[-1]

    def names(self) -> list[bytes]:
        """All that the replicas have on the server."""
        return self.server.client().keys(f"{{{self.namespace}:*")


@pytest.fixture
def replicas(redis_server: RedisServer, request: pytest.FixtureRequest) -> Iterator[Replicas]:
    """Replicas that share a namespace."""
    made = Replicas(redis_server, re.sub(r"\W", "-", request.node.name))
    yield made
    for index in made.made:
        index.close()


def cached(index: RedisIndex, pod: str = A) -> int:
    """How much of the chain the pod holds."""
    return index.match(CHAIN, [pod])[pod].blocks


def test_replicas_see_one_another_and_count_once(replicas: Replicas) -> None:
    """Two routers that follow one pod get all its events; each copy counts once, whoever writes it."""
    first, second = replicas.one(), replicas.one()
    for index in (first, second):
        index.add(A, "gpu", CHAIN)
    assert cached(first) == cached(second) == len(CHAIN)
    assert first.remove(A, "gpu", CHAIN[-1:]) == 1
    assert second.remove(A, "gpu", CHAIN[-1:]) == 0
    assert cached(first) == cached(second) == len(CHAIN) - 1
    assert first.take_lost() == second.take_lost() == ()


def test_each_pod_has_an_owner_of_its_own(replicas: Replicas) -> None:
    """A router that writes one pod's view does not keep another from writing another's."""
    first, second = replicas.one(), replicas.one()
    first.add(A, "gpu", CHAIN)
    second.add(B, "gpu", CHAIN[:4])
    assert second.match(CHAIN, [A, B])[A].blocks == len(CHAIN)
    assert first.match(CHAIN, [A, B])[B].blocks == 4
    assert second.clear_pod(A) == 0
    assert {holding.pod for holding in second.snapshot([A, B])} == {B}
    assert cached(first) == len(CHAIN)


def test_keys_of_other_hashers_never_meet(replicas: Replicas) -> None:
    """Seeds and block sizes make other keys: what one hasher stored is not there for another."""
    replicas.one(fingerprint=1).add(A, "gpu", CHAIN)
    other = replicas.one(fingerprint=2)
    assert cached(other) == 0
    assert other.stats().blocks == 0


def test_a_router_that_leaves_hands_its_views_over(replicas: Replicas) -> None:
    """The next one begins the view anew and is told to, since it cannot know where the first one was."""
    first, second = replicas.one(), replicas.one()
    for index in (first, second):
        index.add(A, "gpu", CHAIN)
    first.close()
    wait_until(lambda: second.take_lost() == (A,))
    assert cached(second) == 0
    second.add(A, "gpu", CHAIN[:3])
    assert cached(second) == 3
    assert second.take_lost() == ()


@contextlib.contextmanager
def killed_later(server: RedisServer) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the chain in the namespace "crash"; whoever wants to kills it."""
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, server.url], stdout=subprocess.PIPE, text=True
    ) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "added\n"
            yield owner
        finally:
            owner.kill()


def test_a_killed_routers_views_end_with_their_lease(own_server: RedisServer) -> None:
    """Nobody keeps the view up any more: it is not used, though it is still there."""
    reader = redis_index(own_server, namespace="crash")
    with killed_later(own_server) as owner:
        assert cached(reader) == len(CHAIN)
        owner.kill()
    wait_until(lambda: cached(reader) == 0)
    assert reader.stats().holdings == 0
    reader.close()


def test_a_killed_routers_views_are_taken_over(own_server: RedisServer) -> None:
    """A router that followed the pod all the time begins its view anew, and is told to fill it."""
    writer = redis_index(own_server, namespace="crash", lease_s=2.0)
    with killed_later(own_server) as owner:
        writer.add(A, "gpu", CHAIN[:2])
        assert cached(writer) == len(CHAIN)
        owner.kill()
    wait_until(lambda: writer.take_lost() == (A,))
    assert cached(writer) == 0
    writer.close()


def test_a_cleared_standby_that_takes_over_has_lost_nothing(replicas: Replicas) -> None:
    """Who was told that the engine is empty, and passed nothing over since, needs no replay."""
    first, second = replicas.one(), replicas.one()
    for index in (first, second):
        index.add(A, "gpu", CHAIN)
        index.clear_pod(A)
    first.close()
    second.add(A, "gpu", CHAIN[:3])
    assert cached(second) == 3
    assert second.take_lost() == ()


def test_speculation_stays_in_its_process(replicas: Replicas) -> None:
    """What a router assumes is its own; the replicas exchange it elsewhere."""
    first, second = replicas.one(), replicas.one()
    first.add(A, "speculative", CHAIN)
    assert cached(first) == len(CHAIN)
    assert cached(second) == 0
    assert first.clear_pod(A) == len(CHAIN)
    assert cached(first) == 0


def test_uses_by_any_replica_keep_a_block(replicas: Replicas) -> None:
    """What one router matches is not the first that another one's stores evict."""
    first, second = replicas.one(capacity_blocks=20), replicas.one(capacity_blocks=20)
    first.add(A, "gpu", CHAIN)
    first.add(B, "gpu", keys(range(1000, 1010)))
    assert cached(second) == len(CHAIN)
    second.beat()
    first.add(B, "gpu", keys(range(2000, 2010)))
    assert cached(first) == len(CHAIN)
    assert not first.held(keys(range(1000, 1010)), B).any()
    assert first.stats().evicted_blocks == 10


def test_a_large_cleared_pod_is_swept_out(replicas: Replicas) -> None:
    """It holds nothing at once; what is left on the server goes in the background."""
    index = replicas.one(capacity_blocks=100_000)
    index.add(A, "gpu", keys(range(30_000)))
    index.add(B, "gpu", keys(range(29_990, 30_010)))
    assert index.clear_pod(A) == 30_000
    assert not index.held(keys(range(30_000)), A).any()
    assert index.stats().holdings == 20
    wait_until(lambda: index.stats().blocks == 20)
    names = replicas.names()
    assert sum(b":b:" in name for name in names) == 20
    assert sum(b":l:" in name for name in names) == 1


def test_nothing_stays_for_ever(replicas: Replicas) -> None:
    """Every name on the server has a time to live, and an empty view is given back when its lease ends."""
    index = replicas.one(lease_s=1.0)
    index.add(A, "gpu", CHAIN)
    index.add(B, "gpu", CHAIN)
    index.clear_pod(B)
    index.beat()
    client = replicas.server.client()
    names = replicas.names()
    assert len(names) >= len(CHAIN) + 4
    assert all(client.ttl(name) > 0 for name in names)
    (views,) = (name for name in names if name.endswith(b":pods"))
    wait_until(lambda: client.hkeys(views) == [A.encode()])
    index.add(B, "gpu", CHAIN[:2])
    assert cached(index, B) == 2
    assert index.take_lost() == ()


def test_blocks_that_the_server_dropped_are_not_told(replicas: Replicas) -> None:
    """A server that is short of memory takes blocks away: they are holes, and leave the sizes by and by."""
    index = replicas.one()
    index.add(A, "gpu", CHAIN)
    client = replicas.server.client()
    for name in replicas.names():
        if name.endswith(b":b:" + CHAIN[4].tobytes()):
            client.delete(name)
    assert cached(index) == 4
    assert np.count_nonzero(index.held(CHAIN, A)) == 9
    assert [holding.keys.tolist() for holding in index.snapshot([A])] == [np.delete(CHAIN, 4).tolist()]
    index.beat()
    assert index.stats().blocks == 9
    assert index.remove(A, "gpu", CHAIN) == 9
    assert (index.stats().blocks, index.stats().holdings) == (0, 0)


@pytest.mark.parametrize("what", ["blocks", "views"])
def test_garbage_on_the_server_is_passed_over(replicas: Replicas, what: str) -> None:
    """What others wrote under the index's names is not told as held, and the next store puts it right."""
    index = replicas.one()
    index.add(A, "gpu", CHAIN)
    client = replicas.server.client()
    names = replicas.names()
    if what == "blocks":
        for number, name in enumerate(name for name in names if b":b:" in name):
            client.delete(name)
            client.rpush(name, "x") if number % 2 else client.set(name, b"\xff" * (5 + number))
    else:
        (views,) = (name for name in names if name.endswith(b":pods"))
        client.hset(views, A, b"\xff 1 2")
    assert cached(index) == 0
    assert not index.held(CHAIN, A).any()
    index.add(A, "gpu", CHAIN)
    assert cached(index) == len(CHAIN)


def test_an_entry_is_found_where_entries_begin(replicas: Replicas) -> None:
    """The same bytes across two entries of others are neither counted nor removed."""
    index = replicas.one()
    index.add(A, "gpu", CHAIN)
    client = replicas.server.client()
    for name in replicas.names():
        if b":b:" in name:
            block = client.get(name)
            client.set(name, b"\1\1" + block[:6] + block)
    index.add(A, "gpu", CHAIN)
    assert (index.snapshot([A])[0].references == 2).all()
    assert index.remove(A, "gpu", CHAIN) == 0
    assert index.remove(A, "gpu", CHAIN) == len(CHAIN)
    assert index.stats().holdings == 0
