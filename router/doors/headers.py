"""The HTTP headers that pass between Envoy and the router, whichever door they take; values only.

Names are those of the endpoint picker protocol v1.0.0 (Gateway API Inference Extension, proposal 004).
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
"""Where a gateway names the endpoints that it allows: in metadata of this namespace and name."""

SERVED_HEADER = "x-gateway-destination-endpoint-served"

GATEWAY_ONLY_HEADERS: tuple[str, ...] = (
    # The endpoint picker protocol: the pod, the pods that the gateway allows, the pod that answered.
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    # Disaggregation and KV transfer: hosts that an engine or its sidecar connects to.
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    # The engine of a pod that has several: vLLM reads the rank.
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    # Envoy's note that ext_authz sends only a part of the body; such a body is not read.
    "x-envoy-auth-partial-body",
)
"""Names in lower case, with and without a router's use for them: engines and sidecars obey them all.

Envoy removes them before any filter runs (`kvroute.envoy_config`, the chart), so that what a filter sets
later stays.
"""

_DESTINATION_NAMESPACE = "envoy.lb"
_REQUEST_ID_MAX = 256

# Headers that only gateway and picker may set: a client's are taken off. (The destination is overwritten.)
_SYSTEM_OWNED = frozenset(
    {
        # Envoy lets nobody change its own names.
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
    """Return a client's header names that must not reach a pod; `ours` are overwritten anyway."""
    if _SYSTEM_OWNED.isdisjoint(incoming):
        return ()
    return tuple(name for name in incoming if name in _SYSTEM_OWNED and name not in ours)


def kept_request_id(headers: Mapping[str, str]) -> tuple[str, bool]:
    """The request's id, and whether it is the gateway's own; one that cannot be kept is replaced (uuid4)."""
    given = headers.get(REQUEST_ID_HEADER, "")
    # Envoy's access log would spell any other id differently, and never end its request.
    if 0 < len(given) <= _REQUEST_ID_MAX and given.isascii() and given.isprintable():
        return given, True
    return str(uuid.uuid4()), False


def subset_hint(metadata: base_pb2.Metadata) -> frozenset[str] | None:
    """The endpoints that the gateway allows, from a message's metadata; None when it says nothing."""
    hint = metadata.filter_metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET_HEADER not in hint.fields:
        return None
    value = hint.fields[SUBSET_HEADER]
    texts = [item.string_value for item in value.list_value.values] or [value.string_value]
    return frozenset(part.strip() for text in texts for part in text.split(",") if part.strip())


def served_endpoint(metadata: base_pb2.Metadata) -> str | None:
    """The endpoint that answered, from a response's metadata; None when the gateway does not say."""
    told = metadata.filter_metadata.get(_DESTINATION_NAMESPACE)
    if told is None or SERVED_HEADER not in told.fields:
        return None
    return told.fields[SERVED_HEADER].string_value or None


@lru_cache(maxsize=4096)
def destination_metadata(destination: str) -> struct_pb2.Struct:
    """The routing result as dynamic metadata."""
    metadata = struct_pb2.Struct()
    metadata.update({_DESTINATION_NAMESPACE: {DESTINATION_HEADER: destination}})
    return metadata


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers of the router's own answer to a client."""
    headers = {"content-type": "application/json"}
    if error.dropped_reason is not None:
        headers[DROPPED_REASON_HEADER] = error.dropped_reason
    return headers
