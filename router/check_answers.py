"""Envoy ext_authz's answers in their HTTP form; values in, whole HTTP/1.1 answers out, no decisions.

Which of an answer's headers go to the pod and which to the client is told by Envoy's configuration, see
`router.local.envoy_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus

from router.envoy_headers import DESTINATION_HEADER, REQUEST_ID_HEADER, error_headers
from router.errors import RequestError
from router.routing import Routing

REMOVED_HEADER = "x-envoy-auth-headers-to-remove"

STAND_INS = {500: 470, 503: 473}
"""What the router answers in the place of a status that Envoy would take for the router's own failure.

Envoy forgets body and headers of such an answer; it has to map the stand-ins back (a local reply's mapper).
"""


@lru_cache(maxsize=4096)
def ok_answer(destination: str, made_request_id: str | None, removed: tuple[str, ...], closes: bool) -> bytes:
    """The routing result; the same for most requests to one pod.

    Args:
        removed: Names of the request's headers that no pod is to see.
        closes: Whether the connection ends behind it.
    """
    return routed_answer(destination, made_request_id, removed, closes)


def routed_answer(
    destination: str,
    made_request_id: str | None,
    removed: tuple[str, ...],
    closes: bool,
    routing: Routing | None = None,
) -> bytes:
    """The same with more headers.

    Args:
        routing: Has further headers for request and response; None: there are none.
    """
    headers = {DESTINATION_HEADER: destination}
    if made_request_id is not None:
        headers[REQUEST_ID_HEADER] = made_request_id
    if removed:
        headers[REMOVED_HEADER] = ",".join(removed)
    if routing is not None:
        headers |= {**routing.request_headers, **routing.response_headers}
    return _answer(HTTPStatus.OK, headers, b"", closes)


def denied_answer(error: RequestError, closes: bool, *, has_body: bool = True) -> bytes:
    """The router's own answer to the client.

    Args:
        has_body: False for the answer to a HEAD, of which only the head may come.
    """
    status = STAND_INS.get(error.status, error.status)
    return _answer(status, error_headers(error), error.body(), closes, has_body=has_body)


def _answer(
    status: int, headers: Mapping[str, str], body: bytes, closes: bool, *, has_body: bool = True
) -> bytes:
    lines = [f"HTTP/1.1 {status} -", *(f"{name}: {_one_line(value)}" for name, value in headers.items())]
    lines.append(f"content-length: {len(body)}")
    if closes:
        lines.append("connection: close")
    head = "\r\n".join(lines).encode("utf-8") + b"\r\n\r\n"
    return head + body if has_body else head


def _one_line(value: str) -> str:
    """A value that cannot begin another header, whatever a plugin made it of."""
    return value if value.isprintable() else "".join(filter(str.isprintable, value))
