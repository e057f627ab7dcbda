"""Errors of the indexer."""

from __future__ import annotations


class IndexerError(Exception):
    """Base class of the indexer's errors."""


class ConfigError(IndexerError, ValueError):
    """Invalid setting or pods file; the message names file, line and field, and the expected value."""


class ListenError(IndexerError):
    """Port that cannot be bound; the message names the flag."""


class TokenError(IndexerError, ValueError):
    """Token id outside of 0..2**32-1, or not an integer."""


class _ReasonedError(IndexerError):
    """Base class of errors with a short reason, used as a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PayloadError(_ReasonedError, ValueError):
    """Payload or event that cannot be decoded."""


class PeerError(_ReasonedError):
    """Snapshot that a peer refuses to send, or that cannot be used."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, f"{reason}: {message}")


class UnavailableError(_ReasonedError):
    """Redis server that does not answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, f"redis: {reason}")
