"""Exact index of the blocks in every model server's KV cache, built from the servers' event streams."""

from indexer.audit.engine_counters import EngineReading
from indexer.audit.mismatch_watch import DispatchKey, SentPrompt
from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError, IndexerError, ListenError, PayloadError, TokenError
from indexer.index.contract import IndexStats, PodMatch, PodMatches, StreamState
from indexer.kv_indexer import KvIndexer
from indexer.streams.engine_registry import EngineState
from indexer.streams.subscriber import raise_open_files
from indexer.wire.tiers import GPU_TIER, SPECULATIVE_TIER, Tiers

__all__ = [
    "GPU_TIER",
    "SPECULATIVE_TIER",
    "ConfigError",
    "DispatchKey",
    "EngineReading",
    "EngineState",
    "IndexStats",
    "IndexerConfig",
    "IndexerError",
    "KvIndexer",
    "ListenError",
    "PayloadError",
    "PodMatch",
    "PodMatches",
    "PodStream",
    "SentPrompt",
    "StreamState",
    "Tiers",
    "TokenError",
    "raise_open_files",
]
