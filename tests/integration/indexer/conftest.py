"""Fixtures of the contract tests: factories of the index under test."""

from __future__ import annotations

import pytest

from tests.support.indexer.index_backends import BACKENDS, Index, Make


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Make:
    """Return a factory of indexes of the kind under test with a given capacity."""
    return BACKENDS[request.param]


@pytest.fixture
def index(make: Make) -> Index:
    """Return an index with room for 1,000 blocks, which no test fills unless it says so."""
    return make(1000)
