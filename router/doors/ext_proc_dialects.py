"""Messages of ext_proc, and its two dialects: how requests are parsed, which headers and errors are returned.

`NativeDialect` changes as little as possible. `LlmdDialect` reproduces the responses of the reference picker
(llm-d) for an EndpointPickerConfig: it sets every passed header again, and errors are plain text. Messages
follow the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004). They are filled in
place: nested keyword arguments would copy a body once for each of the five enclosing messages.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from msgspec.structs import replace

from router.config.picker_file import PickerConfig, RewriteRules
from router.doors.boundary import (
    DESTINATION_HEADER,
    REQUEST_ID_HEADER,
    BodyGuard,
    TenantSalt,
    destination_metadata,
    error_headers,
    refusal,
    served_endpoint,
    system_owned,
)
from router.errors import (
    DROPPED_REASON_HEADER,
    EvictedError,
    NoEndpointError,
    RequestError,
    SaturatedError,
)
from router.observe.metrics import RouterMetrics
from router.observe.requests import ObservedRouter
from router.picking.candidates import is_allowed, no_allowed_endpoint
from router.picking.decision import Decision
from router.plugins.attribute_reporter import AttributeReporter
from router.pods.pod_set import PodSet
from router.prompts.parsers import OWN_PARSERS, PARSERS, Api, BodyForm, Parsers
from router.prompts.request import MODEL_CHARS_MAX, RANK_HEADER, RouteRequest

BodyMode = processing_mode_pb2.ProcessingMode

SCORES_KEY = "x-gateway-destination-endpoint-scores"
_NAMESPACE = "envoy.lb"
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
# Envoy accepts at most 64 KiB in one streamed response.
CHUNK_BYTES_MAX = 62_000

_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])

SERVICE = "ext_proc"  # name of the service in metrics

# Headers that may carry the request's path, and the path of a request without them.
_PATH_HEADERS, _DEFAULT_PATH = (":path", "x-original-path", "x-forwarded-path"), "/v1/completions"

_MODEL_HEADERS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
_SERVED_PLUGIN = "destination-endpoint-served-verifier"
# Header that the gateways' conformance tests read.
_SERVED_HEADER = "x-conformance-test-served-endpoint"
_CODES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    412: "PreconditionFailed",
    413: "BadRequest",
    429: "ResourceExhausted",
    500: "Internal",
    503: "ServiceUnavailable",
}
# Headers that `passed_headers` drops besides the system-owned ones.
_NOT_PASSED = frozenset({DESTINATION_HEADER, "content-length"})


def header_values(message: base_pb2.HeaderMap) -> dict[str, str]:
    """Return values by lower-case name: of repeated headers the last one, `raw_value` before `value`."""
    return {
        header.key.lower(): header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        for header in message.headers
    }


def routing_response(
    phase: Literal["request_headers", "request_body"],
    destination: str,
    headers: Mapping[str, str],
    removed: Sequence[str] = (),
    scores: Mapping[str, float] | None = None,
    body: bytes | None = None,
) -> pb.ProcessingResponse:
    """Return the picked endpoint as a header and as metadata.

    Args:
        phase: Message to respond to: the body in BUFFERED mode, where the headers are answered first.
        scores: Scores of all candidates by endpoint, for the metadata.
        body: Replaces the request's body; None: unchanged.
    """
    answer = pb.ProcessingResponse()
    response = getattr(answer, phase).response
    response.clear_route_cache = True
    mutation = response.header_mutation
    set_headers(mutation, {DESTINATION_HEADER: destination})
    set_headers(mutation, headers)
    mutation.remove_headers.extend(removed)
    if body is not None:
        response.body_mutation.body = body
    if scores is None:
        answer.dynamic_metadata.CopyFrom(destination_metadata(destination))
    else:
        values = {DESTINATION_HEADER: destination, SCORES_KEY: dict(scores)}
        answer.dynamic_metadata.update({_NAMESPACE: values})
    return answer


def response_headers_reply(headers: Mapping[str, str]) -> pb.ProcessingResponse:
    """Return a reply to response headers that sets `headers` and the reference picker's marker header."""
    answer = pb.ProcessingResponse()
    mutation = answer.response_headers.response.header_mutation
    set_headers(mutation, {"x-went-into-resp-headers": "true"})
    set_headers(mutation, headers)
    return answer


def streamed_body_responses(
    phase: Literal["request_body", "response_body"], body: bytes, *, end_of_stream: bool
) -> Iterator[pb.ProcessingResponse]:
    """Yield a body in streamed responses of at most 62,000 bytes each; an empty body takes one response."""
    for start in range(0, max(1, len(body)), CHUNK_BYTES_MAX):
        end = start + CHUNK_BYTES_MAX
        answer = pb.ProcessingResponse()
        chunk = getattr(answer, phase).response.body_mutation.streamed_response
        chunk.body = body[start:end]
        chunk.end_of_stream = end_of_stream and end >= len(body)
        yield answer


def immediate_response(status: int, headers: Mapping[str, str], body: bytes) -> pb.ProcessingResponse:
    """Return a response that ends the request: Envoy sends it to the client."""
    answer = pb.ProcessingResponse()
    immediate: Any = answer.immediate_response
    immediate.status.code = status
    immediate.body = body
    # Marks the entry in the access log: no pod received the request.
    immediate.details = "kvroute"
    set_headers(immediate.headers, headers)
    return answer


def set_headers(mutation: pb.HeaderMutation, headers: Mapping[str, str]) -> None:
    """Add headers to a mutation, replacing existing values."""
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = name
        option.header.raw_value = value.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, kw_only=True)
class NativeDialect:
    """The router's own dialect; errors have OpenAI's JSON format."""

    router: ObservedRouter
    guard: BodyGuard
    metrics: RouterMetrics
    parsers: Parsers = OWN_PARSERS
    buffered_bytes_max: int = 0  # longest response body that is buffered; 0: none is
    reporter: AttributeReporter | None = None  # reports a response's usage as metadata
    emits_scores: bool = False  # whether the metadata lists the scores of all candidates
    salt: TenantSalt | None = None  # sets the tenant's cache salt in requests

    def parse(self, request: RouteRequest, body: bytes) -> tuple[RouteRequest, bytes]:
        """Parse a request; return it with the body to send, which lacks the forbidden fields.

        Raises:
            RequestError: 400, the body is invalid or has a forbidden field that cannot be removed.
        """
        headers = request.headers
        path = next((headers[name] for name in _PATH_HEADERS if headers.get(name)), _DEFAULT_PATH)
        request, api = self.parsers.parse(request.request_id, path, body, request.candidates, headers)
        request, sent = self._with_target_model(request, api, self._without_forbidden(request, api, body))
        return (request, sent) if self.salt is None else self.salt.applied(request, api, path, sent)

    def pick_without_body(
        self, request: RouteRequest, is_active: Callable[[], bool]
    ) -> tuple[str, Decision | None]:
        """Pick a pod for a request whose body is empty or arrives after the pick.

        Returns:
            The destination, and the decision; None where the pick was random.
        """
        decision = self.router.route(request, time.monotonic(), is_active)
        return decision.destination, decision

    def precondition_error(self, _request: RouteRequest, _decision: Decision) -> RequestError | None:
        """Return the error that rejects a routed request; None: send it to its pod."""
        return None

    def request_headers(
        self, request: RouteRequest, body_bytes: int, decision: Decision | None
    ) -> dict[str, str]:
        """Return the headers to set on the request besides the destination; 0 bytes: no content-length."""
        given, request_id = request.headers.get(REQUEST_ID_HEADER), request.request_id
        headers = {} if given == request_id else {REQUEST_ID_HEADER: request_id}
        if decision is not None and decision.rank is not None:
            headers[RANK_HEADER] = str(decision.rank)
        return headers | {"content-length": str(body_bytes)} if body_bytes else headers

    def response_headers(
        self, _headers: Mapping[str, str], _metadata: base_pb2.Metadata, _decision: Decision | None
    ) -> dict[str, str]:
        """Return the headers to set on the response."""
        return {}

    def error_response(self, error: RequestError) -> pb.ProcessingResponse:
        """Return the response that rejects the request with `error`."""
        return immediate_response(error.status, error_headers(error), error.body())

    def _with_target_model(self, request: RouteRequest, _api: Api, body: bytes) -> tuple[RouteRequest, bytes]:
        """Return the request and its body with the model's name rewritten by the configured rules."""
        return request, body

    def _without_forbidden(self, request: RouteRequest, api: Api, body: bytes) -> bytes:
        """Return the body without the fields that clients must not send."""
        guard = self.guard
        if api.form is BodyForm.VLLM:
            guard.unchecked()
            return body
        field = guard.forbidden(request, body)
        if field is None:
            return body
        if api.form is BodyForm.VERTEX:
            # The JSON is inside a protobuf message, from which no field can be removed.
            raise refusal(field)
        self.metrics.count("dropped_messages", SERVICE, "forbidden_field")
        return guard.without(body)


@dataclass(frozen=True, kw_only=True)
class LlmdDialect(NativeDialect):
    """The reference picker's dialect."""

    parsers: Parsers = field(default_factory=Parsers)
    pods: PodSet
    rewrites: RewriteRules
    # Whether a response header reports the endpoint that the gateway used, for conformance tests.
    reports_served: bool = False

    def pick_without_body(
        self, request: RouteRequest, _is_active: Callable[[], bool]
    ) -> tuple[str, Decision | None]:
        """Pick a random ready endpoint among those that the gateway allows."""
        pods = [pod for pod in self.pods.of_pool(self.router.pool).values() if pod.ready]
        if not pods:
            raise RequestError(500, "no pods available in datastore")
        allowed = [pod.address for pod in pods if is_allowed(pod, request.candidates)]
        if not allowed:
            raise no_allowed_endpoint()
        return random.choice(allowed), None

    def precondition_error(self, request: RouteRequest, decision: Decision) -> RequestError | None:
        if request.headers.get("prefer") == "if-available" and not decision.primary.cached_tokens:
            return RequestError(412, "the selected endpoint holds no cached prefix of the request")
        return None

    def request_headers(
        self, request: RouteRequest, body_bytes: int, decision: Decision | None
    ) -> dict[str, str]:
        request_id = {REQUEST_ID_HEADER: request.request_id}
        if decision is None:
            return request_id
        headers = {"Content-Length": str(body_bytes)} if body_bytes else {}
        headers |= decision.request_headers
        return headers | passed_headers(request.headers) | request_id

    def response_headers(
        self, headers: Mapping[str, str], metadata: base_pb2.Metadata, decision: Decision | None
    ) -> dict[str, str]:
        passed = passed_headers(headers)
        if decision is not None and decision.pipeline is not None:
            passed |= decision.pipeline.response_headers
        served = served_endpoint(metadata) if self.reports_served else None
        return passed if served is None else passed | {_SERVED_HEADER: served}

    def error_response(self, error: RequestError) -> pb.ProcessingResponse:
        reason = error.dropped_reason
        headers = {} if reason is None else {DROPPED_REASON_HEADER: reason}
        return immediate_response(error.status, headers, _error_text(error).encode())

    def _with_target_model(self, request: RouteRequest, api: Api, body: bytes) -> tuple[RouteRequest, bytes]:
        if api.form is not BodyForm.JSON:
            return request, body
        named = request.model
        asked = next((request.headers[name] for name in _MODEL_HEADERS if request.headers.get(name)), named)
        model = self.rewrites.target(named) or asked
        if model is None and api.needs_model:
            raise RequestError(400, "model not found in request body", "model")
        if named is not None and len(named) > MODEL_CHARS_MAX:
            # A rewritten name is not looked up, but the decision log stores it, so its length is bounded.
            raise RequestError(400, f"model is longer than {MODEL_CHARS_MAX} characters", "model")
        if model is None or model == named:
            return request, body
        return replace(request, model=model, client_model=named or ""), replace_model(body, model)


def configured_parts(picker: PickerConfig) -> dict[str, Any]:
    """Return the fields of `LlmdDialect` that a configuration file determines.

    Raises:
        ConfigError: A parser or a reporter is configured wrongly.
    """
    return {
        "parsers": Parsers(_parser_types(picker)),
        "reporter": AttributeReporter.from_config(picker),
        "reports_served": any(entry.type == _SERVED_PLUGIN for entry in picker.plugins.values()),
    }


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers to pass on: all but system-owned ones, the destination and content-length."""
    dropped = _NOT_PASSED.union(system_owned(headers))
    return {name: value for name, value in headers.items() if name not in dropped}


def _error_text(error: RequestError) -> str:
    """Return an error's text in the reference picker's wording."""
    message = str(error)
    if isinstance(error, EvictedError):
        return message
    if isinstance(error, NoEndpointError):
        message = "failed to find endpoint candidates for serving the request"
    elif isinstance(error, SaturatedError):
        message = "system saturated, sheddable request dropped"
    return f"inference error: {_CODES.get(error.status, 'Unknown')} - {message}"


def _parser_types(picker: PickerConfig) -> Sequence[str]:
    types = []
    for reference in picker.parsers:
        kind = picker.type_of(reference.plugin_ref)
        if kind not in PARSERS:
            reference.section.fail("pluginRef", f"expected one of {', '.join(PARSERS)}, got {kind!r}")
        types.append(kind)
    return types


def replace_model(body: bytes, model: str) -> bytes:
    """Return a JSON object with `model` replaced; the order and the other values' bytes are preserved.

    Raises:
        ValueError: The body is not a JSON object.
    """
    fields = _RAW_FIELDS.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)
