"""Index settings of the configuration."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from indexer import ConfigError, IndexerConfig, KvIndexer

# No server listens on port 1.
_REDIS: dict[str, Any] = {"backend": "redis", "redis_url": "redis://:s3cret@127.0.0.1:1", "hash_seed": 1}


def made(**settings: Any) -> KvIndexer:
    """Return an indexer with these settings."""
    return KvIndexer(IndexerConfig(**settings), registry=CollectorRegistry())


def test_sizes_reach_the_index() -> None:
    """Capacities are the configured ones, and an unreachable Redis server does not prevent the start."""
    for settings in ({}, _REDIS):
        indexer = made(**settings, capacity_blocks=77, capacity_bytes=1 << 20)
        stats = indexer.stats()
        assert (stats.capacity_blocks, stats.capacity_bytes) == (77, 1 << 20)
        indexer.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "mongo"}, r"backend: must be one of flat, redis, is 'mongo'"),
        ({**_REDIS, "redis_url": None}, "redis_url: must be given"),
        ({**_REDIS, "hash_seed": None}, "hash_seed: must be given for the backend 'redis'"),
        ({**_REDIS, "redis_namespace": "a{b}"}, "redis_namespace: must be"),
        ({**_REDIS, "redis_lease_s": 0}, "redis_lease_s: must be greater than 0"),
        ({**_REDIS, "redis_url": "http://h"}, r"redis_url: must begin with one of redis://"),
        ({"capacity_bytes": 1}, "capacity of 0 blocks"),
    ],
)
def test_wrong_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    """The error names the field and its valid values."""
    with pytest.raises(ConfigError, match=message):
        made(**settings)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error names the package to install."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for module in ("indexer.streams.relay", "indexer.streams.redis_link"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=r"kvroute\[redis\]"):
        made(**_REDIS)


def test_a_password_is_not_shown() -> None:
    """The configuration's text does not contain the Redis URL with its password."""
    assert "s3cret" not in repr(IndexerConfig(**_REDIS))
