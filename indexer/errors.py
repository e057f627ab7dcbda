"""The indexer's errors."""

from __future__ import annotations


class IndexerError(Exception):
    """Whatever the indexer refuses."""


class ConfigError(IndexerError, ValueError):
    """A setting or the pods file is wrong; the message names file, line and field, and what it must be."""


class ListenError(IndexerError):
    """A port cannot be listened on; the message names the flag."""


class TokenError(IndexerError, ValueError):
    """Token ids outside of 0..2**32-1, or not whole numbers."""


class _ReasonedError(IndexerError):
    """Base of those whose reason is a short label for metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PayloadError(_ReasonedError, ValueError):
    """A payload that cannot be read as a batch of events, or an event that cannot be read."""


class PeerError(_ReasonedError):
    """A snapshot of a view that a peer does not give, or that cannot be used."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, f"{reason}: {message}")


class UnavailableError(_ReasonedError):
    """Redis did not answer."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, f"redis: {reason}")
