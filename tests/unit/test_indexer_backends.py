"""The choice of a backend by configuration."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from indexer import ConfigError, IndexerConfig, KvIndexer

# Nobody listens at port 1.
_REDIS: dict[str, Any] = {"backend": "redis", "redis_url": "redis://:s3cret@127.0.0.1:1", "hash_seed": 1}


def made(**settings: Any) -> KvIndexer:
    """The indexer for these settings."""
    return KvIndexer(IndexerConfig(**settings), registry=CollectorRegistry())


def test_sizes_reach_the_index() -> None:
    """Blocks and bytes are the configured ones; a server that is not there keeps nobody from starting."""
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
        ({"capacity_bytes": 1}, "room for 0 blocks"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The error names the field and what it must be."""
    with pytest.raises(ConfigError, match=message):
        made(**settings)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error tells what to install."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for module in ("indexer.streams.relay",):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=r"kvroute\[redis\]"):
        made(**_REDIS)


def test_a_password_is_not_shown() -> None:
    """The configuration does not show the URL."""
    assert "s3cret" not in repr(IndexerConfig(**_REDIS))
