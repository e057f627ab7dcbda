"""The indexer's errors.

IndexerError
├── ConfigError       a setting or the pods file is wrong: message names file, line and field
├── ListenError       a port cannot be listened on
├── TokenError        token ids that no engine could have produced
├── UnavailableError  Redis did not answer; carries the reason's label
├── PeerError         a peer gave no snapshot, or none of use; carries the reason's label
└── PayloadError      a published payload, or one event, that cannot be read; carries the reason's label
"""

from __future__ import annotations


class IndexerError(Exception):
    """Whatever the indexer refuses."""


class ConfigError(IndexerError, ValueError):
    """A setting is wrong; the message says which one, where, and what it must be."""


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
