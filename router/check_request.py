"""What both forms of the ext_authz door are asked: headers, path and body in, a RouteRequest out.

Knows when a body is only a part of one; knows neither gRPC nor HTTP's own form.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from router.body_guard import refusal
from router.errors import RequestError
from router.gateway_pick import GatewayPick
from router.metrics import RouterMetrics
from router.request import RequestKind, RouteRequest, http_request, too_large

PARTIAL_BODY_HEADER = "x-envoy-auth-partial-body"

# Methods whose requests need no body.
_BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})

_log = logging.getLogger(__name__)


class CheckRequests:
    """Reads the requests of one door.

    Args:
        door: Its name in the metrics.
        max_request_bytes: Larger bodies are answered with 413.
    """

    def __init__(self, door: str, picks: GatewayPick, metrics: RouterMetrics, max_request_bytes: int) -> None:
        self._door = door
        self._picks = picks
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes
        self._told_partial = False

    def read(
        self,
        request_id: str,
        method: str,
        path: str,
        body: bytes | bytearray,
        headers: Mapping[str, str],
        candidates: frozenset[str] | None,
        size_bytes: int,
    ) -> RouteRequest:
        """The request to be routed.

        Args:
            candidates: The pods that the gateway allows; None: all.
            size_bytes: The body's size as the gateway tells it.

        Raises:
            RequestError: Counted already.
        """
        if len(body) > self._max_request_bytes:
            raise self._picks.refused(too_large(self._max_request_bytes))
        partial = is_partial(headers, body)
        if partial:
            self._tell_partial()
        guard = self._picks.guard
        try:
            if partial or not body:
                if partial or method not in _BODILESS:
                    guard.unchecked()
                return RouteRequest(
                    request_id,
                    RequestKind.PASSTHROUGH,
                    body_bytes=max(size_bytes, len(body)),
                    candidates=candidates,
                    headers=headers,
                )
            request = http_request(request_id, path, body, candidates, headers)
            if (field := guard.forbidden(request, body)) is not None:
                raise refusal(field)
        except RequestError as error:
            raise self._picks.refused(error) from error
        return request

    def _tell_partial(self) -> None:
        """A request whose body is not all here is picked for by load alone, and never without a word."""
        self._metrics.dropped(self._door, "partial_body")
        if not self._told_partial:
            self._told_partial = True
            _log.warning(
                "Envoy hands on partial bodies, whose requests are picked for by load alone: set "
                "with_request_body with allow_partial_message: false in its ext_authz filter"
            )


def is_partial(headers: Mapping[str, str], body: bytes | bytearray) -> bool:
    """Whether Envoy handed on less than the client sends."""
    length = headers.get("content-length", "")
    announced = int(length) if length.isdecimal() and len(length) <= 18 else len(body)
    return announced > len(body) or headers.get(PARTIAL_BODY_HEADER) == "true"
