"""What the indexer is told: its settings and the event streams it shall follow.

Values only, checked when made; nothing here opens a socket or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from indexer.errors import ConfigError

DEFAULT_EVENTS_PORT = 5557

_MIB = 1 << 20

PODS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PodStream:
    """Where one pod publishes the events of its KV cache.

    Attributes:
        pod: The pod's identity, "ip:port" of its serving endpoint.
        model: The base model's name; the root of every block key of this pod.
        events_endpoint: ZMQ address of the pod's PUB socket, "tcp://ip:port".
        replay_endpoint: ZMQ address of the pod's ROUTER socket that answers replays; None where it has none.
    """

    pod: str
    model: str
    events_endpoint: str
    replay_endpoint: str | None


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Settings of a `KvIndexer`.

    Raises:
        ConfigError: A value is out of its range.
    """

    block_tokens: int = 16
    # Unique blocks in the index; the least recently matched go first.
    capacity_blocks: int = 1_000_000
    # None: random for each process, so that nobody can prepare colliding prompts.
    hash_seed: int | None = None
    # Credit of one cached block by tier, 0..1. A tier not named here is credited as the slowest one that is.
    tier_weights: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"gpu": 1.0, "cpu": 0.8})
    )

    topic_prefix: str = ""
    max_payload_bytes: int = 16 * _MIB

    # Per pod: engine hashes with at least one copy, and hashes remembered after their last copy went.
    engine_hashes_per_pod: int = 1_000_000
    released_hashes_per_pod: int = 65_536
    # Per pod: stores whose parent block is not known yet.
    orphan_tokens_per_pod: int = 1_048_576
    # Per pod: live batches held back while a replay runs.
    recovery_batches_per_pod: int = 10_000
    recovery_bytes_per_pod: int = 64 * _MIB

    # A replay has failed without an answer for `idle`, or after `total`; it is tried so often.
    replay_idle_s: float = 2.0
    replay_total_s: float = 120.0
    replay_attempts: int = 4
    concurrent_replays: int = 16

    speculative_ttl_s: float = 2.0
    speculative_max_s: float = 60.0
    # Triples of (request, pod, block).
    speculative_entries: int = 1_000_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and name != "hash_seed" and value <= 0:
                raise ConfigError(f"IndexerConfig.{name}: must be greater than 0, is {value}")
        if self.hash_seed is not None and not 0 <= self.hash_seed < 1 << 64:
            raise ConfigError(
                f"IndexerConfig.hash_seed: must be an unsigned 64-bit number, is {self.hash_seed}"
            )
        for tier, weight in self.tier_weights.items():
            if not 0.0 <= weight <= 1.0:
                raise ConfigError(f"IndexerConfig.tier_weights[{tier!r}]: must be within 0..1, is {weight}")
        if "gpu" not in self.tier_weights:
            raise ConfigError("IndexerConfig.tier_weights: must name the tier 'gpu'")
