"""The choice of an index by configuration."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from indexer.backends import make_index
from indexer.config import IndexerConfig
from indexer.errors import ConfigError
from indexer.flat_index import FlatIndex
from indexer.index import Index
from indexer.redis_index import RedisIndex
from indexer.tiers import Tiers

# Nobody listens at port 1.
_REDIS: dict[str, Any] = {"backend": "redis", "redis_url": "redis://:s3cret@127.0.0.1:1", "hash_seed": 1}


def made(**settings: Any) -> Index:
    """The index for these settings."""
    return make_index(IndexerConfig(**settings), Tiers(), fingerprint=1, registry=CollectorRegistry())


def test_each_backend_can_be_chosen() -> None:
    """A name gives its index, with the configured sizes; flat is the default."""
    assert type(made()) is type(made(backend="flat")) is FlatIndex
    assert made(capacity_blocks=77).stats().capacity_blocks == 77
    assert made(capacity_bytes=1 << 20).stats().capacity_bytes == 1 << 20


def test_redis_can_be_chosen() -> None:
    """Its settings reach it; a server that is not there does not keep a router from starting."""
    index = made(**_REDIS, capacity_blocks=77)
    assert isinstance(index, RedisIndex)
    assert index.stats().capacity_blocks == 77
    index.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "mongo"}, r"backend: must be one of flat, redis, is 'mongo'"),
        ({**_REDIS, "redis_url": None}, "redis_url: must be given"),
        ({**_REDIS, "hash_seed": None}, "hash_seed: must be given for the backend 'redis'"),
        ({**_REDIS, "redis_namespace": "a{b}"}, "redis_namespace: must be"),
        ({**_REDIS, "redis_deadline_s": 0}, "redis_deadline_s: must be greater than 0"),
        ({**_REDIS, "redis_url": "http://h"}, r"redis_url: must begin with one of redis://"),
        ({"backend": "flat", "capacity_bytes": 1}, "room for 0 blocks"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    """The error names the field and what it must be."""
    with pytest.raises(ConfigError, match=message):
        made(**settings)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error tells what to install."""
    monkeypatch.setitem(sys.modules, "redis", None)
    for module in ("indexer.redis_index", "indexer.redis_link", "indexer.redis_writer"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match=r"kvroute\[redis\]"):
        made(**_REDIS)


def test_a_password_is_not_shown() -> None:
    """Neither the configuration nor the index shows the URL."""
    assert "s3cret" not in repr(IndexerConfig(**_REDIS))
