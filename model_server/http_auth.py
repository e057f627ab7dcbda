"""Bearer secrets, and which port answers what: the API key of clients, the token of operators.

In: ASGI requests. Out: a 401, or what the application of the request's port answers. What probes and scrapers
read needs no secret.
"""

import hmac
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from model_server.api_errors import ApiError
from model_server.http_io import send_error

_OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version", "/load"})


@dataclass(frozen=True, slots=True)
class AdminPort:
    """The port that serves administration and snapshots.

    Attributes:
        number: The port.
        token: Bearer secret of the requests there; None lets everybody in who reaches it.
    """

    number: int
    token: str | None = field(default=None, repr=False)


class BearerGate:
    """ASGI layer that knows one secret.

    Args:
        app: The application.
        secret: Sent as `Authorization: Bearer SECRET`.
        name: What the secret is called in errors.
    """

    def __init__(self, app: ASGIApp, secret: str, name: str) -> None:
        self._app = app
        self._expected = f"Bearer {secret}".encode()
        self._message = f"send {name} as Authorization: Bearer SECRET"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for those who may; the ASGI interface."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                await send_error(send, ApiError(401, self._message))
                return
        await self._app(scope, receive, send)


def by_port(number: int, there: ASGIApp, elsewhere: ASGIApp) -> ASGIApp:
    """Return an application that is `there` for connections to one port, and `elsewhere` for all others.

    The port is the accepted socket's own: no header can name another.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        at_port = server is not None and server[1] == number
        await (there if at_port else elsewhere)(scope, receive, send)

    return app
