"""The Envoy configuration of the local stack: addresses in, a bootstrap (as a JSON-like dict) out.

Two listeners: the gateway, where ext_authz or ext_proc asks the router for a pod, and a round-robin one for
contrast. Knows nothing of processes or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.envoy_headers import DESTINATION_HEADER, SUBSET_NAMESPACE
from router.local.envoy_replies import DOOR_FAILED, reply_mappers
from router.local.envoy_routes import (
    gateway_routes,
    path_options,
    round_robin_routes,
    virtual_host,
    without_gateway_only_headers,
)

_API = "type.googleapis.com/envoy"
_PROCESSING_S = "30s"
# The access log ends requests in the router's ledger: late entries look like load that is no longer there.
_ACCESS_LOG_FLUSH_S = "0.05s"
_UNLIMITED = 1_000_000_000

# Engines keep an idle connection for five seconds, so that they close none on which a request is on its way.
_POD_IDLE_S = "4s"

Door = Literal["check_grpc", "ext_proc"]


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What the configuration depends on; all addresses are (host, port).

    Attributes:
        door: "check_grpc" asks once with the whole body (ext_authz); "ext_proc" streams, as Gateway API
            gateways do.
        responses: "skip" leaves responses to Envoy, "full" (ext_proc only) streams them through the router as
            well.
        max_request_bytes: The router's limit; Envoy answers larger bodies with 413.
        failure_mode_allow: While the router is away: False answers 5xx, True (not with ext_proc) sends
            requests round-robin. A body that was streamed to ext_proc cannot be had back.
    """

    gateway: tuple[str, int]
    router_grpc: tuple[str, int]
    pods: Sequence[tuple[str, int]]
    round_robin: tuple[str, int] | None = None
    door: Door = "check_grpc"
    responses: Literal["skip", "full"] = "skip"
    max_request_bytes: int = 8 << 20
    failure_mode_allow: bool = False


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """Builds the bootstrap configuration (Envoy v3 API, written for 1.40)."""
    routes = gateway_routes(fail_open=settings.failure_mode_allow)
    door = _ext_proc_filter(settings) if settings.door == "ext_proc" else _check_filter(settings)
    listeners = [_listener("gateway", settings.gateway, routes, [door], _access_log())]
    clusters = [_original_dst_cluster(), _router_cluster(settings.router_grpc)]
    if settings.round_robin is not None:
        listeners.append(_listener("round_robin", settings.round_robin, round_robin_routes(), [], []))
    if settings.round_robin is not None or settings.failure_mode_allow:
        clusters.append(_round_robin_cluster(settings.pods))
    return {
        "node": {"id": "kvroute-local", "cluster": "kvroute"},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }


def _check_filter(settings: EnvoySettings) -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.ext_authz",
        "typed_config": {
            "@type": f"{_API}.extensions.filters.http.ext_authz.v3.ExtAuthz",
            "transport_api_version": "V3",
            "grpc_service": _router_service(),
            "metadata_context_namespaces": [SUBSET_NAMESPACE],
            "failure_mode_allow": settings.failure_mode_allow,
            "status_on_error": {"code": DOOR_FAILED[0]},
            "with_request_body": {
                "max_request_bytes": settings.max_request_bytes,
                # A part of a prompt would be routed as if it were the whole.
                "allow_partial_message": False,
                "pack_as_bytes": True,
            },
            "clear_route_cache": True,
        },
    }


def _router_service() -> dict[str, Any]:
    """The router's gRPC doors. The timeout is long, since a pick may wait: the cluster finds hung routers."""
    return {
        "envoy_grpc": {"cluster_name": "router"},
        "timeout": _PROCESSING_S,
        # A router that goes away in the middle has dispatched nothing: another may be asked.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset,unavailable",
            "num_retries": 2,
            # Envoy takes the longest interval for each try's timeout, too.
            "retry_back_off": {"base_interval": "0.025s", "max_interval": _PROCESSING_S},
            "host_selection_retry_max_attempts": 3,
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": {
                        "@type": f"{_API}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    },
                }
            ],
        },
    }


def _ext_proc_filter(settings: EnvoySettings) -> dict[str, Any]:
    full = settings.responses == "full"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_API}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": _router_service(),
            "failure_mode_allow": False,
            "status_on_error": {"code": DOOR_FAILED[0]},
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


def _listener(
    name: str,
    address: tuple[str, int],
    routes: list[dict[str, Any]],
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
        **path_options(),
        "early_header_mutation_extensions": [without_gateway_only_headers()],
        "local_reply_config": {"mappers": reply_mappers()},
        "http_filters": [
            *filters,
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_API}.extensions.filters.http.router.v3.Router"},
            },
        ],
        "route_config": {"virtual_hosts": [virtual_host(name, routes)]},
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
        "typed_extension_protocol_options": _http1(),
    }


def _round_robin_cluster(pods: Sequence[tuple[str, int]]) -> dict[str, Any]:
    return {
        "name": "round_robin",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": "1s",
        "load_assignment": _assignment("round_robin", pods),
        "circuit_breakers": _no_circuit_breakers(),
        "typed_extension_protocol_options": _http1(),
    }


def _router_cluster(address: tuple[str, int]) -> dict[str, Any]:
    """Routers over gRPC. A router that hangs keeps its connections open; it is found within seconds."""
    return {
        "name": "router",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment("router", [address]),
        # Otherwise Envoy goes on asking routers of which half or more are unhealthy.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        # Stops asking the router after two failures. Its health service follows its readiness.
        "health_checks": [
            {
                "timeout": "0.5s",
                "interval": "0.5s",
                "no_traffic_interval": "0.5s",
                "unhealthy_interval": "0.5s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {},
            }
        ],
        "circuit_breakers": _no_circuit_breakers(),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_API}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    "http2_protocol_options": {
                        # Ends requests that wait for a router that hangs, or whose node is gone.
                        "connection_keepalive": {"interval": "1s", "timeout": "2s"}
                    }
                },
            }
        },
    }


def _http1() -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        options: {
            "@type": f"type.googleapis.com/{options}",
            "common_http_protocol_options": {"idle_timeout": _POD_IDLE_S},
            "explicit_http_config": {"http_protocol_options": {}},
        }
    }


def _no_circuit_breakers() -> dict[str, Any]:
    """Envoy's own limits (1,024 requests, 3 retries) would refuse what the router has room for."""
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [{"priority": "DEFAULT", **dict.fromkeys(limits, _UNLIMITED)}]}


def _assignment(name: str, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(address: tuple[str, int]) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}
