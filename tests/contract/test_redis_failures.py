"""The shared index with a server that is gone, hung, short of memory or not ours."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from indexer.errors import ConfigError, UnavailableError
from indexer.redis_index import RedisIndex, RedisSettings
from tests.contract.index_backends import TIERS, keys, redis_index
from tests.contract.redis_server import RedisServer, running_redis, wait_until
from tests.loopback import free_port

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
CHAIN = keys(range(101, 111))


def cached(index: RedisIndex, pod: str = A) -> int:
    """How much of the chain the pod holds."""
    return index.match(CHAIN, [pod])[pod].blocks


def test_a_server_that_evicts_by_itself_never_makes_the_index_tell_more(own_server: RedisServer) -> None:
    """Whatever names go, the index's own among them: what it tells was stored, and no call fails."""
    client = own_server.client()
    client.config_set("maxmemory-policy", "allkeys-random")
    index = redis_index(own_server, capacity_blocks=1_000_000)
    index.add(A, "gpu", keys(range(5000)))
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 100_000)
    for start in range(0, 20_000, 500):
        index.add(A, "gpu", keys(range(start, start + 500)))
        index.match(keys(range(1000)), [A, B])
    assert client.info("stats")["evicted_keys"] > 0
    assert not index.held(keys(range(20_000, 21_000)), A).any()
    assert not index.held(keys(range(20_000)), B).any()
    index.close()


def failures(registry: CollectorRegistry, reason: str, link: str = "read") -> float:
    """How many calls failed for this reason."""
    labels = {"link": link, "reason": reason}
    return registry.get_sample_value("kvroute_indexer_redis_failures_total", labels) or 0.0


def impatient(server: RedisServer, registry: CollectorRegistry) -> RedisIndex:
    """An index that waits for the server as short as a router's would."""
    settings = RedisSettings(server.url, 1, 1000, 1000, deadline_s=0.2, lease_s=600.0)
    return RedisIndex(settings, TIERS, registry=registry)


def test_a_restarted_server_is_filled_anew(own_server: RedisServer) -> None:
    """Without a server nothing is cached and nothing fails; after its restart all views are lost."""
    registry = CollectorRegistry()
    index = impatient(own_server, registry)
    index.add(A, "gpu", CHAIN)
    index.add(A, "speculative", keys([101]))
    own_server.stop()
    assert cached(index) == 1
    assert not index.up
    assert failures(registry, "connection") == 1
    index.add(B, "gpu", CHAIN)
    assert index.remove(A, "gpu", CHAIN) == index.clear_pod(B) == index.evict(1) == 0
    assert index.stats().blocks == 0
    with pytest.raises(UnavailableError):
        index.snapshot([A])
    own_server.start()
    lost: set[str] = set()
    wait_until(lambda: bool(lost.update(index.take_lost())) or lost == {A, B})
    assert index.up
    assert cached(index) == 1
    index.add(A, "gpu", CHAIN)
    assert cached(index) == len(CHAIN)
    index.close()


def test_a_restart_between_two_calls_is_noticed(own_server: RedisServer) -> None:
    """A server that was away unnoticed comes back empty: the views are lost all the same."""
    index = redis_index(own_server)
    index.add(A, "gpu", CHAIN)
    own_server.client().flushall()
    index.add(A, "gpu", CHAIN[:2])
    assert cached(index) == 2
    assert index.take_lost() == (A,)
    index.close()


def test_a_hung_server_costs_one_deadline(own_server: RedisServer) -> None:
    """The first match waits for its deadline, the others not at all, until the server answers again."""
    registry = CollectorRegistry()
    index = impatient(own_server, registry)
    index.add(A, "gpu", CHAIN)
    own_server.suspend()
    assert cached(index) == 0
    assert failures(registry, "timeout") >= 1
    waited = failures(registry, "timeout")
    for _ in range(1000):
        assert cached(index) == 0
    # A few probes wait meanwhile; how many depends on the machine.
    assert failures(registry, "timeout") < waited + 100
    own_server.resume()
    wait_until(lambda: index.up and cached(index) == len(CHAIN))
    assert index.take_lost() == ()
    index.close()


def test_a_write_that_timed_out_ends_the_view(own_server: RedisServer) -> None:
    """Nobody knows whether it came through, at once or later: the pod begins a new life."""
    registry = CollectorRegistry()
    index = impatient(own_server, registry)
    index.add(A, "gpu", CHAIN)
    own_server.suspend()
    assert index.remove(A, "gpu", CHAIN[5:]) == 0
    own_server.resume()
    wait_until(lambda: index.take_lost() == (A,))
    assert cached(index) == 0
    assert failures(registry, "timeout", "write") >= 1
    index.close()


def test_a_wrong_password_is_told_but_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    """The reason is counted and logged; the password is in no log line and no repr."""
    registry = CollectorRegistry()
    with running_redis("--requirepass", "right") as server:
        for password, found in (("wr0ng-pw", 0), ("right", len(CHAIN))):
            settings = RedisSettings(
                server.url.replace("unix://", f"unix://:{password}@"), 1, 1000, 1000, deadline_s=60.0
            )
            index = RedisIndex(settings, TIERS, registry=CollectorRegistry() if found else registry)
            index.add(A, "gpu", CHAIN)
            assert cached(index) == found
            assert index.up == bool(found)
            index.close()
    assert failures(registry, "auth") >= 1
    assert "auth" in caplog.text
    assert "wr0ng-pw" not in caplog.text + repr(settings)


@pytest.mark.parametrize(
    "url",
    ["", "localhost", "http://h", "redis://:s3cret@h:port", "redis://:s3cret@h:99999", "redis://h?db=x"],
)
def test_wrong_urls_are_refused_without_their_password(url: str, redis_server: RedisServer) -> None:
    """The error names the field and the form, not what was given."""
    with pytest.raises(ConfigError, match=r"IndexerConfig\.redis_url") as caught:
        redis_index(redis_server, url=url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_a_server_that_is_not_there_is_no_error(scheme: str, redis_server: RedisServer) -> None:
    """A router starts without its index, and says why it has none."""
    registry = CollectorRegistry()
    # Nobody listens at port 1.
    settings = RedisSettings(f"{scheme}://127.0.0.1:1/0", 1, 1000, 1000)
    index = RedisIndex(settings, TIERS, registry=registry)
    assert cached(index) == 0
    assert failures(registry, "connection") == 1
    index.close()


def test_a_server_across_the_network_is_like_a_local_one() -> None:
    """TCP, a database of its own, a user and a password: all in the URL."""
    port = free_port()
    with running_redis("--port", str(port), "--requirepass", "right") as server:
        for url in (
            f"valkey://default:right@127.0.0.1:{port}/3",
            f"redis://:right@127.0.0.1:{port}/4?protocol=3&decode_responses=yes",
        ):
            index = redis_index(server, url=url)
            index.add(A, "gpu", CHAIN)
            assert cached(index) == len(CHAIN)
            index.close()
            index.close()
