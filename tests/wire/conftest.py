"""What the tests of the doors share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.wire.router_wire_support import INLINE, served_by


@pytest.fixture(scope="module", params=sorted(INLINE))
def each_transport(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once by each server of gRPC, on a connection's thread and on others."""
    with served_by(request.param):
        yield request.param
