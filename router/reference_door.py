"""Envoy's door in the reference picker's form: ext_proc streams in, its very answers out.

Used instead of `ext_proc` for an EndpointPickerConfig. Knows the order of messages and answers; what to pick
is route()'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import numpy as np
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from msgspec.structs import replace

from router.attribute_reporter import AttributeReporter
from router.body_guard import refusal
from router.candidates import is_allowed, not_allowed
from router.decision import Decision
from router.envoy_headers import (
    REQUEST_ID_HEADER,
    kept_request_id,
    served_endpoint,
    subset_hint,
    system_owned,
)
from router.errors import EvictedError, RequestError
from router.ext_proc_bytes import Answer, Message, ResponseChunk
from router.ext_proc_messages import (
    BodyMode,
    header_values,
    request_body_answer,
    request_headers_answer,
    streamed,
)
from router.ext_proc_response import ResponsePhase
from router.flow import Evictable, Evictions
from router.gateway_pick import GatewayPick
from router.h2.methods import ExchangeStream
from router.metrics import RouterMetrics
from router.outcomes import Outcomes
from router.parsers import Api, Parsers
from router.pods import PodSet
from router.reference_messages import (
    immediate_answer,
    kept_headers,
)
from router.reference_response import ReferenceResponse
from router.request import MODEL_CHARS_MAX, RequestKind, RouteRequest, too_large
from router.rewrite import RewriteRules, with_model

_DOOR = "ext_proc"
_MODEL_HEADERS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")


@dataclass(frozen=True, slots=True)
class ReferenceOptions:
    """How the door behaves.

    Attributes:
        max_request_bytes: Larger bodies are answered with 413; so much of a response is held at most.
        responses_full: Whether the response passes here too; else the stream is closed after the request.
        emit_scores: Whether the metadata tells all scores.
        subset_filter: Whether the gateway's subset is looked at.
        tells_served: Whether responses name the endpoint that the gateway says it used, for its tests.
    """

    max_request_bytes: int = 8 << 20
    responses_full: bool = True
    emit_scores: bool = False
    subset_filter: bool = True
    tells_served: bool = False


@dataclass(frozen=True, slots=True)
class ReferenceParts:
    """What the door works with.

    Attributes:
        rewrites: Rules for model names.
        reporter: None: nothing of the usage is reported.
        evictions: Where requests are entered that may be taken back; None: none are.
    """

    picks: GatewayPick
    outcomes: Outcomes
    metrics: RouterMetrics
    pods: PodSet
    parsers: Parsers
    rewrites: RewriteRules
    reporter: AttributeReporter | None
    random: np.random.Generator
    evictions: Evictions | None = None


class ReferenceDoor:
    """envoy.service.ext_proc.v3.ExternalProcessor."""

    def __init__(self, parts: ReferenceParts, options: ReferenceOptions) -> None:
        self._parts = parts
        self._options = options

    def exchange(self, stream: ExchangeStream) -> ReferenceExchange:
        """One HTTP request's way, to be fed its messages one by one and closed."""
        return ReferenceExchange(self._parts, self._options, stream)


class ReferenceExchange:
    """One HTTP request's way through the door.

    Attributes:
        finished: Whether the stream is to be closed from our side.
        is_routed: Whether its pod is picked.
    """

    def __init__(self, parts: ReferenceParts, options: ReferenceOptions, stream: ExchangeStream) -> None:
        self._parts = parts
        self._options = options
        self._stream = stream
        self.finished = False
        # In flight, where it may be taken back.
        self._entry: Evictable | None = None
        self._body_mode = self._response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._headers: dict[str, str] | None = None
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self.is_routed = False
        self._inside = parts.metrics.inside(_DOOR)
        self._inside.__enter__()
        self._phase = ResponsePhase(parts.outcomes)
        self._response = ReferenceResponse(self._phase, parts.reporter, options.max_request_bytes)

    def answers(self, message: Message) -> Iterator[Answer]:
        """The answers to one message, in the order Envoy expects them."""
        if isinstance(message, ResponseChunk):
            yield from self._response.body(message, self._response_body_mode)
            return
        try:
            match message.WhichOneof("request"):
                case "request_headers":
                    yield from self._request_headers(message)
                case "request_body":
                    yield from self._request_body(message)
                case "request_trailers":
                    yield from self._request_trailers()
                case "response_headers":
                    served = served_endpoint(message.metadata_context) if self._options.tells_served else None
                    yield from self._response.headers(
                        message.response_headers, self._response_body_mode, served
                    )
                case "response_body":
                    yield from self._response.body(message.response_body, self._response_body_mode)
                case "response_trailers":
                    yield from self._response.trailers(message.response_trailers)
                case _:
                    self._parts.metrics.dropped(_DOOR, "unknown_message")
        except RequestError as error:
            self.finished = True
            yield immediate_answer(error)

    def _evicted(self) -> Iterator[pb.ProcessingResponse]:
        """The answer to a request that is taken back, unless it is over already."""
        if self._phase.request_id is not None:
            self._phase.cut()
            yield immediate_answer(self._parts.picks.refused(EvictedError()))

    def close(self) -> None:
        """The stream has ended, however it did."""
        if self._entry is not None and self._parts.evictions is not None:
            self._parts.evictions.leave(self._entry)
        self._inside.__exit__(None, None, None)
        if self._options.responses_full:
            self._phase.close()

    def _request_headers(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        if self._headers is not None:
            self._parts.metrics.dropped(_DOOR, "second_request_headers")
            return
        if message.HasField("protocol_config"):
            self._body_mode = message.protocol_config.request_body_mode
            self._response_body_mode = message.protocol_config.response_body_mode
        self._headers = header_values(message.request_headers.headers)
        self._subset = subset_hint(message.metadata_context)
        if message.request_headers.end_of_stream or self._body_mode == BodyMode.NONE:
            yield self._any_endpoint(has_body=not message.request_headers.end_of_stream)
            self._finish_request()
        elif self._body_mode == BodyMode.BUFFERED:
            yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())

    def _request_body(self, message: pb.ProcessingRequest) -> Iterator[pb.ProcessingResponse]:
        body = message.request_body
        if self._headers is None:
            self._parts.metrics.dropped(_DOOR, "body_before_headers")
        elif self.is_routed:
            # Envoy repeats the end of the stream for bodies above 1 MB.
            self._parts.metrics.dropped(_DOOR, "repeated_end_of_stream")
        else:
            self._body += body.body
            if len(self._body) > self._options.max_request_bytes:
                self._refuse(too_large(self._options.max_request_bytes))
            if (subset := subset_hint(message.metadata_context)) is not None:
                self._subset = subset
            if body.end_of_stream or self._body_mode == BodyMode.BUFFERED:
                yield from self._route(has_trailers=False)

    def _request_trailers(self) -> Iterator[pb.ProcessingResponse]:
        if self._headers is not None and not self.is_routed:
            yield from self._route(has_trailers=True)
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())

    def _any_endpoint(self, *, has_body: bool) -> pb.ProcessingResponse:
        """The answer to a request whose body does not come here: any endpoint that the gateway allows."""
        self.is_routed = True
        if has_body:
            self._parts.picks.pass_unseen()
        pods = [pod for pod in self._parts.pods.snapshot().values() if pod.ready]
        if not pods:
            self._refuse(RequestError(500, "no pods available in datastore"))
        candidates = self._candidates()
        ready = [pod.address for pod in pods if is_allowed(pod, candidates)]
        if not ready:
            self._refuse(not_allowed())
        request_id, _ = kept_request_id(self._headers or {})
        destination = ready[int(self._parts.random.integers(len(ready)))]
        made = {REQUEST_ID_HEADER: request_id}
        return request_headers_answer(destination, made, self._removed(made))

    def _route(self, *, has_trailers: bool) -> Iterator[pb.ProcessingResponse]:
        """Picks for a request whose body is complete."""
        self.is_routed = True
        headers, body = self._headers or {}, bytes(self._body)
        self._body.clear()
        request_id, _ = kept_request_id(headers)
        request = RouteRequest(
            request_id, RequestKind.PASSTHROUGH, candidates=self._candidates(), headers=headers
        )
        try:
            request, sent = self._resolved(request, body)
        except RequestError as error:
            self._refuse(error)
        decision = self._parts.picks.decide(request, self._stream.is_active)
        destination = self._parts.picks.destination(decision)
        self._note(decision, request)
        set_headers = {"Content-Length": str(len(sent))} if sent else {}
        scores = None
        if decision.routing is not None:
            set_headers |= decision.routing.request_headers
            scores = decision.routing.scores if self._options.emit_scores else None
        set_headers |= {**kept_headers(headers), REQUEST_ID_HEADER: request_id}
        removed = self._removed(set_headers)
        if self._body_mode == BodyMode.BUFFERED:
            changed = None if sent is body else sent
            yield request_body_answer(destination, set_headers, removed, body=changed, scores=scores)
        else:
            yield request_headers_answer(destination, set_headers, removed, scores)
            for answer in streamed(sent, end_of_stream=not has_trailers):
                yield pb.ProcessingResponse(request_body=answer)
        self._finish_request()

    def _resolved(self, request: RouteRequest, body: bytes) -> tuple[RouteRequest, bytes]:
        """Return the request with its model as the pod is asked for it, and the body to send."""
        request, api = self._parts.parsers.parse(request, body)
        body = self._allowed(request, body, api)
        if not api.is_json:
            return request, body
        named = request.model
        asked = next((request.headers[name] for name in _MODEL_HEADERS if request.headers.get(name)), named)
        model = self._parts.rewrites.target(named) or asked
        if model is None and api.needs_model:
            raise RequestError(400, "model not found in request body", "model")
        if named is not None and len(named) > MODEL_CHARS_MAX:
            # Rewritten, it is looked for nowhere, but kept with the decision.
            raise RequestError(400, f"model is longer than {MODEL_CHARS_MAX} characters", "model")
        if model is None or model == named:
            return request, body
        return replace(request, model=model, client_model=named or ""), with_model(body, model)

    def _removed(self, ours: Collection[str]) -> tuple[str, ...]:
        """Return the client's headers to take off."""
        return system_owned(self._headers or {}, ours)

    def _allowed(self, request: RouteRequest, body: bytes, api: Api) -> bytes:
        """Return the body without the fields that clients must not send."""
        guard = self._parts.picks.guard
        if api.is_opaque:
            guard.unchecked()
            return body
        field = guard.forbidden(request, body)
        if field is None:
            return body
        if request.body and not api.is_json:
            # The JSON is inside a protobuf message.
            raise refusal(field)
        self._parts.metrics.dropped(_DOOR, "forbidden_field")
        return guard.without(body)

    def _candidates(self) -> frozenset[str] | None:
        return self._subset if self._options.subset_filter else None

    def _note(self, decision: Decision, request: RouteRequest) -> None:
        """Remembers what the response needs, and refuses what came to nothing."""
        self._phase.of(decision)
        if request.headers.get("prefer") == "if-available" and not decision.primary.cached_tokens:
            self._phase.cut()
            self._refuse(RequestError(412, "the selected endpoint holds no cached prefix of the request"))
        if request.client_model is not None:
            self._response.models = (request.model or "", request.client_model)
        if decision.routing is not None:
            self._response.set_headers = decision.routing.response_headers
        if request.body.get("stream") is True:
            self._response.streams()
        if decision.priority < 0 and decision.is_charged and self._parts.evictions is not None:
            # The answer to it comes behind whatever is being answered.
            evict = partial(self._stream.interrupt, self._evicted)
            self._entry = self._parts.evictions.enter(decision.priority, evict)

    def _refuse(self, error: RequestError) -> NoReturn:
        raise self._parts.picks.refused(error)

    def _finish_request(self) -> None:
        self.finished = not self._options.responses_full
