"""The Envoy configuration of the local stack: addresses in, a bootstrap (as a JSON-like dict) out.

Two listeners: the gateway, where ext_proc asks the router for a pod, and a round-robin one for contrast.
Knows nothing of processes or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

DESTINATION_HEADER = "x-gateway-destination-endpoint"
POD_HEADER = "x-kvroute-pod"
"""Response header that names the pod which answered."""

_API = "type.googleapis.com/envoy"
_PROCESSING_S = "30s"
# The access log ends requests in the router's ledger: late entries look like load that is no longer there.
_ACCESS_LOG_FLUSH_S = "0.05s"
_UNLIMITED = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What the configuration depends on; all addresses are (host, port).

    Attributes:
        responses: "skip" leaves responses to Envoy, "full" streams them through the router as well.
    """

    gateway: tuple[str, int]
    router_grpc: tuple[str, int]
    pods: Sequence[tuple[str, int]]
    round_robin: tuple[str, int] | None = None
    responses: Literal["skip", "full"] = "skip"


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """Builds the bootstrap configuration (Envoy v3 API, written for 1.40)."""
    listeners = [
        _listener("gateway", settings.gateway, "picked_pod", _gateway_filters(settings), _access_log())
    ]
    clusters = [_original_dst_cluster(), _router_cluster(settings.router_grpc)]
    if settings.round_robin is not None:
        listeners.append(_listener("round_robin", settings.round_robin, "round_robin", [], []))
        clusters.append(_round_robin_cluster(settings.pods))
    return {
        "node": {"id": "kvroute-local", "cluster": "kvroute"},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def _gateway_filters(settings: EnvoySettings) -> list[dict[str, Any]]:
    full = settings.responses == "full"
    return [
        {
            "name": "envoy.filters.http.ext_proc",
            "typed_config": {
                "@type": f"{_API}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "router"}, "timeout": _PROCESSING_S},
                # ORIGINAL_DST has no other pod to offer, so a request without a pick can only fail.
                "failure_mode_allow": False,
                "message_timeout": _PROCESSING_S,
                "processing_mode": {
                    "request_header_mode": "SEND",
                    "request_body_mode": "FULL_DUPLEX_STREAMED",
                    "request_trailer_mode": "SEND",
                    "response_header_mode": "SEND" if full else "SKIP",
                    "response_body_mode": "FULL_DUPLEX_STREAMED" if full else "NONE",
                    "response_trailer_mode": "SEND" if full else "SKIP",
                },
            },
        }
    ]


def _listener(
    name: str,
    address: tuple[str, int],
    cluster: str,
    filters: list[dict[str, Any]],
    access_log: list[dict[str, Any]],
) -> dict[str, Any]:
    manager = {
        "@type": f"{_API}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "access_log": access_log,
        # The id joins the router's decision, the access log and what the client saw.
        "generate_request_id": True,
        "always_set_request_id_in_response": True,
        "stream_idle_timeout": "300s",
        "http_filters": [
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_API}.extensions.filters.http.router.v3.Router"},
            },
        ],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": name,
                    "domains": ["*"],
                    "response_headers_to_add": [
                        {"header": {"key": POD_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
                    ],
                    # A generation may take minutes: its client, not the route, says when to give up.
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}],
                }
            ]
        },
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": name, "address": _address(address), "filter_chains": [chain]}


def _access_log() -> list[dict[str, Any]]:
    return [
        {
            "name": "envoy.access_loggers.http_grpc",
            "typed_config": {
                "@type": f"{_API}.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
                "common_config": {
                    "log_name": "kvroute",
                    "transport_api_version": "V3",
                    "grpc_service": {"envoy_grpc": {"cluster_name": "router"}},
                    "buffer_flush_interval": _ACCESS_LOG_FLUSH_S,
                },
            },
        }
    ]


def _original_dst_cluster() -> dict[str, Any]:
    return {
        "name": "picked_pod",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "1s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION_HEADER},
        "circuit_breakers": _no_circuit_breakers(),
    }


def _round_robin_cluster(pods: Sequence[tuple[str, int]]) -> dict[str, Any]:
    return {
        "name": "round_robin",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": "1s",
        "load_assignment": _assignment("round_robin", pods),
        "circuit_breakers": _no_circuit_breakers(),
    }


def _router_cluster(address: tuple[str, int]) -> dict[str, Any]:
    return {
        "name": "router",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment("router", [address]),
        "circuit_breakers": _no_circuit_breakers(),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_API}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
    }


def _no_circuit_breakers() -> dict[str, Any]:
    """Envoy's own limits (1,024 requests) would refuse what the router has room for."""
    limits = ("max_connections", "max_pending_requests", "max_requests")
    return {"thresholds": [{"priority": "DEFAULT", **dict.fromkeys(limits, _UNLIMITED)}]}


def _assignment(name: str, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(address: tuple[str, int]) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}
