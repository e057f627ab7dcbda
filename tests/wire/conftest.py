"""Fixtures of the tests of gRPC services and HTTP/2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.router.doors import INLINE, served_by
from tests.support.router.h2 import Served, serving
from tests.support.router.raw_h2 import RawClient


@pytest.fixture(scope="module", params=sorted(INLINE))
def each_transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test twice: with calls served inline on their connection's thread, and on other threads."""
    with served_by(request.param):
        yield request.param


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serve a plain service, inline where possible."""
    with serving("native") as served:
        yield served


@pytest.fixture
def sound(served: Served) -> Iterator[None]:
    """Check after each test that the service still serves and has released everything."""
    yield
    served.assert_sound()


@pytest.fixture
def client(served: Served) -> Iterator[RawClient]:
    """Open a connection to the plain service and complete its handshake."""
    with RawClient(served.server.port) as client:
        yield client
