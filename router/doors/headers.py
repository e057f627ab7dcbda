"""HTTP headers and metadata that Envoy and the router exchange, for all gRPC services.

Names follow the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004).
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from functools import lru_cache

from envoy.config.core.v3 import base_pb2
from google.protobuf import struct_pb2

from router.errors import DROPPED_REASON_HEADER, RequestError

DESTINATION_HEADER = "x-gateway-destination-endpoint"
REQUEST_ID_HEADER = "x-request-id"

SUBSET_NAMESPACE, SUBSET_HEADER = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
"""Metadata namespace and field in which a gateway lists the allowed endpoints."""

SERVED_HEADER = "x-gateway-destination-endpoint-served"

GATEWAY_ONLY_HEADERS: tuple[str, ...] = (
    # Endpoint picker protocol: the picked pod, the allowed pods, the pod that served the request.
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    # Disaggregated serving and KV transfer: hosts to which an engine or its sidecar connects.
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    # Data-parallel engine within a pod: vLLM reads the rank.
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    # Set by Envoy where ext_authz receives a truncated body; such a body is not parsed.
    "x-envoy-auth-partial-body",
)
"""Headers that clients must not send, because engines and sidecars obey them; lower case.

Envoy removes them before any filter runs (`kvroute.envoy_config`, the chart), so values that a filter sets
later are kept. Some of these headers the router itself does not use.
"""

_DESTINATION_NAMESPACE = "envoy.lb"
_REQUEST_ID_MAX = 256

# Headers that only gateway and picker may set: a client's are removed. (The destination is overwritten.)
_SYSTEM_OWNED = frozenset(
    {
        # Envoy rejects changes to headers of its own prefix.
        *(name for name in GATEWAY_ONLY_HEADERS if not name.startswith("x-envoy-")),
        DROPPED_REASON_HEADER,
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
        "x-llm-d-inference-objective",
        "x-gateway-inference-objective",
        "x-llm-d-model-name-rewrite",
        "x-gateway-model-name-rewrite",
        "x-llm-d-slo-ttft-ms",
        "x-slo-ttft-ms",
        "x-llm-d-slo-tpot-ms",
        "x-slo-tpot-ms",
        "x-llm-d-video-fps",
        "x-llm-d-video-duration-seconds",
        "x-llm-d-video-resolution",
    }
) - {DESTINATION_HEADER}


def system_owned(incoming: Collection[str], ours: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names in `incoming` to remove before the request reaches a pod, except those in `ours`."""
    if _SYSTEM_OWNED.isdisjoint(incoming):
        return ()
    return tuple(name for name in incoming if name in _SYSTEM_OWNED and name not in ours)


def accepted_request_id(headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return the request id and whether the gateway sent it; an unusable id is replaced by a uuid4."""
    given = headers.get(REQUEST_ID_HEADER, "")
    # Envoy's access log writes other ids differently, so they would never match their request.
    if 0 < len(given) <= _REQUEST_ID_MAX and given.isascii() and given.isprintable():
        return given, True
    return str(uuid.uuid4()), False


def subset_hint(metadata: base_pb2.Metadata) -> frozenset[str] | None:
    """Return the endpoints that the gateway allows, from a message's metadata; None if it has no list."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET_HEADER not in hint.fields:
        return None
    value = hint.fields[SUBSET_HEADER]
    texts = [item.string_value for item in value.list_value.values] or [value.string_value]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def served_endpoint(metadata: base_pb2.Metadata) -> str | None:
    """Return the endpoint that served the request, from a response's metadata; None if not reported."""
    values = metadata.filter_metadata.get(_DESTINATION_NAMESPACE)
    if values is None or SERVED_HEADER not in values.fields:
        return None
    return values.fields[SERVED_HEADER].string_value or None


@lru_cache(maxsize=4096)
def destination_metadata(destination: str) -> struct_pb2.Struct:
    """Return the picked endpoint as dynamic metadata."""
    metadata = struct_pb2.Struct()
    metadata.update({_DESTINATION_NAMESPACE: {DESTINATION_HEADER: destination}})
    return metadata


def error_headers(error: RequestError) -> dict[str, str]:
    """Return the headers of an error response that the router sends to a client."""
    headers = {"content-type": "application/json"}
    if error.dropped_reason is not None:
        headers[DROPPED_REASON_HEADER] = error.dropped_reason
    return headers
