"""The index backends under contract, and how to make one. A new backend is one more line in BACKENDS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry

from indexer.flat_index import FlatIndex
from indexer.index import Index
from indexer.keys import Keys
from indexer.redis_index import RedisIndex, RedisSettings
from indexer.tiers import Tiers
from tests.contract.redis_server import RedisServer
from tests.support.reference_index import ReferenceIndex

TIERS = Tiers()

_numbers = itertools.count()


def keys(numbers: Iterable[int]) -> Keys:
    """Numbers as block keys."""
    return np.array(list(numbers), np.uint64)


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend and what it promises besides the contract.

    Attributes:
        make: Makes an index with room for so many blocks with one holder; the server is running.
        exact_lru: Who goes first is told by the order of use alone.
        uses_count_late: A use may count as later than a write that followed it.
        shares_speculation: Speculative blocks count in its sizes, and take part in its LRU order.
        needs_server: It wants a Redis.
    """

    make: Callable[[int, RedisServer | None], Index]
    exact_lru: bool = True
    uses_count_late: bool = False
    shares_speculation: bool = True
    needs_server: bool = False


def redis_index(server: RedisServer, **settings: object) -> RedisIndex:
    """An index on the server, in a namespace of its own unless told otherwise."""
    defaults = {
        "url": server.url,
        "namespace": f"test{next(_numbers)}",
        "fingerprint": 1,
        "capacity_blocks": 1000,
        "max_assumed": 100_000,
        # Nothing here may depend on how busy the machine is.
        "deadline_s": 60.0,
        "lease_s": 600.0,
    }
    return RedisIndex(RedisSettings(**(defaults | settings)), TIERS, registry=CollectorRegistry())


def close(index: Index) -> None:
    """Ends what the index runs beside itself; idempotent."""
    if isinstance(index, RedisIndex):
        index.close()


def _redis(capacity: int, server: RedisServer | None) -> Index:
    assert server is not None
    return redis_index(server, capacity_blocks=capacity)


BACKENDS = {
    "reference": Backend(lambda capacity, _: ReferenceIndex(capacity, TIERS)),
    "flat": Backend(lambda capacity, _: FlatIndex(1 << 26, TIERS, capacity_blocks=capacity)),
    "redis": Backend(_redis, uses_count_late=True, shares_speculation=False, needs_server=True),
}
