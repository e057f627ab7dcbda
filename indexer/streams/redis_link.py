"""Connections to the Redis server of the relay: one pool, a timeout per call and a circuit breaker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from indexer.errors import ConfigError, UnavailableError

_log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Seconds between two attempts to reach a server that failed."""

_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
# Metric labels by exception; the first match counts.
_REASONS = {
    AuthenticationError: "auth",
    NoPermissionError: "auth",
    RedisTimeoutError: "timeout",
    BusyLoadingError: "loading",
    RedisConnectionError: "connection",
    ResponseError: "refused",
}
_TIMEOUT_S = 2.0


class RedisMetrics:
    """Metrics of the connections to the Redis server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.failures = Counter(
            "kvroute_indexer_redis_failures",
            "Failed calls of the Redis server, by reason.",
            ("link", "reason"),
            registry=registry,
        )
        self.up = Gauge(
            "kvroute_indexer_redis_up",
            "1 while the Redis server answers in time.",
            ("link",),
            registry=registry,
        )


class RedisLink:
    """Connection pool with a timeout per call and a circuit breaker. Thread-safe.

    After a failure of the connection one call every half second tries the server, and all others fail
    immediately, so that a hung server costs one timeout and not one per call.

    Args:
        url: redis://, rediss://, valkey://, valkeys:// or unix://, with user, password and database. Never
            logged and never part of an error.

    Raises:
        ConfigError: The URL is wrong.
    """

    def __init__(self, url: str, name: str, metrics: RedisMetrics) -> None:
        self._name = name
        self._metrics = metrics
        # For preparing scripts; commands go through `call`.
        self.client = Redis(connection_pool=_pool(url))
        self._up = True
        self._try_s = 0.0  # calls before this time fail immediately
        metrics.up.labels(name).set(1)

    def call(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the server's answer to a command of `client`.

        Raises:
            UnavailableError: The call failed, or the circuit breaker is open.
        """
        if (now_s := time.monotonic()) < self._try_s:
            raise UnavailableError("down")
        if not self._up:
            self._try_s = now_s + BEAT_S
        try:
            answer = command(*arguments, **options)
        except RedisError as error:
            reason = next((label for kind, label in _REASONS.items() if isinstance(error, kind)), "protocol")
            self._metrics.failures.labels(self._name, reason).inc()
            # A rejected command does not mean that the next one fails.
            if reason != "refused":
                self._try_s = time.monotonic() + BEAT_S
                self._set_up(
                    False, "redis unavailable: link=%s reason=%s error=%s", self._name, reason, error
                )
            raise UnavailableError(reason) from error
        self._try_s = 0.0
        self._set_up(True, "redis available: link=%s", self._name)
        return answer

    def _set_up(self, up: bool, message: str, *values: object) -> None:
        if up is not self._up:
            self._up = up
            self._metrics.up.labels(self._name).set(up)
            _log.log(logging.INFO if up else logging.WARNING, message, *values)


def _pool(url: str) -> ConnectionPool:
    scheme, found, rest = url.partition("://")
    if not found or scheme not in _SCHEMES:
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise ConfigError(f"IndexerConfig.redis_url: must begin with one of {known}")
    try:
        # Reading the port checks it.
        _ = urlsplit(url).port
        pool = ConnectionPool.from_url(f"{_SCHEMES[scheme]}://{rest}")
    except (TypeError, ValueError):
        # The library's message may contain a part of the password.
        raise ConfigError(
            f"IndexerConfig.redis_url: no {scheme}:// URL of the form "
            f"{scheme}://[user:password@]host:port/database, or unix://path"
        ) from None
    # Options that the relay depends on override those of the URL.
    pool.connection_kwargs.update(
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        # Retry after a broken connection, never after a timeout; the server rejects an entry written twice.
        retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
        protocol=2,
        decode_responses=False,
    )
    return pool
