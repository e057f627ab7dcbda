"""PickEndpoint and ReportOutcome, the gRPC service for gateways without ext_proc.

Translates proto/kvroute/v1/endpoint_picker.proto to RouteRequest and Decision, and errors to gRPC codes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import getrandbits
from typing import Any, NoReturn

import grpc
import msgspec

from router._pb import endpoint_picker_pb2 as pb
from router.doors.boundary import REQUEST_ID_HEADER, TenantSalt
from router.doors.ext_authz import grpc_code
from router.doors.health import PICK_SERVICE
from router.errors import DROPPED_REASON_HEADER, RequestError
from router.feedback.lifecycle import Lifecycle
from router.feedback.outcomes import DONE, FAILED, REPORT, RequestReport
from router.observe.metrics import RouterMetrics
from router.observe.requests import ObservedRouter
from router.picking.decision import Decision
from router.pods.pod_set import PodSet, PodSnapshot
from router.prompts.request import RequestKind, RouteRequest, api_request, unread_request

_SERVICE = "pick_endpoint"  # in metrics
_REQUEST_ID_MAX = 256
# A gateway tries only the first few; /debug/decisions lists all.
_ENDPOINTS_MAX = 16
_ANY, _RAW = msgspec.json.Decoder(), msgspec.json.Decoder(msgspec.Raw)
_READ = pb.PickEndpointRequest.FromString
_CHAT, _COMPLETIONS = RequestKind.CHAT, RequestKind.COMPLETIONS
_CHAT_OPTIONS = frozenset(
    {"chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens"}
)


@dataclass(frozen=True, slots=True)
class EndpointPickerService:
    """gRPC service kvroute.v1.EndpointPicker."""

    router: ObservedRouter
    lifecycle: Lifecycle
    metrics: RouterMetrics
    pods: PodSet
    salt: TenantSalt | None = None  # not None: no pick, because the service cannot change the gateway's body

    def add_to(self, server: grpc.Server) -> None:
        """Register the service; `_pick` serializes its responses itself."""
        pick: Any = grpc.unary_unary_rpc_method_handler(self._pick, request_deserializer=_with_size)
        report: Any = grpc.unary_unary_rpc_method_handler(
            self._report,
            request_deserializer=pb.ReportOutcomeRequest.FromString,
            response_serializer=pb.ReportOutcomeResponse.SerializeToString,
        )
        server.add_registered_method_handlers(PICK_SERVICE, {"PickEndpoint": pick, "ReportOutcome": report})

    def _pick(self, sized: tuple[pb.PickEndpointRequest, int], context: grpc.ServicerContext) -> bytes:
        with self.metrics.inside(_SERVICE):
            try:
                if self.salt is not None:
                    raise self.salt.refusal("PickEndpoint")
                decision = self.router.route(route_request(*sized), time.monotonic(), context.is_active)
            except RequestError as error:
                self.metrics.refused(error)
                _abort(context, error)
            limit = sized[0].max_endpoints or _ENDPOINTS_MAX
            return pick_response(decision, self.pods.current, limit).SerializeToString()

    def _report(
        self, request: pb.ReportOutcomeRequest, context: grpc.ServicerContext
    ) -> pb.ReportOutcomeResponse:
        request_id, outcome, now_s = request.request_id, request.outcome, time.monotonic()
        known = self.lifecycle.is_known(request_id)
        pod = request.address or None
        if outcome == pb.ReportOutcomeRequest.OUTCOME_FIRST_TOKEN:
            self.lifecycle.first_token(request_id, REPORT, now_s, pod=pod)
        elif outcome in (pb.ReportOutcomeRequest.OUTCOME_DONE, pb.ReportOutcomeRequest.OUTCOME_FAILED):
            failed = outcome == pb.ReportOutcomeRequest.OUTCOME_FAILED
            cached_tokens = request.cached_tokens if request.HasField("cached_tokens") else None
            event = FAILED if failed else DONE
            report = RequestReport(
                request_id, event, REPORT, pod, cached_tokens=cached_tokens, is_fault=failed
            )
            self.lifecycle.ended(report, now_s)
        else:
            _abort(context, RequestError(400, "outcome must be first token, done or failed", "outcome"))
        return pb.ReportOutcomeResponse(known=known)


def route_request(request: pb.PickEndpointRequest, size_bytes: int) -> RouteRequest:
    """Translate a call to a request; a call without input is routed by load among the model's pods.

    Raises:
        RequestError: 400, with the name of the invalid field.
    """
    headers = request.headers
    # A generated id need not be secret, so it spares uuid4's system call.
    request_id = request.request_id or headers.get(REQUEST_ID_HEADER) or f"{getrandbits(128):032x}"
    if len(request_id) > _REQUEST_ID_MAX:
        raise RequestError(400, f"request_id is longer than {_REQUEST_ID_MAX} characters", "request_id")
    candidates = frozenset(request.candidates) or None
    body: dict[str, Any] = {"model": request.model, "cache_salt": request.cache_salt or None}
    match request.WhichOneof("input"):
        case "chat":
            kind, chat = _CHAT, request.chat
            if options := chat.options_json:
                body |= _chat_options(options)
            body["messages"] = _json(chat.messages_json, "chat.messages_json", _RAW)
            body["tools"] = _json(tools, "chat.tools_json") if (tools := chat.tools_json) else None
        case "prompt":
            kind, body["prompt"] = _COMPLETIONS, request.prompt
        case "token_ids":
            kind, body["prompt"] = _COMPLETIONS, list(request.token_ids.ids)
        case _:
            return unread_request(request_id, size_bytes, candidates, headers, request.model or None)
    return api_request(request_id, kind, body, size_bytes, candidates, headers)


def pick_response(decision: Decision, pods: PodSnapshot, endpoints_max: int) -> pb.PickEndpointResponse:
    """Translate a decision to a response; an endpoint whose pod has disappeared has no name."""
    ranked = decision.ranked
    # Read from the arrays: building a Candidate for each endpoint would double the time.
    cached_tokens, views, endpoints = ranked.hits["cached_tokens"], ranked.views, []
    for place in ranked.order[:endpoints_max].tolist():
        cost_s, queued_prefill_s, own_prefill_s, _, copy_s, kv_pressure_s = ranked.breakdowns.item(place)[:6]
        pod = pods.get(ranked.pods[place])
        endpoints.append(
            {
                "address": _text(ranked.pods[place]),
                "pod_name": _text(pod.name) if pod is not None else "",
                "cost_s": cost_s,
                "queued_prefill_s": queued_prefill_s,
                "own_prefill_s": own_prefill_s,
                "copy_s": copy_s,
                "kv_pressure_s": kv_pressure_s,
                "cached_tokens": cached_tokens.item(place),
                "view": views[place],
            }
        )
    return pb.PickEndpointResponse(
        request_id=decision.request_id,
        endpoints=endpoints,
        reason=_text(decision.reason),
        prompt_tokens=decision.prompt_tokens,
        degraded=decision.degraded or "",
        data_parallel_rank=decision.rank,
    )


def _text(text: str) -> str:
    """Return `text` as valid UTF-8: a pods file may contain a lone surrogate, which protobuf rejects."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _with_size(message: bytes) -> tuple[pb.PickEndpointRequest, int]:
    # The size is known here; the message's own ByteSize() would have to compute it.
    return _READ(message), len(message)


def _chat_options(text: bytes) -> dict[str, Any]:
    options = _json(text, "chat.options_json")
    if not isinstance(options, dict) or not options.keys() <= _CHAT_OPTIONS:
        raise RequestError(
            400,
            f"chat.options_json must be an object with only the fields {', '.join(sorted(_CHAT_OPTIONS))}",
            "chat.options_json",
        )
    return options


def _json(text: bytes, field: str, decoder: msgspec.json.Decoder[Any] = _ANY) -> Any:
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"{field} is not valid JSON: {error}", field) from error


def _abort(context: grpc.ServicerContext, error: RequestError) -> NoReturn:
    if error.dropped_reason is not None:
        context.set_trailing_metadata(((DROPPED_REASON_HEADER, error.dropped_reason),))
    context.abort(grpc_code(error), str(error))
    raise AssertionError("abort raises")
