"""What can go wrong in the router.

RouterError
├── ConfigError       start-up input is wrong: the process exits with 2
├── ListenError       an address cannot be listened on: the process exits with 1
├── ClusterError      the Kubernetes API server refuses, or cannot be reached
├── TokenizerUnavailableError   a tokenizer elsewhere gives no answer: the pick goes by load alone
└── RequestError      a client's request cannot be routed: answered as an OpenAI-shaped error
    ├── NoEndpointError   no pod may take it: 503 with the endpoint picker protocol's reason
    ├── SaturatedError    every pod is busy and it may be shed: 429 with the protocol's reason
    ├── NoEndpointLeftError   the configured filters left no pod: 429 with the same reason
    ├── EvictedError      flow control took it back while it was in flight: 429 with the protocol's reason
    └── FlowError         flow control did not let it pass: 429 or 503 with its own reason
"""

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
    """A flag, a configuration file or a file it names is wrong; the message says where and what to do."""


class ListenError(RouterError):
    """An address is in use or not ours."""


class ClusterError(RouterError):
    """The Kubernetes API server refused something, or gave no answer.

    Attributes:
        status: HTTP status; 0: there was no answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class TokenizerUnavailableError(RouterError):
    """A tokenizer in another process cannot be reached, or refuses to answer."""


class RequestError(RouterError):
    """A request that is answered by the router itself.

    Attributes:
        status: HTTP status.
        param: The request's field that is wrong, if one is.
        dropped_reason: Value of the `x-llm-d-request-dropped-reason` header, if the protocol has one for
            this.
    """

    dropped_reason: str | None = None

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

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

    dropped_reason = "rejected-no-endpoints"

    def __init__(self, message: str) -> None:
        super().__init__(503, message)


class SaturatedError(RequestError):
    """The pods are saturated, and the request's priority is one that is shed first."""

    dropped_reason = "rejected-saturated"

    def __init__(self, message: str) -> None:
        super().__init__(429, message)


class NoEndpointLeftError(RequestError):
    """The configured filters left no pod."""

    dropped_reason = "rejected-saturated"

    def __init__(self, message: str) -> None:
        super().__init__(429, message)


class FlowError(RequestError):
    """Flow control did not let the request pass."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(status, message)
        self.dropped_reason = reason


class EvictedError(RequestError):
    """Flow control took the request back from its pod, for a more important one."""

    dropped_reason = "evicted"

    def __init__(self) -> None:
        super().__init__(429, "request evicted by flow control")
