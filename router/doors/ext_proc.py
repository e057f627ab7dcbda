"""Envoy's ext_proc service: picks a pod for each HTTP request and passes its body on.

Implements the order of messages of the endpoint picker protocol v1.0.0. The dialect decides their content,
`Router.route` the pod.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.boundary import DESTINATION_HEADER, accepted_request_id, subset_hint, system_owned
from router.doors.ext_proc_dialects import (
    SERVICE,
    BodyMode,
    NativeDialect,
    header_values,
    response_headers_reply,
    routing_response,
    streamed_body_responses,
)
from router.doors.ext_proc_response import ResponsePhase
from router.doors.health import EXT_PROC_SERVICE
from router.errors import EvictedError, RequestError
from router.feedback.lifecycle import Lifecycle
from router.h2 import GrpcServer
from router.h2.exchange_call import Exchange, ExchangeCall, ExchangeMethod
from router.picking.decision import Decision
from router.picking.flow import EvictableRequests
from router.prompts.request import RouteRequest, too_large, unread_request

# Modes in which Envoy forwards no part of a request before the service has received the whole body.
_WHOLE_BODY = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)


@dataclass(frozen=True, slots=True)
class ExtProcOptions:
    """Options of the ext_proc service."""

    max_request_bytes: int = 8 << 20  # larger bodies are rejected with 413
    responses_full: bool = False  # whether Envoy sends the response too; else a stream ends with its request
    subset_filter: bool = True  # whether the gateway's endpoint subset restricts the candidates


@dataclass(frozen=True, slots=True)
class ExtProcService:
    """gRPC service envoy.service.ext_proc.v3.ExternalProcessor."""

    dialect: NativeDialect
    lifecycle: Lifecycle
    options: ExtProcOptions
    evictable: EvictableRequests | None = None  # registry of in-flight requests that may be evicted

    def add_to(self, server: GrpcServer, opened: Callable[[], Callable[[str], object]] | None = None) -> None:
        """Register the service; `opened` is called for each new stream, as `ExchangeMethod` describes."""
        method = ExchangeMethod(
            partial(_Exchange, self),
            pb.ProcessingRequest.FromString,
            pb.ProcessingResponse.SerializeToString,
            partial(self.dialect.metrics.count, "dropped_messages", SERVICE, "slow_request"),
            opened,
        )
        server.add_exchange(f"/{EXT_PROC_SERVICE}/Process", method)


class _Exchange(Exchange):
    """One HTTP request on its ext_proc stream; `is_routed` once its pod is picked."""

    def __init__(self, service: ExtProcService, stream: ExchangeCall) -> None:
        self._dialect = dialect = service.dialect
        self._options = service.options
        self._evictable, self._lifecycle = service.evictable, service.lifecycle
        self._stream = stream
        self.finished = self.is_routed = False
        self._body_mode = self._response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] | None = None
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._decision: Decision | None = None
        # Entry in the eviction registry; None: the request cannot be evicted.
        self._entry: int | None = None
        self._response = ResponsePhase(service.lifecycle, dialect.buffered_bytes_max, dialect.reporter)
        self._inside = dialect.metrics.inside(SERVICE)
        self._inside.__enter__()

    def answers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        try:
            match message.WhichOneof("request"):
                case "response_body":
                    yield from self._response.body(message.response_body, self._response_body_mode)
                case "request_headers":
                    yield from self._request_headers(message)
                case "request_body":
                    yield from self._request_body(message)
                case "request_trailers":
                    yield from self._request_trailers()
                case "response_headers":
                    headers = self._response.headers(message.response_headers, self._response_body_mode)
                    added = self._dialect.response_headers(headers, message.metadata_context, self._decision)
                    yield response_headers_reply(added)
                case "response_trailers":
                    yield from self._response.trailers(message.response_trailers)
                case _:
                    self._count_dropped("unknown_message")
        except RequestError as error:
            self.finished = True
            yield self._error_response(error)

    def close(self) -> None:
        if self._entry is not None and self._evictable is not None:
            self._evictable.remove(self._entry)
        self._inside.__exit__(None, None, None)
        if self._options.responses_full:
            self._response.close()

    def _request_headers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        if self._headers is not None:
            self._count_dropped("second_request_headers")
            return
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._response_body_mode = message.protocol_config.response_body_mode
        self._headers = header_values(message.request_headers.headers)
        self._subset = subset_hint(message.metadata_context)
        is_all = message.request_headers.end_of_stream
        length = self._headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._options.max_request_bytes):
            raise too_large(self._options.max_request_bytes)
        if not is_all and self._body_mode not in _WHOLE_BODY:
            self._dialect.guard.unchecked()
        if is_all or self._body_mode == BodyMode.NONE:
            yield self._route_without_body(int(length) if length.isdecimal() else 0)
            self._finish_request()
        elif self._body_mode == BodyMode.BUFFERED:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        elif self._body_mode != BodyMode.FULL_DUPLEX_STREAMED:
            # In the other modes Envoy forwards the headers before the whole body has arrived.
            yield self._route_without_body(int(length) if length.isdecimal() else 0)

    def _request_body(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        body = message.request_body
        if self._headers is None:
            self._count_dropped("body_before_headers")
        elif self._body_mode not in _WHOLE_BODY:
            yield pb.ProcessingResponse(request_body=pb.BodyResponse())
            if body.end_of_stream:
                self._finish_request()
        elif self.is_routed:
            # Envoy repeats the end of the stream for bodies above 1 MB.
            self._count_dropped("repeated_end_of_stream")
        else:
            self._body += body.body
            if len(self._body) > self._options.max_request_bytes:
                raise too_large(self._options.max_request_bytes)
            if (subset := subset_hint(message.metadata_context)) is not None:
                self._subset = subset
            if body.end_of_stream or self._body_mode == BodyMode.BUFFERED:
                yield from self._route(has_trailers=False)

    def _request_trailers(self) -> Iterator[pb.ProcessingResponse]:
        if self._headers is None:
            self._count_dropped("trailers_before_headers")
        elif not self.is_routed:
            yield from self._route(has_trailers=True)
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        elif self._body_mode != BodyMode.FULL_DUPLEX_STREAMED:
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            self._finish_request()

    def _route(self, *, has_trailers: bool) -> Iterator[pb.ProcessingResponse]:
        """Pick a pod for a request whose body is complete."""
        self.is_routed = True
        dialect, body = self._dialect, bytes(self._body)
        self._body.clear()
        request, sent = dialect.parse(self._request_without_body(), body)
        self._note_repeats(request)
        decision = dialect.router.route(request, time.monotonic(), self._stream.is_active)
        self._track(decision, request)
        is_buffered = self._body_mode == BodyMode.BUFFERED
        changed = None if is_buffered and sent is body else sent
        added = dialect.request_headers(request, len(changed or b""), decision)
        destination, removed = decision.destination, system_owned(request.headers, added)
        scores = decision.pipeline.scores if dialect.emits_scores and decision.pipeline is not None else None
        if is_buffered:
            yield routing_response("request_body", destination, added, removed, scores, changed)
        else:
            yield routing_response("request_headers", destination, added, removed, scores)
            yield from streamed_body_responses("request_body", sent, end_of_stream=not has_trailers)
        self._finish_request()

    def _route_without_body(self, body_bytes: int) -> pb.ProcessingResponse:
        """Pick a pod for a request whose body is empty or arrives after the pick."""
        self.is_routed = True
        request = self._request_without_body(body_bytes)
        self._note_repeats(request)
        destination, decision = self._dialect.pick_without_body(request, self._stream.is_active)
        if decision is not None:
            self._response.expect(decision)
        added = self._dialect.request_headers(request, 0, decision)
        removed = system_owned(request.headers, added)
        return routing_response("request_headers", destination, added, removed)

    def _request_without_body(self, body_bytes: int = 0) -> RouteRequest:
        """Build a request from the headers alone; `body_bytes`: size by its content-length."""
        headers = self._headers or {}
        request_id, _ = accepted_request_id(headers)
        candidates = self._subset if self._options.subset_filter else None
        return unread_request(request_id, body_bytes, candidates, headers)

    def _track(self, decision: Decision, request: RouteRequest) -> None:
        """Prepare the response phase, and register the request for eviction where its priority allows it."""
        self._decision = decision
        self._response.expect(decision)
        if (error := self._dialect.precondition_error(request, decision)) is not None:
            self._response.abort()
            raise error
        if request.client_model is not None:
            self._response.models = (request.model or "", request.client_model)
        if request.body.get("stream") is True:
            self._response.buffered = None
        if decision.priority < 0 and decision.is_charged and self._evictable is not None:
            # The stream sends the eviction's response after those of the message in progress.
            evict = partial(self._stream.interrupt, self._evicted)
            self._entry = self._evictable.add(decision.priority, evict)

    def _evicted(self) -> Iterator[pb.ProcessingResponse]:
        """Yield the error response of an evicted request, unless the request has ended."""
        if self._response.pending is not None:
            self._response.abort()
            yield self._error_response(EvictedError())

    def _note_repeats(self, request: RouteRequest) -> None:
        """Record whether another filter of the same gateway has this request's pick already."""
        named, lifecycle = request.headers.get(DESTINATION_HEADER), self._lifecycle
        again = named is not None and lifecycle.ledger.is_on(request.request_id, named)
        lifecycle.outcomes.called(request.request_id, again=again)

    def _count_dropped(self, reason: str) -> None:
        self._dialect.metrics.count("dropped_messages", SERVICE, reason)

    def _error_response(self, error: RequestError) -> pb.ProcessingResponse:
        self._dialect.metrics.refused(error)
        return self._dialect.error_response(error)

    def _finish_request(self) -> None:
        self.finished = not self._options.responses_full
