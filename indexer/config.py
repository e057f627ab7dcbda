"""The indexer's settings, with their flags, and the event streams that it is to follow."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common.flags import ADMIN_TOKEN_VARIABLE, admin_token, file_flag, flag, flag_values, pair
from indexer.errors import ConfigError
from indexer.tiers import DEFAULT_TIERS, DEFAULT_WEIGHTS

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


@dataclass(frozen=True, slots=True)
class PodStream:
    """One pod's publisher of KV cache events."""

    pod: str  # the pod's identity, "ip:port" of its serving endpoint
    model: str  # the base model's name; the root of every block key of this pod
    events_endpoint: str | None  # ZMQ address of its PUB socket, "tcp://ip:port"; None: it connects to ours
    replay_endpoint: str | None = None  # ZMQ address of its ROUTER socket that answers replays, if it has one
    snapshot_url: str | None = None  # HTTP address that tells the state of its cache; None where it has none
    snapshot_admin: bool = False  # whether that is at an administration port, the only kind that gets a token
    first_sequence: int = 0  # number of its first batch: 0, but llm-d's simulator begins with 1
    # Data-parallel engines behind this one serving endpoint; each publishes for itself, at its port + rank.
    # Ranks that serve ports of their own are pods of their own.
    ranks: int = 1
    rank: int = 0  # which of them this is
    epoch: str = ""  # the pod's life, if its declarer can tell; with another one its cache is forgotten
    topic_prefix: str | None = None  # what to subscribe to; None: as `IndexerConfig` says

    @property
    def holder(self) -> str:
        """The name of this engine's blocks in the index: of rank 0 the pod's own, else "<pod>@dp<rank>"."""
        return f"{self.pod}@dp{self.rank}" if self.rank else self.pod

    def by_rank(self) -> tuple[PodStream, ...]:
        """The streams of its engines, one for each rank.

        Raises:
            ConfigError: There are too many, or a rank's port would not be one.
        """
        if not 1 <= self.ranks <= RANKS_MAX:
            raise ConfigError(f"stream of {self.pod}: ranks must be 1..{RANKS_MAX}, is {self.ranks}")
        if self.ranks > 1 and self.snapshot_url is not None:
            raise ConfigError(
                f"stream of {self.pod}: a snapshot of one engine is none of its {self.ranks} ranks"
            )
        return tuple(
            replace(
                self,
                ranks=1,
                rank=self.rank + rank,
                events_endpoint=_rank_endpoint(self, self.events_endpoint, rank),
                replay_endpoint=_rank_endpoint(self, self.replay_endpoint, rank),
            )
            for rank in range(self.ranks)
        )


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Settings of a `KvIndexer`; those with a flag say it once, with its help.

    Raises:
        ConfigError: A value is out of its range.
    """

    events_bind: str | None = _flag(
        "--events-bind",
        str,
        None,
        "tcp://*:5557 or the like: where pods connect to that publish to us, known by their topics "
        "kv@<pod>@<model> (default: we connect to the pods of the file)",
        metavar="ENDPOINT",
    )
    undeclared_pods: int = _flag(
        "--undeclared-pods", int, 1024, "most pods that connect without being in the file; 0: none"
    )
    # How long after its connection went an undeclared pod is forgotten.
    undeclared_forget_s: float = 600.0
    first_sequence: int = _flag(
        "--first-sequence", int, 0, "number of such a pod's first batch; 1 for llm-d's simulator"
    )
    bootstrap_s: float = _flag(
        "--bootstrap-timeout",
        float,
        30.0,
        "how long a pod's view is waited for before we are ready without it (default: 30)",
        metavar="SECONDS",
    )
    admin_token: str | None = file_flag(
        "index",
        "--admin-token-file",
        "file with the secret that pods' administration ports ask for (label kvroute.io/admin-port); no "
        f"other port is sent it (default: ${ADMIN_TOKEN_VARIABLE})",
        repr=False,
    )
    backend: str = _flag(
        "--backend",
        str,
        "flat",
        "flat: in memory; redis: views lie on a server besides, for other routers and the next start "
        "(default: flat)",
        choices=BACKENDS,
        metavar=None,
    )
    block_tokens: int = _flag("--block-tokens", int, 16, "tokens of a block of the index")
    # The least recently used go first.
    capacity_blocks: int = _flag("--capacity-blocks", int, 8_000_000, "most unique blocks in the index")
    capacity_bytes: int = _flag("--capacity-bytes", int, 512 * _MIB, "most memory of the index")
    # redis://, rediss://, valkey://, valkeys:// or unix://; may hold a password.
    redis_url: str | None = _secret("--redis-url", str, None, "of the redis backend's server", metavar="URL")
    redis_namespace: str = _flag(
        "--redis-namespace", str, "kvroute", "names there begin with it (default: kvroute)", metavar="NAME"
    )
    # So long nobody else writes a pod's view without a sign of life of the router that does.
    redis_lease_s: float = 10.0
    # Life of a view there that nobody writes any more.
    redis_view_ttl_s: float = 86_400.0
    # None: random for each process, so that nobody can prepare colliding prompts.
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
        "gRPC port of another indexer or router with the same --hash-seed, asked at the start for what "
        "engines do not tell; a router also follows what the others have in flight; of a name all addresses "
        "but our own; may be repeated",
        action="append",
        metavar="HOST:PORT",
    )
    peer_ca: Path | None = file_flag(
        "index", "--peer-ca", "PEM; peers must show a certificate of it (default: no TLS)"
    )
    peer_cert: Path | None = file_flag("index", "--peer-cert", "PEM chain that is shown to peers")
    peer_key: Path | None = file_flag("index", "--peer-key", "PEM key of --peer-cert")
    # Credit of one cached block by tier, 0..1. A tier not named here is credited as the slowest one that is.
    tier_weights: Mapping[str, float] = _flag(
        "--tier-weight",
        pair(float),
        DEFAULT_WEIGHTS,
        f"credit of a cached block, 0..1, besides {_shown(DEFAULT_WEIGHTS)}",
        action="append",
        metavar="TIER=WEIGHT",
    )
    # From the medium that an event names to a tier; any other medium is in the tier "other".
    tier_by_medium: Mapping[str, str] = _flag(
        "--medium-tier",
        pair(str),
        DEFAULT_TIERS,
        f"tier of a medium that events name, besides {_shown(DEFAULT_TIERS)}",
        action="append",
        metavar="MEDIUM=TIER",
    )

    topic_prefix: str = ""
    max_payload_bytes: int = 16 * _MIB

    # Per pod: blocks of an engine that are shorter than ours, but for those that end one of ours.
    engine_hashes_per_pod: int = 1_000_000
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

    snapshot_max_bytes: int = 256 * _MIB
    snapshot_total_s: float = 30.0
    concurrent_snapshots: int = 4

    speculative_ttl_s: float = 2.0
    speculative_max_s: float = 60.0
    # Triples of (request, pod, block); 0: no block is assumed.
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
            self._check_shared_seed("for the backend 'redis'", "for all routers")
        if self.peers:
            self._check_peers()
            self._check_shared_seed("with peers (--hash-seed beside --peer)", "for all of them")
        if self.events_bind is not None and not self.events_bind.startswith("tcp://"):
            # Only of TCP connections the socket tells which of them was lost.
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

    def _check_shared_seed(self, why: str, whose: str) -> None:
        if self.hash_seed is None:
            raise ConfigError(
                f"IndexerConfig.hash_seed: must be given {why}, the same {whose}: "
                "with seeds of their own they would not know each other's keys"
            )


def index_config(flags: argparse.Namespace) -> IndexerConfig:
    """Return the settings that flags name; reads the file of the administration's token.

    Raises:
        ConfigError: One is out of its range, or does not go with another.
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
        raise ConfigError(
            f"stream of {stream.pod}: {endpoint!r} has no port that ranks could be counted from"
        )
    if int(port) + rank > _PORT_MAX:
        raise ConfigError(f"stream of {stream.pod}: port {port} + rank {rank} is beyond {_PORT_MAX}")
    return f"{host}:{int(port) + rank}"
