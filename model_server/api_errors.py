"""Errors as the OpenAI API shows them: status code and ``{"error": {"message", "type", "param", "code"}}``.

In: an exception from below. Out: an ApiError that knows its status. Knows nothing of the web framework.
"""

from http import HTTPStatus

import msgspec

from model_server.errors import EngineClosedError, QueueFullError, RequestError
from tokenization import PromptError

_MESSAGE_CHARS_MAX = 1000

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status code.
        message: What was wrong and what to do; cut where it quotes too much of the request.
        param: The request's field at fault, if one is.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MESSAGE_CHARS_MAX else f"{message[:_MESSAGE_CHARS_MAX]}..."
        self.param = param

    def body(self) -> bytes:
        """The JSON body (also the payload of an error event in a stream)."""
        kind = _TYPES.get(self.status) or HTTPStatus(self.status).phrase.title().replace(" ", "") + "Error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def from_exception(error: PromptError | RequestError) -> ApiError:
    """The answer to a prompt that cannot be encoded, or to a request that the engine did not take."""
    if isinstance(error, QueueFullError | EngineClosedError):
        return ApiError(503, str(error))
    return ApiError(400, str(error), error.param)
