"""What the contract's tests share: one Redis server, and makers of the backend under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from indexer.index import Index
from tests.contract.index_backends import BACKENDS, Backend, close
from tests.contract.redis_server import RedisServer, running_redis

Make = Callable[[int], Index]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server for tests that leave it in peace."""
    with running_redis() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that the test may ill-treat."""
    with running_redis() as server:
        yield server


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend under test."""
    return BACKENDS[request.param]


@pytest.fixture
def make(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes an index of the backend under test with the given capacity."""
    server = request.getfixturevalue("redis_server") if backend.needs_server else None
    made: list[Index] = []

    def make_one(capacity: int) -> Index:
        made.append(backend.make(capacity, server))
        return made[-1]

    yield make_one
    for index in made:
        close(index)


@pytest.fixture
def index(make: Make) -> Index:
    """An index that nothing here fills up."""
    return make(1000)
