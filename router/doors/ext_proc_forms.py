"""The two forms of ext_proc's answers: what a request is read as, and what is told to gateways and clients.

`OwnForm` changes what it must; `LlmdForm` gives the reference picker's very answers, for an
EndpointPickerConfig: every header that is kept is set again, and errors are plain text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from msgspec.structs import replace

from router.config.picker_file import PickerConfig
from router.config.resources import RewriteRules
from router.doors.ext_proc_messages import immediate_answer
from router.doors.headers import (
    DESTINATION_HEADER,
    REQUEST_ID_HEADER,
    error_headers,
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
from router.prompts.body_guard import BodyGuard, refusal
from router.prompts.parsers import DEFAULT_PARSERS, OWN_PARSERS, PARSERS, Api, BodyForm, Parsers
from router.prompts.request import MODEL_CHARS_MAX, RouteRequest

DOOR = "ext_proc"

# Where gateways tell the path, and what is taken for it where they do not.
_PATH_HEADERS, _DEFAULT_PATH = (":path", "x-original-path", "x-forwarded-path"), "/v1/completions"

_MODEL_HEADERS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
_SERVED = "destination-endpoint-served-verifier"
# Where the gateways' conformance tests look for it.
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
_NO_CANDIDATES = "failed to find endpoint candidates for serving the request"
_SATURATED = "system saturated, sheddable request dropped"
# What is not taken over from a request or a response, beside what envoy_headers calls system-owned.
_NOT_KEPT = frozenset({DESTINATION_HEADER, "content-length"})


@dataclass(frozen=True, kw_only=True)
class OwnForm:
    """The router's own answers; errors are OpenAI's."""

    router: ObservedRouter
    guard: BodyGuard
    metrics: RouterMetrics
    parsers: Parsers = OWN_PARSERS
    held_bytes_max: int = 0  # so much of a response is held at most
    reporter: AttributeReporter | None = None  # of a response's usage
    emits_scores: bool = False  # whether the metadata tells all scores

    def read(self, request: RouteRequest, body: bytes) -> tuple[RouteRequest, bytes]:
        """Return the request to be routed, and the body to send: without fields that clients must not send.

        Raises:
            RequestError: 400.
        """
        headers = request.headers
        path = next((headers[name] for name in _PATH_HEADERS if headers.get(name)), _DEFAULT_PATH)
        request, api = self.parsers.parse(request.request_id, path, body, request.candidates, headers)
        return self._rewritten(request, api, self._allowed(request, api, body))

    def pick_unseen(
        self, request: RouteRequest, is_active: Callable[[], bool]
    ) -> tuple[str, Decision | None]:
        """Pick for a request whose body is empty, or comes too late.

        Returns:
            The destination, and the decision, if it was made by the router's rules.
        """
        decision = self.router.route(request, time.monotonic(), is_active)
        return decision.destination, decision

    def objection(self, _request: RouteRequest, _decision: Decision) -> RequestError | None:
        """Return why the request is not sent where it was routed to."""
        return None

    def request_headers(
        self, request: RouteRequest, body_bytes: int, _decision: Decision | None
    ) -> dict[str, str]:
        """Return the headers to set on the request, beside the destination; of a size 0 nothing is said."""
        given, request_id = request.headers.get(REQUEST_ID_HEADER), request.request_id
        told = {} if given == request_id else {REQUEST_ID_HEADER: request_id}
        return told | {"content-length": str(body_bytes)} if body_bytes else told

    def response_headers(
        self, _headers: Mapping[str, str], _metadata: base_pb2.Metadata, _decision: Decision | None
    ) -> dict[str, str]:
        """Return the headers to set on the response."""
        return {}

    def refusal(self, error: RequestError) -> pb.ProcessingResponse:
        """Return the router's own answer to the client."""
        return immediate_answer(error.status, error_headers(error), error.body())

    def _rewritten(self, request: RouteRequest, _api: Api, body: bytes) -> tuple[RouteRequest, bytes]:
        """Return the request and its body with the model as the pod is asked for it."""
        return request, body

    def _allowed(self, request: RouteRequest, api: Api, body: bytes) -> bytes:
        """Return the body without the fields that clients must not send."""
        guard = self.guard
        if api.form is BodyForm.VLLM:
            guard.unchecked()
            return body
        field = guard.forbidden(request, body)
        if field is None:
            return body
        if api.form is BodyForm.VERTEX:
            # The JSON is inside a protobuf message.
            raise refusal(field)
        self.metrics.count("dropped", DOOR, "forbidden_field")
        return guard.without(body)


@dataclass(frozen=True, kw_only=True)
class LlmdForm(OwnForm):
    """The reference picker's answers."""

    pods: PodSet
    rewrites: RewriteRules
    # Whether responses name the endpoint that the gateway says it used, for its tests.
    tells_served: bool = False

    def pick_unseen(
        self, request: RouteRequest, _is_active: Callable[[], bool]
    ) -> tuple[str, Decision | None]:
        """Pick any endpoint that the gateway allows."""
        pods = [pod for pod in self.pods.snapshot().values() if pod.ready]
        if not pods:
            raise RequestError(500, "no pods available in datastore")
        allowed = [pod.address for pod in pods if is_allowed(pod, request.candidates)]
        if not allowed:
            raise no_allowed_endpoint()
        return random.choice(allowed), None

    def objection(self, request: RouteRequest, decision: Decision) -> RequestError | None:
        if request.headers.get("prefer") == "if-available" and not decision.primary.cached_tokens:
            return RequestError(412, "the selected endpoint holds no cached prefix of the request")
        return None

    def request_headers(
        self, request: RouteRequest, body_bytes: int, decision: Decision | None
    ) -> dict[str, str]:
        request_id = {REQUEST_ID_HEADER: request.request_id}
        if decision is None:
            return request_id
        told = {"Content-Length": str(body_bytes)} if body_bytes else {}
        if decision.pipeline is not None:
            told |= decision.pipeline.request_headers
        return told | kept_headers(request.headers) | request_id

    def response_headers(
        self, headers: Mapping[str, str], metadata: base_pb2.Metadata, decision: Decision | None
    ) -> dict[str, str]:
        told = kept_headers(headers)
        if decision is not None and decision.pipeline is not None:
            told |= decision.pipeline.response_headers
        served = served_endpoint(metadata) if self.tells_served else None
        return told if served is None else told | {_SERVED_HEADER: served}

    def refusal(self, error: RequestError) -> pb.ProcessingResponse:
        reason = error.dropped_reason
        headers = {} if reason is None else {DROPPED_REASON_HEADER: reason}
        return immediate_answer(error.status, headers, _error_text(error).encode())

    def _rewritten(self, request: RouteRequest, api: Api, body: bytes) -> tuple[RouteRequest, bytes]:
        if api.form is not BodyForm.JSON:
            return request, body
        named = request.model
        asked = next((request.headers[name] for name in _MODEL_HEADERS if request.headers.get(name)), named)
        model = self.rewrites.target(named) or asked
        if model is None and api.needs_model:
            raise RequestError(400, "model not found in request body", "model")
        if named is not None and len(named) > MODEL_CHARS_MAX:
            # Rewritten, it is looked for nowhere, but kept with the decision.
            raise RequestError(400, f"model is longer than {MODEL_CHARS_MAX} characters", "model")
        if model is None or model == named:
            return request, body
        return replace(request, model=model, client_model=named or ""), with_model(body, model)


@dataclass(frozen=True, slots=True)
class LlmdOptions:
    """Settings of `LlmdForm`."""

    picker: PickerConfig | None  # names parsers and reporters; None: the defaults
    held_bytes_max: int
    emits_scores: bool


def llmd_form(
    options: LlmdOptions,
    rewrites: RewriteRules,
    router: ObservedRouter,
    guard: BodyGuard,
    metrics: RouterMetrics,
    pods: PodSet,
) -> LlmdForm:
    """Make the reference picker's form as it is configured.

    Raises:
        ConfigError: A parser or a reporter is wrong.
    """
    picker = options.picker
    return LlmdForm(
        router=router,
        guard=guard,
        metrics=metrics,
        parsers=Parsers(_parser_types(picker) if picker is not None else DEFAULT_PARSERS),
        held_bytes_max=options.held_bytes_max,
        reporter=AttributeReporter.from_config(picker) if picker is not None else None,
        emits_scores=options.emits_scores,
        pods=pods,
        rewrites=rewrites,
        tells_served=picker is not None and any(one.type == _SERVED for one in picker.plugins.values()),
    )


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those that are handed on."""
    dropped = _NOT_KEPT.union(system_owned(headers))
    return {name: value for name, value in headers.items() if name not in dropped}


def _error_text(error: RequestError) -> str:
    """Return an error in the reference's words."""
    message = str(error)
    if isinstance(error, EvictedError):
        return message
    if isinstance(error, NoEndpointError):
        message = _NO_CANDIDATES
    elif isinstance(error, SaturatedError):
        message = _SATURATED
    return f"inference error: {_CODES.get(error.status, 'Unknown')} - {message}"


def _parser_types(picker: PickerConfig) -> Sequence[str]:
    types = []
    for reference in picker.parsers:
        kind = picker.plugins[reference.plugin_ref].type
        if kind not in PARSERS:
            reference.section.fail("pluginRef", f"{kind} is no parser; there are {', '.join(PARSERS)}")
        types.append(kind)
    return types or DEFAULT_PARSERS


def with_model(body: bytes, model: str) -> bytes:
    """A JSON object with another model; its other values stay as they are: order, and numbers of any size.

    Raises:
        ValueError: It is no JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)
