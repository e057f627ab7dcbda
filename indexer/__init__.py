"""Exact index of the blocks in every model server's KV cache, built from the servers' event streams."""

from indexer.audit.cache_watch import EVENTS_OFF, EngineFault, FaultKind
from indexer.audit.engine_counters import CachingFacts, EngineReading
from indexer.audit.mismatch_watch import DispatchKey, SentPrompt
from indexer.config import IndexerConfig, PodStream
from indexer.errors import ConfigError, IndexerError, ListenError, PayloadError, TokenError
from indexer.index.contract import Cause, IndexStats, PodMatch, PodMatches, PromptCauses, StreamState
from indexer.kv_indexer import KvIndexer
from indexer.streams.engine_registry import EngineState
from indexer.streams.subscriber import raise_open_files
from indexer.wire.tiers import GPU_TIER, SPECULATIVE_TIER, Tiers

__all__ = [
    "EVENTS_OFF",
    "GPU_TIER",
    "SPECULATIVE_TIER",
    "CachingFacts",
    "Cause",
    "ConfigError",
    "DispatchKey",
    "EngineFault",
    "EngineReading",
    "EngineState",
    "FaultKind",
    "IndexStats",
    "IndexerConfig",
    "IndexerError",
    "KvIndexer",
    "ListenError",
    "PayloadError",
    "PodMatch",
    "PodMatches",
    "PodStream",
    "PromptCauses",
    "SentPrompt",
    "StreamState",
    "Tiers",
    "TokenError",
    "raise_open_files",
]
