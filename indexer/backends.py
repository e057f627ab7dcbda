"""Makes the index that the configuration asks for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from indexer.config import IndexerConfig
from indexer.errors import ConfigError
from indexer.flat_index import FlatIndex
from indexer.index import Index
from indexer.tiers import Tiers


def make_index(
    config: IndexerConfig, tiers: Tiers, *, fingerprint: int, registry: CollectorRegistry
) -> Index:
    """Makes the index of `config.backend`.

    Args:
        config: The backend and its settings.
        tiers: The tiers and their weights.
        fingerprint: `BlockHasher.fingerprint` of the keys; a shared index keeps those of others apart.
        registry: Where a backend registers metrics of its own.

    Raises:
        ConfigError: A setting does not suit the backend, or what it needs is not installed.
    """
    if config.backend == "redis":
        return _redis_index(config, tiers, fingerprint, registry)
    return FlatIndex(config.capacity_bytes, tiers, capacity_blocks=config.capacity_blocks)


def _redis_index(config: IndexerConfig, tiers: Tiers, fingerprint: int, registry: CollectorRegistry) -> Index:
    try:
        from indexer.redis_index import RedisIndex, RedisSettings
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise ConfigError(
            "IndexerConfig.backend: 'redis' needs the package redis: pip install 'kvroute[redis]'"
        ) from None
    settings = RedisSettings(
        url=config.redis_url or "",
        namespace=config.redis_namespace,
        fingerprint=fingerprint,
        capacity_blocks=config.capacity_blocks,
        max_assumed=config.speculative_entries,
        deadline_s=config.redis_deadline_s,
        lease_s=config.redis_lease_s,
        ttl_s=config.redis_block_ttl_s,
    )
    return RedisIndex(settings, tiers, registry=registry)
