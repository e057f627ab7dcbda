"""Envoy's door: an ext_proc stream per HTTP request in, the picked pod and the untouched bytes out.

Knows the order of messages and answers of the endpoint picker protocol v1.0.0; what to pick is route()'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.envoy_headers import REQUEST_ID_HEADER, kept_request_id, subset_hint, system_owned
from router.errors import RequestError
from router.ext_proc_bytes import (
    REQUEST_BODY,
    Answer,
    Message,
    ResponseChunk,
    routed_bytes,
    streamed_bytes,
)
from router.ext_proc_messages import (
    BodyMode,
    header_values,
    immediate_answer,
    request_body_answer,
    request_headers_answer,
)
from router.ext_proc_response import ResponsePhase
from router.gateway_pick import GatewayPick
from router.h2.methods import ExchangeStream
from router.metrics import RouterMetrics
from router.outcomes import Outcomes
from router.parsers import DEFAULT_PATH, PATH_HEADERS, http_request
from router.request import RequestKind, RouteRequest, too_large

_DOOR = "ext_proc"
# Modes in which no part of a request goes on before its whole body is here.
_WHOLE_BODY = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)


@dataclass(frozen=True, slots=True)
class ExtProcOptions:
    """How the door behaves.

    Attributes:
        max_request_bytes: Larger bodies are answered with 413.
        responses_full: Whether the response passes here too; else the stream is closed after the request.
    """

    max_request_bytes: int = 8 << 20
    responses_full: bool = False


class ExtProcDoor:
    """envoy.service.ext_proc.v3.ExternalProcessor."""

    def __init__(
        self, picks: GatewayPick, outcomes: Outcomes, metrics: RouterMetrics, options: ExtProcOptions
    ) -> None:
        self._picks = picks
        self._outcomes = outcomes
        self._metrics = metrics
        self._options = options

    def exchange(self, stream: ExchangeStream) -> _Exchange:
        """One HTTP request's way, to be fed its messages one by one and closed."""
        return _Exchange(self._picks, self._outcomes, self._metrics, self._options, stream.is_active)


class _Exchange:
    """One HTTP request's way through the door.

    Attributes:
        finished: Whether the stream is to be closed from our side.
        is_routed: Whether nothing is left that could take its time.
    """

    def __init__(
        self,
        picks: GatewayPick,
        outcomes: Outcomes,
        metrics: RouterMetrics,
        options: ExtProcOptions,
        is_active: Callable[[], bool],
    ) -> None:
        self._picks = picks
        self._metrics = metrics
        self._options = options
        self._is_active = is_active
        self.finished = False
        self._body_mode = self._response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] | None = None
        self._candidates: frozenset[str] | None = None
        self._body = bytearray()
        self.is_routed = False
        self._response = ResponsePhase(outcomes)
        self._inside = metrics.inside(_DOOR)
        self._inside.__enter__()

    def answers(self, message: Message) -> Iterable[Answer]:
        """The answers to one message, in the order Envoy expects them."""
        if isinstance(message, ResponseChunk):
            return self._response.body(message, self._response_body_mode)
        return self._answers(message)

    def close(self) -> None:
        """The stream has ended, however it did."""
        self._inside.__exit__(None, None, None)
        if self._options.responses_full:
            self._response.close()

    def _answers(self, message: pb.ProcessingRequest) -> Iterator[Answer]:
        try:
            match message.WhichOneof("request"):
                case "request_headers":
                    yield from self._request_headers(message)
                case "request_body":
                    yield from self._request_body(message)
                case "request_trailers":
                    yield from self._request_trailers()
                case "response_headers":
                    yield from self._response.headers(message.response_headers, self._response_body_mode)
                case "response_body":
                    yield from self._response.body(message.response_body, self._response_body_mode)
                case "response_trailers":
                    yield from self._response.trailers(message.response_trailers)
                case _:
                    self._metrics.dropped(_DOOR, "unknown_message")
        except RequestError as error:
            self.finished = True
            yield immediate_answer(error)

    def _request_headers(self, message: pb.ProcessingRequest) -> Iterator[Answer]:
        if self._headers is not None:
            self._metrics.dropped(_DOOR, "second_request_headers")
            return
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._response_body_mode = message.protocol_config.response_body_mode
        self._headers = header_values(message.request_headers.headers)
        self._candidates = subset_hint(message.metadata_context)
        length = self._headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._options.max_request_bytes):
            self._refuse(too_large(self._options.max_request_bytes))
        if not message.request_headers.end_of_stream and self._body_mode not in _WHOLE_BODY:
            self._picks.pass_unseen()
        if message.request_headers.end_of_stream or self._body_mode == BodyMode.NONE:
            yield from self._route_by_load()
            self._finish_request()
        elif self._body_mode == BodyMode.BUFFERED:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        elif self._body_mode != BodyMode.FULL_DUPLEX_STREAMED:
            # In the other modes Envoy lets the headers go before the whole body is here.
            yield from self._route_by_load()

    def _request_body(self, message: pb.ProcessingRequest) -> Iterator[Answer]:
        body = message.request_body
        if self._headers is None:
            self._metrics.dropped(_DOOR, "body_before_headers")
        elif self._body_mode not in _WHOLE_BODY:
            yield pb.ProcessingResponse(request_body=pb.BodyResponse())
            if body.end_of_stream:
                self._finish_request()
        elif self.is_routed:
            # Envoy repeats the end of the stream for bodies above 1 MB.
            self._metrics.dropped(_DOOR, "repeated_end_of_stream")
        else:
            self._body += body.body
            if len(self._body) > self._options.max_request_bytes:
                self._refuse(too_large(self._options.max_request_bytes))
            if (candidates := subset_hint(message.metadata_context)) is not None:
                self._candidates = candidates
            if body.end_of_stream or self._body_mode == BodyMode.BUFFERED:
                yield from self._route(has_trailers=False)

    def _request_trailers(self) -> Iterator[Answer]:
        if self._headers is None:
            self._metrics.dropped(_DOOR, "trailers_before_headers")
        elif not self.is_routed:
            yield from self._route(has_trailers=True)
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        elif self._body_mode != BodyMode.FULL_DUPLEX_STREAMED:
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            self._finish_request()

    def _route(self, *, has_trailers: bool) -> Iterator[Answer]:
        """Picks for a request whose body is complete."""
        headers, body = self._headers or {}, bytes(self._body)
        self._body.clear()
        path = next((headers[name] for name in PATH_HEADERS if name in headers), DEFAULT_PATH)
        request_id, set_headers = _request_id(headers)
        try:
            request = http_request(request_id, path, body, self._candidates, headers)
            is_cut = self._picks.guard.forbidden(request, body) is not None
        except RequestError as error:
            self._refuse(error)
        if is_cut:
            self._metrics.dropped(_DOOR, "forbidden_field")
            body = self._picks.guard.without(body)
        destination = self._pick(request)
        if self._body_mode == BodyMode.BUFFERED:
            if is_cut:
                set_headers["content-length"] = str(len(body))
            changed = body if is_cut else None
            yield request_body_answer(destination, set_headers, system_owned(headers), body=changed)
        else:
            made_request_id = set_headers.get(REQUEST_ID_HEADER)
            yield routed_bytes(destination, made_request_id, system_owned(headers), len(body))
            yield from streamed_bytes(REQUEST_BODY, body, end_of_stream=not has_trailers)
        self._finish_request()

    def _route_by_load(self) -> Iterator[Answer]:
        """Picks for a request whose body is empty or comes too late."""
        headers = self._headers or {}
        request_id, set_headers = _request_id(headers)
        length = headers.get("content-length", "")
        body_bytes = int(length) if length.isdecimal() else 0
        request = RouteRequest(
            request_id,
            RequestKind.PASSTHROUGH,
            body_bytes=body_bytes,
            candidates=self._candidates,
            headers=headers,
        )
        destination = self._pick(request)
        yield request_headers_answer(destination, set_headers, system_owned(headers))

    def _pick(self, request: RouteRequest) -> str:
        """The destination's value."""
        self.is_routed = True
        decision = self._picks.decide(request, self._is_active)
        self._response.of(decision)
        return self._picks.destination(decision)

    def _refuse(self, error: RequestError) -> NoReturn:
        raise self._picks.refused(error)

    def _finish_request(self) -> None:
        self.finished = not self._options.responses_full


def _request_id(headers: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The request's id, and the header to set where it had to be made."""
    request_id, is_given = kept_request_id(headers)
    return request_id, {} if is_given else {REQUEST_ID_HEADER: request_id}
