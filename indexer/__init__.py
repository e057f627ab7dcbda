"""Exact index of the blocks in every model server's KV cache, built from the servers' event streams."""

from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError, IndexerError, ListenError, PayloadError, TokenError
from indexer.index.contract import IndexStats, PodMatch, PodMatches, StreamState
from indexer.kv_indexer import KvIndexer

__all__ = [
    "ConfigError",
    "IndexStats",
    "IndexerConfig",
    "IndexerError",
    "KvIndexer",
    "ListenError",
    "PayloadError",
    "PodMatch",
    "PodMatches",
    "PodStream",
    "StreamState",
    "TokenError",
]
