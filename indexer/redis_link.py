"""The connection to Redis or Valkey: a URL comes in, answers come out, or `UnavailableError` in bounded time.

Knows nothing of views. A password in the URL is in no message and no log line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge
from redis import BlockingConnectionPool, Redis
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

_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
}
_CONNECTIONS_MAX = 32
# Labels for metrics; the first that fits.
_REASONS = {
    AuthenticationError: "auth",
    NoPermissionError: "auth",
    RedisTimeoutError: "timeout",
    BusyLoadingError: "loading",
    RedisConnectionError: "connection",
    ResponseError: "refused",
}


class RedisMetrics:
    """What happened to the connections."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.failures = Counter(
            "kvroute_indexer_redis_failures",
            "Calls of the server that failed, by reason.",
            ("link", "reason"),
            registry=registry,
        )
        self.up = Gauge(
            "kvroute_indexer_redis_up", "1 while the server answers in time.", ("link",), registry=registry
        )


class RedisLink:
    """Connections of one kind to the server. Thread-safe.

    After a failure that more calls would share, the link is down: calls are refused without asking, until a
    `probe` is answered. So a hung server costs one time-out, not one for each request.

    Args:
        url: redis://, rediss://, valkey://, valkeys:// or unix://, with user, password and database.
        timeout_s: Longest wait for a connection, and for each part of an answer.
        retries: How often a call is tried again after a broken connection; never after a time-out.

    Raises:
        ConfigError: The URL is wrong.
    """

    def __init__(self, url: str, *, name: str, timeout_s: float, retries: int, metrics: RedisMetrics) -> None:
        self._name = name
        self._metrics = metrics
        self._pool = _pool(url, timeout_s, retries)
        self._client = Redis(connection_pool=self._pool)
        self._up = True
        metrics.up.labels(name).set(1)

    @property
    def client(self) -> Redis:
        """The client, to prepare scripts with; talk to the server in `call` only."""
        return self._client

    @property
    def up(self) -> bool:
        return self._up

    def call(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Gives what the server answers to a command of `client`.

        Raises:
            UnavailableError: The link is down, or the call failed.
        """
        if not self._up:
            raise UnavailableError("down")
        return self._try(command, *arguments, **options)

    def probe(self) -> None:
        """Asks the server for a sign of life; the link is up again if there is one."""
        try:
            self._try(self._client.ping)
        except UnavailableError:
            return
        if not self._up:
            self._up = True
            self._metrics.up.labels(self._name).set(1)
            _log.info("redis (%s) answers again", self._name)

    def close(self) -> None:
        self._client.close()
        self._pool.disconnect()

    def _try(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except RedisError as error:
            reason = next((label for kind, label in _REASONS.items() if isinstance(error, kind)), "protocol")
            self._metrics.failures.labels(self._name, reason).inc()
            # An answer that refuses one command says nothing against the next.
            if reason != "refused" and self._up:
                self._up = False
                self._metrics.up.labels(self._name).set(0)
                _log.warning("redis (%s) is not usable: %s: %s", self._name, reason, error)
            raise UnavailableError(reason) from error


def _pool(url: str, timeout_s: float, retries: int) -> BlockingConnectionPool:
    # What the index counts on; options of the same names in the URL are dropped.
    settings: dict[str, object] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), retries, supported_errors=(RedisConnectionError,)),
        "protocol": 2,
        "decode_responses": False,
        "max_connections": _CONNECTIONS_MAX,
        "timeout": timeout_s,
    }
    scheme, found, rest = url.partition("://")
    if not found or scheme not in _SCHEMES:
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise ConfigError(f"IndexerConfig.redis_url: must begin with one of {known}")
    try:
        server, _, query = f"{_SCHEMES[scheme]}://{rest}".partition("?")
        # Reading the port checks it.
        _ = urlsplit(server).port
        options = urlencode([option for option in parse_qsl(query) if option[0] not in settings])
        return BlockingConnectionPool.from_url(f"{server}?{options}", **settings)
    except (TypeError, ValueError):
        # The library's message may hold a part of the password.
        raise ConfigError(
            f"IndexerConfig.redis_url: no {scheme}:// URL of the form "
            f"{scheme}://[user:password@]host:port/database, or unix://path"
        ) from None
