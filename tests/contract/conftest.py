"""What the contract's tests share: makers of the index under test."""

from __future__ import annotations

import pytest

from tests.contract.index_backends import BACKENDS, Index, Make


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an index of the kind under test with the given capacity."""
    return BACKENDS[request.param]


@pytest.fixture
def index(make: Make) -> Index:
    """An index that nothing here fills up."""
    return make(1000)
