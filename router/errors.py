"""Errors of the router: at its start, of its cluster, and for client requests."""

from __future__ import annotations

import msgspec

DROPPED_REASON_HEADER = "x-llm-d-request-dropped-reason"

_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    431: "RequestHeaderFieldsTooLargeError",
    503: "ServiceUnavailableError",
}


class RouterError(Exception):
    """Base class of the router's errors."""


class ConfigError(RouterError, ValueError):
    """Invalid flag or file. The message says what to do; the process exits with status 2."""


class ListenError(RouterError):
    """Address in use or not of this host. The process exits with status 1."""


class ClusterError(RouterError):
    """Request that the Kubernetes API server rejected or did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # HTTP status; 0 without a response


class TokenizerUnavailableError(RouterError):
    """Failure of a tokenizer in another process: unreachable, or without a valid response."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final  # whether the server cannot do this at all


class RequestError(RouterError):
    """Client request that cannot be routed; the router returns the error to the client."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, dropped_reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param  # invalid field of the request, if any
        self.dropped_reason = dropped_reason  # value of DROPPED_REASON_HEADER, if llm-d defines one

    @property
    def error_type(self) -> str:
        """Error `type` of the OpenAI-shaped body, with vLLM's names."""
        return _ERROR_TYPES.get(self.status, "InternalServerError")

    def body(self) -> bytes:
        """Return the OpenAI-shaped JSON body."""
        error = {"message": str(self), "type": self.error_type, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class NoEndpointError(RequestError):
    """Rejection because no pod is ready, or none of the gateway's candidates."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, dropped_reason="rejected-no-endpoints")


class SaturatedError(RequestError):
    """Rejection of a request of low priority because the pods are saturated."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, dropped_reason="rejected-saturated")


class EvictedError(RequestError):
    """Eviction of an in-flight request by flow control, in favour of one of higher priority."""

    def __init__(self) -> None:
        super().__init__(429, "request evicted by flow control", dropped_reason="evicted")
