"""What the tests of the doors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire.h2_support import Served, serving
from tests.wire.raw_h2_support import RawClient
from tests.wire.router_wire_support import INLINE, served_by


@pytest.fixture(scope="module", params=sorted(INLINE))
def each_transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with calls served on their connection's thread, and on other threads."""
    with served_by(request.param):
        yield request.param


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A plain service, by a connection's own thread where that may be."""
    with serving("native") as served:
        yield served


@pytest.fixture
def sound(served: Served) -> Iterator[None]:
    """Looks after each test whether the service still serves and has nothing left of it."""
    yield
    served.assert_sound()


@pytest.fixture
def client(served: Served) -> Iterator[RawClient]:
    """A connection to the plain service that has begun as it should."""
    with RawClient(served.server.port) as client:
        yield client
