"""Settings of the indexer with their flags, and the declaration of an event stream."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.flags import ADMIN_TOKEN_VARIABLE, admin_token, file_flag, flag, flag_values, pair
from indexer.errors import ConfigError
from indexer.wire.tiers import DEFAULT_TIERS, DEFAULT_WEIGHTS

DEFAULT_EVENTS_PORT = 5557

_MIB = 1 << 20
_NAMESPACE = re.compile(r"[A-Za-z0-9.:_-]{1,64}", re.ASCII)

PODS_MAX = 4096
RANKS_MAX = 256

_PORT_MAX = 65_535
_MAY_BE_ZERO = frozenset({"hash_seed", "undeclared_pods", "first_sequence", "speculative_entries"})

BACKENDS = ("flat", "redis")
_flag = partial(flag, "index")
_secret = partial(_flag, repr=False)


def _shown(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def engine_name(pod: str, rank: int) -> str:
    """Return the name of a pod's engine in the index: the pod for rank 0, else "<pod>@dp<rank>"."""
    return f"{pod}@dp{rank}" if rank else pod


@dataclass(frozen=True, slots=True)
class PodStream:
    """Stream of KV cache events of one pod."""

    pod: str  # "ip:port" of the pod's serving endpoint
    model: str  # name of the base model; the root of all block keys of this pod
    events_endpoint: str | None  # ZMQ address of its PUB socket, "tcp://ip:port"; None: it connects to ours
    replay_endpoint: str | None = None  # ZMQ address of its ROUTER socket for replays; None: no replay
    snapshot_url: str | None = None  # http:// or tcp:// of snapshots of its cache, see `streams.snapshot`
    snapshot_admin: bool = False  # whether the URL is at an administration port; only these receive the token
    first_sequence: int = 0  # sequence number of its first batch; 1 for llm-d's simulator
    # Data-parallel engines behind this serving endpoint, each with a publisher at the ports + rank. Ranks
    # with serving ports of their own are separate pods.
    ranks: int = 1
    rank: int = 0  # rank of this engine
    epoch: str = ""  # identifies the engine process; when it changes, the view is dropped. "": unknown
    topic_prefix: str | None = None  # topic prefix to subscribe to; None: `IndexerConfig.topic_prefix`

    @property
    def holder(self) -> str:
        return engine_name(self.pod, self.rank)

    def by_rank(self) -> tuple[PodStream, ...]:
        """Return one stream per rank.

        Raises:
            ConfigError: There are more than 256 ranks, or a rank's port would exceed 65535.
        """
        if not 1 <= self.ranks <= RANKS_MAX:
            raise ConfigError(f"stream of {self.pod}: ranks must be 1..{RANKS_MAX}, is {self.ranks}")
        if self.ranks > 1 and (self.snapshot_url or "").startswith("http"):
            raise ConfigError(
                f"stream of {self.pod}: snapshot_url: a snapshot is of one engine, not of {self.ranks} ranks"
            )
        return tuple(
            replace(
                self,
                ranks=1,
                rank=self.rank + rank,
                events_endpoint=_rank_endpoint(self, self.events_endpoint, rank),
                replay_endpoint=_rank_endpoint(self, self.replay_endpoint, rank),
                snapshot_url=_rank_endpoint(self, self.snapshot_url, rank),
            )
            for rank in range(self.ranks)
        )


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Settings of a `KvIndexer`; the help text of a flag documents its setting.

    Raises:
        ConfigError: A value is out of range.
    """

    events_bind: str | None = _flag(
        "--events-bind",
        str,
        None,
        "address for pods that connect to the indexer, such as tcp://*:5557; they publish with topics "
        "kv@<pod>@<model> (default: the indexer connects to the pods of the file)",
        metavar="ENDPOINT",
    )
    undeclared_pods: int = _flag(
        "--undeclared-pods", int, 1024, "most connecting pods that are not in the file; 0: none"
    )
    # Time after its disconnection at which an undeclared pod may be dropped to admit another.
    undeclared_forget_s: float = 600.0
    first_sequence: int = _flag(
        "--first-sequence",
        int,
        0,
        "sequence number of an undeclared pod's first batch; 1 for llm-d's simulator",
    )
    bootstrap_s: float = _flag(
        "--bootstrap-timeout",
        float,
        30.0,
        "longest wait for a pod's view before reporting ready without it (default: 30)",
        metavar="SECONDS",
    )
    admin_token: str | None = file_flag(
        "index",
        "--admin-token-file",
        "file with the token for pods' administration ports (label kvroute.io/admin-port); it is sent to no "
        f"other port (default: ${ADMIN_TOKEN_VARIABLE})",
        repr=False,
    )
    backend: str = _flag(
        "--backend",
        str,
        "flat",
        "flat: in memory; redis: in memory, with views replicated through a Redis server for other routers "
        "and the next start (default: flat)",
        choices=BACKENDS,
        metavar=None,
    )
    block_tokens: int = _flag("--block-tokens", int, 16, "tokens per block of the index")
    # Above either capacity the least recently used blocks are evicted.
    capacity_blocks: int = _flag("--capacity-blocks", int, 8_000_000, "most unique blocks in the index")
    capacity_bytes: int = _flag("--capacity-bytes", int, 512 * _MIB, "most memory of the index, in bytes")
    # redis://, rediss://, valkey://, valkeys:// or unix://; may contain a password.
    redis_url: str | None = _secret("--redis-url", str, None, "URL of the Redis server", metavar="URL")
    redis_namespace: str = _flag(
        "--redis-namespace", str, "kvroute", "prefix of all Redis keys (default: kvroute)", metavar="NAME"
    )
    # Lease of the router that writes a pod's view.
    redis_lease_s: float = 10.0
    # Time after its last write at which a view on the server expires.
    redis_view_ttl_s: float = 86_400.0
    # None: random per process, so that colliding prompts cannot be prepared.
    hash_seed: int | None = _flag(
        "--hash-seed",
        int,
        None,
        "seed of the block keys, the same for all peers and all that share a redis server "
        "(default: random at each start)",
    )
    peers: tuple[str, ...] = _flag(
        "--peer",
        str,
        (),
        "gRPC port of another indexer or router with the same --hash-seed, asked for views at the start; a "
        "router also follows the others' requests in flight; a name stands for all its addresses except our "
        "own; may be repeated",
        action="append",
        metavar="HOST:PORT",
    )
    peer_ca: Path | None = file_flag(
        "index", "--peer-ca", "PEM; peers must present a certificate signed by it (default: no TLS)"
    )
    peer_cert: Path | None = file_flag("index", "--peer-cert", "PEM chain presented to peers")
    peer_key: Path | None = file_flag("index", "--peer-key", "PEM key of --peer-cert")
    # Value of one cached block by tier, 0..1. Other tiers have the lowest of these weights.
    tier_weights: Mapping[str, float] = _flag(
        "--tier-weight",
        pair(float),
        DEFAULT_WEIGHTS,
        f"value of a cached block in a tier, 0..1, in addition to {_shown(DEFAULT_WEIGHTS)}",
        action="append",
        metavar="TIER=WEIGHT",
    )
    # Tier by the medium that an event names; other media are in the tier "other".
    tier_by_medium: Mapping[str, str] = _flag(
        "--medium-tier",
        pair(str),
        DEFAULT_TIERS,
        f"tier of a medium that events name, in addition to {_shown(DEFAULT_TIERS)}",
        action="append",
        metavar="MEDIUM=TIER",
    )

    topic_prefix: str = ""
    max_payload_bytes: int = 16 * _MIB

    # Per pod: most engine blocks that are shorter than an index block and do not end one.
    engine_hashes_per_pod: int = 1_000_000
    # Per pod: most tokens of stores whose parent block is not known yet.
    orphan_tokens_per_pod: int = 1_048_576
    # Per pod: most live batches that wait while a replay runs.
    recovery_batches_per_pod: int = 10_000
    recovery_bytes_per_pod: int = 64 * _MIB

    # An attempt at a replay fails without an answer for `idle`, or after `total`.
    replay_idle_s: float = 2.0
    replay_total_s: float = 120.0
    replay_attempts: int = 4
    concurrent_replays: int = 16

    snapshot_max_bytes: int = 256 * _MIB
    snapshot_total_s: float = 30.0
    concurrent_snapshots: int = 4

    unproven_tier_ttl_s: float = _flag(
        "--unproven-tier-ttl",
        float,
        600.0,
        "least time for which blocks count in a tier whose removals the engine does not publish; at most "
        "twice as long (default: 600)",
        metavar="SECONDS",
    )

    speculative_ttl_s: float = 2.0
    speculative_max_s: float = 60.0
    # Most triples of (request, pod, block); 0: no speculative entries.
    speculative_entries: int = 1_000_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            least_is_zero = name in _MAY_BE_ZERO
            if isinstance(value, int | float) and (value < 0 or (value == 0 and not least_is_zero)):
                bound = "at least 0" if least_is_zero else "greater than 0"
                raise ConfigError(f"IndexerConfig.{name}: must be {bound}, is {value}")
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"IndexerConfig.backend: must be one of {', '.join(BACKENDS)}, is {self.backend!r}"
            )
        if self.backend == "redis":
            self._check_redis()
            self._check_shared_seed("for the backend 'redis'", "all routers")
        if self.peers:
            self._check_peers()
            self._check_shared_seed("with peers (--hash-seed beside --peer)", "all peers")
        if self.events_bind is not None and not self.events_bind.startswith("tcp://"):
            # libzmq reports which connection was lost for TCP only.
            raise ConfigError(f"IndexerConfig.events_bind: must begin with tcp://, is {self.events_bind!r}")
        if self.hash_seed is not None and self.hash_seed >= 1 << 64:
            raise ConfigError(
                f"IndexerConfig.hash_seed: must be an unsigned 64-bit number, is {self.hash_seed}"
            )
        for tier, weight in self.tier_weights.items():
            if not 0.0 <= weight <= 1.0:
                raise ConfigError(f"IndexerConfig.tier_weights[{tier!r}]: must be within 0..1, is {weight}")
        if "gpu" not in self.tier_weights:
            raise ConfigError("IndexerConfig.tier_weights: must name the tier 'gpu'")

    def _check_peers(self) -> None:
        for peer in self.peers:
            host, _, port = peer.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
                raise ConfigError(f"IndexerConfig.peers: must be HOST:PORT, is {peer!r}")
        if (self.peer_cert is None) != (self.peer_key is None) or (self.peer_cert and not self.peer_ca):
            raise ConfigError("IndexerConfig.peer_cert, peer_key: both are needed, and peer_ca with them")

    def _check_redis(self) -> None:
        if self.redis_url is None:
            raise ConfigError("IndexerConfig.redis_url: must be given for the backend 'redis'")
        if not _NAMESPACE.fullmatch(self.redis_namespace):
            raise ConfigError(
                "IndexerConfig.redis_namespace: must be 1-64 letters, digits and characters of .:_-, "
                f"is {self.redis_namespace!r}"
            )

    def _check_shared_seed(self, condition: str, group: str) -> None:
        if self.hash_seed is None:
            raise ConfigError(
                f"IndexerConfig.hash_seed: must be given {condition}, the same for {group}: "
                "block keys of different seeds do not match"
            )


def index_config(flags: argparse.Namespace) -> IndexerConfig:
    """Return the settings from parsed flags; reads the administration token's file.

    Raises:
        ConfigError: A value is out of range or contradicts another.
    """
    values = flag_values(IndexerConfig, flags)
    try:
        token = admin_token(values.get("admin_token"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return IndexerConfig(
        **values
        | {
            "admin_token": token,
            "tier_weights": {**DEFAULT_WEIGHTS, **dict(values.get("tier_weights", ()))},
            "tier_by_medium": {**DEFAULT_TIERS, **dict(values.get("tier_by_medium", ()))},
        }
    )


def _rank_endpoint(stream: PodStream, endpoint: str | None, rank: int) -> str | None:
    if endpoint is None or not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"stream of {stream.pod}: {endpoint!r} has no port; ranks need one as their base")
    if int(port) + rank > _PORT_MAX:
        raise ConfigError(f"stream of {stream.pod}: port {port} + rank {rank} is beyond {_PORT_MAX}")
    return f"{host}:{int(port) + rank}"
