"""Envoy's cheapest door: ext_authz in its HTTP form, the client's request in, the picked pod's header out.

For an Envoy of our own configuration: with_request_body, no partial bodies, and the stand-ins of
`check_answers` mapped back. The response never passes here; its end is told by the access log. What to pick
is route()'s.
"""

from __future__ import annotations

from collections.abc import Callable

from router.check_answers import denied_answer, ok_answer, routed_answer
from router.check_request import CheckRequests
from router.envoy_headers import kept_request_id, subset_header, system_owned
from router.errors import RequestError
from router.gateway_pick import GatewayPick
from router.http_listen import HttpServer
from router.http_requests import HttpRequest, HttpRequestError
from router.metrics import RouterMetrics
from router.steps import Steps

_DOOR = "check_http"


class CheckHttpDoor:
    """ext_authz over HTTP/1.1.

    Args:
        max_request_bytes: Larger bodies are answered with 413.
    """

    def __init__(self, picks: GatewayPick, metrics: RouterMetrics, max_request_bytes: int = 8 << 20) -> None:
        self._picks = picks
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes
        self._requests = CheckRequests(_DOOR, picks, metrics, max_request_bytes)

    def listen(
        self, flag: str, host: str, port: int, *, inline_bytes_max: int, connections_max: int
    ) -> HttpServer:
        """A server of this door, bound and not started.

        Args:
            inline_bytes_max: See HttpServer, as for `connections_max`.

        Raises:
            ListenError: The address is in use or not ours.
        """
        return HttpServer(
            flag,
            host,
            port,
            self.answer,
            self._refuse,
            body_bytes_max=self._max_request_bytes,
            inline_bytes_max=inline_bytes_max,
            connections_max=connections_max,
            refused=lambda: self._metrics.dropped(_DOOR, "too_many_connections"),
        )

    def answer(self, request: HttpRequest, closes: bool, is_active: Callable[[], bool]) -> Steps[bytes]:
        """Serves one HTTP request.

        Args:
            closes: The connection ends behind the answer.
            is_active: Whether the client still waits.
        """
        with self._metrics.inside(_DOOR):
            headers, body = request.headers, request.body
            request_id, is_given = kept_request_id(headers)
            try:
                routed = self._requests.read(
                    request_id,
                    request.method,
                    request.path,
                    body,
                    headers,
                    subset_header(headers),
                    len(body),
                )
                decision = yield from self._picks.deciding(routed, is_active)
            except RequestError as error:
                return denied_answer(error, closes, has_body=request.method != "HEAD")
        destination = self._picks.destination(decision)
        routing = decision.routing
        removed = system_owned(headers, () if routing is None else routing.request_headers)
        made_request_id = None if is_given else request_id
        if routing is None and is_given:
            return ok_answer(destination, None, removed, closes)
        return routed_answer(destination, made_request_id, removed, closes, routing)

    def _refuse(self, error: HttpRequestError) -> bytes:
        """Answers what is no request."""
        self._metrics.dropped(_DOOR, "unreadable_request")
        return denied_answer(self._picks.refused(RequestError(error.status, str(error))), True)
