"""Errors of the router: at its start, in its cluster, and with a client's request."""

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
    """Root of this package's errors."""


class ConfigError(RouterError):
    """A flag, a file or what it names is wrong: the message says what to do, the process exits with 2."""


class ListenError(RouterError):
    """An address is in use or not ours: the process exits with 1."""


class ClusterError(RouterError):
    """The Kubernetes API server refused something, or gave no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; 0: there was no answer


class TokenizerUnavailableError(RouterError):
    """A tokenizer in another process cannot be reached, or refuses to answer."""


class RequestError(RouterError):
    """A client's request that cannot be routed; the router itself answers it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, dropped_reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param  # the request's field that is wrong, if one is
        self.dropped_reason = dropped_reason  # for DROPPED_REASON_HEADER, if the protocol has one for this

    @property
    def error_type(self) -> str:
        """The `type` of the OpenAI-shaped body, named as vLLM names it."""
        return _ERROR_TYPES.get(self.status, "InternalServerError")

    def body(self) -> bytes:
        """The OpenAI-shaped JSON body."""
        error = {"message": str(self), "type": self.error_type, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class NoEndpointError(RequestError):
    """No pod is ready, or none of the candidates that the gateway allows."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, dropped_reason="rejected-no-endpoints")


class SaturatedError(RequestError):
    """The pods are saturated, and the request's priority is one that is shed first."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, dropped_reason="rejected-saturated")


class FlowError(RequestError):
    """Flow control did not let the request pass."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(status, message, dropped_reason=reason)


class EvictedError(RequestError):
    """Flow control took the request back from its pod, for a more important one."""

    def __init__(self) -> None:
        super().__init__(429, "request evicted by flow control", dropped_reason="evicted")
