"""The API key: requests to the guarded paths must carry it.

In: ASGI requests. Out: a 401, or what the application answers. What probes, scrapers and routers read stays
open; the snapshot among it tells no more than the event stream does.
"""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from model_server.api_errors import ApiError
from model_server.http_io import send_error

_OPEN_PATHS = frozenset(
    {
        "/health",
        "/ping",
        "/metrics",
        "/version",
        "/load",
        "/kv_event_sources",
        "/kv_events/snapshot",
        "/is_sleeping",
    }
)


class ApiKeyGate:
    """ASGI layer that knows one key.

    Args:
        app: The application.
        api_key: The key, sent as `Authorization: Bearer KEY`.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for those who may; the ASGI interface."""
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(given, self._expected):
                await send_error(send, ApiError(401, "send the API key as Authorization: Bearer KEY"))
                return
        await self._app(scope, receive, send)
