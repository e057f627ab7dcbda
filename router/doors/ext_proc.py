"""Envoy's door: an ext_proc stream per HTTP request in, the picked pod and the untouched bytes out.

Knows the order of messages and answers of the endpoint picker protocol v1.0.0; what they say is their form's,
and what to pick is route()'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from router.doors.ext_proc_forms import DOOR, OwnForm
from router.doors.ext_proc_messages import (
    BodyMode,
    header_values,
    response_headers_answer,
    routed_answer,
    streamed_answers,
)
from router.doors.ext_proc_response import ResponsePhase
from router.doors.headers import kept_request_id, subset_hint, system_owned
from router.doors.health import EXT_PROC_SERVICE
from router.errors import EvictedError, RequestError
from router.feedback.lifecycle import Lifecycle
from router.h2 import GrpcServer
from router.h2.exchange_call import ExchangeCall, ExchangeMethod
from router.picking.decision import Decision
from router.picking.flow import Evictions
from router.prompts.request import RequestKind, RouteRequest, too_large

# Modes in which no part of a request goes on before its whole body is here.
_WHOLE_BODY = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED)


@dataclass(frozen=True, slots=True)
class ExtProcOptions:
    """How the door behaves."""

    max_request_bytes: int = 8 << 20  # larger bodies are answered with 413
    responses_full: bool = False  # whether the response passes here too; else a stream ends with its request
    subset_filter: bool = True  # whether the gateway's subset is looked at


@dataclass(frozen=True, slots=True)
class ExtProcDoor:
    """envoy.service.ext_proc.v3.ExternalProcessor."""

    form: OwnForm
    lifecycle: Lifecycle
    options: ExtProcOptions
    evictions: Evictions | None = None  # where requests are entered that may be taken back

    def add_to(self, server: GrpcServer, opened: Callable[[], Callable[[str], object]] | None = None) -> None:
        """Register the service; `opened`: see ExchangeMethod."""
        method = ExchangeMethod(
            partial(_Exchange, self),
            pb.ProcessingRequest.FromString,
            pb.ProcessingResponse.SerializeToString,
            partial(self.form.metrics.count, "dropped", DOOR, "slow_request"),
            opened,
        )
        server.add_exchange(f"/{EXT_PROC_SERVICE}/Process", method)


class _Exchange:
    """One HTTP request's way through the door; it is routed once its pod is picked."""

    def __init__(self, door: ExtProcDoor, stream: ExchangeCall) -> None:
        self._form = form = door.form
        self._options = door.options
        self._evictions = door.evictions
        self._stream = stream
        self.finished = self.is_routed = False
        self._body_mode = self._response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] | None = None
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._decision: Decision | None = None
        # In flight, where it may be taken back.
        self._entry: int | None = None
        self._response = ResponsePhase(door.lifecycle, form.held_bytes_max, form.reporter)
        self._inside = form.metrics.inside(DOOR)
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
                    told = self._form.response_headers(headers, message.metadata_context, self._decision)
                    yield response_headers_answer(told)
                case "response_trailers":
                    yield from self._response.trailers(message.response_trailers)
                case _:
                    self._drop("unknown_message")
        except RequestError as error:
            self.finished = True
            yield self._refusal(error)

    def last(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        if self._entry is not None and self._evictions is not None:
            self._evictions.leave(self._entry)
        self._inside.__exit__(None, None, None)
        if self._options.responses_full:
            self._response.close()

    def _request_headers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        if self._headers is not None:
            self._drop("second_request_headers")
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
            self._form.guard.unchecked()
        if is_all or self._body_mode == BodyMode.NONE:
            yield self._route_unseen(int(length) if length.isdecimal() else 0)
            self._finish_request()
        elif self._body_mode == BodyMode.BUFFERED:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        elif self._body_mode != BodyMode.FULL_DUPLEX_STREAMED:
            # In the other modes Envoy lets the headers go before the whole body is here.
            yield self._route_unseen(int(length) if length.isdecimal() else 0)

    def _request_body(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        body = message.request_body
        if self._headers is None:
            self._drop("body_before_headers")
        elif self._body_mode not in _WHOLE_BODY:
            yield pb.ProcessingResponse(request_body=pb.BodyResponse())
            if body.end_of_stream:
                self._finish_request()
        elif self.is_routed:
            # Envoy repeats the end of the stream for bodies above 1 MB.
            self._drop("repeated_end_of_stream")
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
            self._drop("trailers_before_headers")
        elif not self.is_routed:
            yield from self._route(has_trailers=True)
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        elif self._body_mode != BodyMode.FULL_DUPLEX_STREAMED:
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            self._finish_request()

    def _route(self, *, has_trailers: bool) -> Iterator[pb.ProcessingResponse]:
        """Pick for a request whose body is complete."""
        self.is_routed = True
        form, body = self._form, bytes(self._body)
        self._body.clear()
        request, sent = form.read(self._known(), body)
        decision = form.router.route(request, time.monotonic(), self._stream.is_active)
        self._note(decision, request)
        is_buffered = self._body_mode == BodyMode.BUFFERED
        changed = None if is_buffered and sent is body else sent
        told = form.request_headers(request, len(changed or b""), decision)
        destination, removed = decision.destination, system_owned(request.headers, told)
        scores = decision.routing.scores if form.emits_scores and decision.routing is not None else None
        if is_buffered:
            yield routed_answer("request_body", destination, told, removed, scores, changed)
        else:
            yield routed_answer("request_headers", destination, told, removed, scores)
            yield from streamed_answers("request_body", sent, end_of_stream=not has_trailers)
        self._finish_request()

    def _route_unseen(self, body_bytes: int) -> pb.ProcessingResponse:
        """Pick for a request whose body is empty or comes too late."""
        self.is_routed = True
        request = self._known(body_bytes)
        destination, decision = self._form.pick_unseen(request, self._stream.is_active)
        if decision is not None:
            self._response.of(decision)
        told = self._form.request_headers(request, 0, decision)
        removed = system_owned(request.headers, told)
        return routed_answer("request_headers", destination, told, removed)

    def _known(self, body_bytes: int = 0) -> RouteRequest:
        """Return what is known of the request without its body."""
        headers = self._headers or {}
        request_id, _ = kept_request_id(headers)
        candidates = self._subset if self._options.subset_filter else None
        return RouteRequest(
            request_id,
            RequestKind.PASSTHROUGH,
            body_bytes=body_bytes,
            candidates=candidates,
            headers=headers,
        )

    def _note(self, decision: Decision, request: RouteRequest) -> None:
        """Remember what the response needs, and refuse what came to nothing."""
        self._decision = decision
        self._response.of(decision)
        if (error := self._form.objection(request, decision)) is not None:
            self._response.cut()
            raise error
        if request.client_model is not None:
            self._response.models = (request.model or "", request.client_model)
        if request.body.get("stream") is True:
            self._response.streams()
        if decision.priority < 0 and decision.is_charged and self._evictions is not None:
            # The answer to it comes behind whatever is being answered.
            evict = partial(self._stream.interrupt, self._evicted)
            self._entry = self._evictions.enter(decision.priority, evict)

    def _evicted(self) -> Iterator[pb.ProcessingResponse]:
        """The answer to a request that is taken back, unless it is over already."""
        if self._response.awaited is not None:
            self._response.cut()
            yield self._refusal(EvictedError())

    def _drop(self, reason: str) -> None:
        self._form.metrics.count("dropped", DOOR, reason)

    def _refusal(self, error: RequestError) -> pb.ProcessingResponse:
        self._form.metrics.refused(error)
        return self._form.refusal(error)

    def _finish_request(self) -> None:
        self.finished = not self._options.responses_full
