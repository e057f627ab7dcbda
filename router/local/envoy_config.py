"""The Envoy configuration of the local stack: addresses in, a bootstrap (as a JSON-like dict) out.

Two listeners: the gateway, where ext_authz (over plain HTTP or gRPC) or ext_proc asks the router for a pod,
and a round-robin one for contrast. Knows nothing of processes or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.check_answers import STAND_INS
from router.envoy_headers import DESTINATION_HEADER, REQUEST_ID_HEADER, SUBSET_HEADER, SUBSET_NAMESPACE
from router.explain_header import EXPLAIN_HEADER
from router.plugins.handlers import HANDLER_HEADERS
from router.plugins.session_affinity import TOKEN_HEADER

POD_HEADER = "x-kvroute-pod"
"""Response header that names the pod which answered."""

_API = "type.googleapis.com/envoy"
_PROCESSING_S = "30s"
# The access log ends requests in the router's ledger: late entries look like load that is no longer there.
_ACCESS_LOG_FLUSH_S = "0.05s"
_UNLIMITED = 1_000_000_000

# A router keeps an idle connection longer, so that it never closes one on which a request is on its way.
_CHECK_IDLE_S = "60s"
# So do engines, if only for five seconds.
_POD_IDLE_S = "4s"
_POD_TRIES = 3

Door = Literal["check", "check_grpc", "ext_proc"]


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What the configuration depends on; all addresses are (host, port).

    Attributes:
        router_check: Where the router answers ext_authz over plain HTTP; for the door "check" alone.
        door: "check" and "check_grpc" ask once with the whole body, over plain HTTP or gRPC; "ext_proc"
            streams, as Gateway API gateways do.
        responses: "skip" leaves responses to Envoy, "full" (ext_proc only) streams them through the router as
            well.
        max_request_bytes: The router's limit; Envoy answers larger bodies with 413.
        failure_mode_allow: While the router is away: False answers 5xx, True (not with ext_proc) sends
            requests round-robin. A body that was streamed to ext_proc cannot be had back.
    """

    gateway: tuple[str, int]
    router_grpc: tuple[str, int]
    pods: Sequence[tuple[str, int]]
    router_check: tuple[str, int] | None = None
    round_robin: tuple[str, int] | None = None
    door: Door = "check"
    responses: Literal["skip", "full"] = "skip"
    max_request_bytes: int = 8 << 20
    failure_mode_allow: bool = False


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """Builds the bootstrap configuration (Envoy v3 API, written for 1.40)."""
    round_robin = {"cluster": "round_robin", "timeout": "0s"}
    routes = _gateway_routes(round_robin if settings.failure_mode_allow else None)
    door = _ext_proc_filter(settings) if settings.door == "ext_proc" else _check_filter(settings)
    listeners = [_listener("gateway", settings.gateway, routes, [door], _access_log())]
    clusters = [_original_dst_cluster(), _router_cluster(settings.router_grpc)]
    if settings.router_check is not None:
        clusters.append(_router_check_cluster(settings.router_check))
    if settings.round_robin is not None:
        routes = [{"match": {"prefix": "/"}, "route": round_robin}]
        listeners.append(_listener("round_robin", settings.round_robin, routes, [], []))
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
            **(_check_over_http() if settings.door == "check" else _check_over_grpc()),
            "failure_mode_allow": settings.failure_mode_allow,
            "status_on_error": {"code": "ServiceUnavailable"},
            "with_request_body": {
                "max_request_bytes": settings.max_request_bytes,
                # A part of a prompt would be routed as if it were the whole.
                "allow_partial_message": False,
                "pack_as_bytes": True,
            },
            "clear_route_cache": True,
        },
    }


def _check_over_grpc() -> dict[str, Any]:
    return {
        "grpc_service": {"envoy_grpc": {"cluster_name": "router"}, "timeout": _PROCESSING_S},
        "metadata_context_namespaces": [SUBSET_NAMESPACE],
    }


def _check_over_http() -> dict[str, Any]:
    """All headers go to the router; of its answer's, those for the pod and for the client are named."""
    subset = f"%DYNAMIC_METADATA({SUBSET_NAMESPACE}:{SUBSET_HEADER})%"
    return {
        "allowed_headers": {"patterns": [{"safe_regex": {"regex": ".*"}}]},
        "http_service": {
            "server_uri": {"uri": "http://router", "cluster": "router_check", "timeout": _PROCESSING_S},
            "authorization_request": {"headers_to_add": [{"key": SUBSET_HEADER, "value": subset}]},
            "authorization_response": {
                "allowed_upstream_headers": _named(
                    DESTINATION_HEADER, REQUEST_ID_HEADER, *sorted(HANDLER_HEADERS)
                ),
                "allowed_client_headers_on_success": _named(EXPLAIN_HEADER, TOKEN_HEADER),
            },
            # A router that goes away in the middle has dispatched nothing: another may be asked.
            "retry_policy": {
                "num_retries": 2,
                "retry_on": "connect-failure,refused-stream,reset",
                # Envoy takes the longest interval for each try's timeout, too.
                "retry_back_off": {"base_interval": "0.025s", "max_interval": _PROCESSING_S},
            },
        },
    }


def _named(*names: str) -> dict[str, Any]:
    return {"patterns": [{"exact": name} for name in names]}


def _ext_proc_filter(settings: EnvoySettings) -> dict[str, Any]:
    full = settings.responses == "full"
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": f"{_API}.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "router"}, "timeout": _PROCESSING_S},
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


def _gateway_routes(unpicked: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Requests go to the pod that the router has set; `unpicked` is where others go, if anywhere."""
    # A generation may take minutes: its client, not the route, says when to give up.
    picked = {"cluster": "picked_pod", "timeout": "0s", "retry_policy": _unsent_again()}
    if unpicked is None:
        # ORIGINAL_DST has no other pod to offer, so a request without a pick can only fail.
        return [{"match": {"prefix": "/"}, "route": picked}]
    has_pod = {"name": DESTINATION_HEADER, "present_match": True}
    return [
        {"match": {"prefix": "/", "headers": [has_pod]}, "route": picked},
        {"match": {"prefix": "/"}, "route": unpicked},
    ]


def _unsent_again() -> dict[str, Any]:
    """What a pod has not seen yet may be sent to it once more; what it has seen, it may be computing."""
    return {
        "retry_on": "connect-failure,refused-stream,reset-before-request",
        "num_retries": _POD_TRIES,
        "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
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
        # Only the router may name a pod, and only the gateway a choice of pods.
        "early_header_mutation_extensions": [_without_headers(DESTINATION_HEADER, SUBSET_HEADER)],
        "local_reply_config": {"mappers": [*_true_statuses(), _too_large_reply()]},
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
                    "routes": routes,
                }
            ]
        },
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": name, "address": _address(address), "filter_chains": [chain]}


def _without_headers(*names: str) -> dict[str, Any]:
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": f"{_API}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove": name} for name in names],
        },
    }


def _true_statuses() -> list[dict[str, Any]]:
    """What the router answers with a stand-in reaches the client with the status that it stands for."""
    return [{"filter": _is_status(stand_in), "status_code": status} for status, stand_in in STAND_INS.items()]


def _is_status(status: int) -> dict[str, Any]:
    value = {"default_value": status, "runtime_key": "unused"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def _too_large_reply() -> dict[str, Any]:
    """Envoy's own 413 in OpenAI's form."""
    error = {
        "message": "the request body is larger than this gateway's limit",
        "type": "RequestEntityTooLargeError",
        "param": None,
        "code": 413,
    }
    return {
        "filter": _is_status(413),
        "body_format_override": {"json_format": {"error": error}},
    }


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
        "typed_extension_protocol_options": _http1(_POD_IDLE_S),
    }


def _round_robin_cluster(pods: Sequence[tuple[str, int]]) -> dict[str, Any]:
    return {
        "name": "round_robin",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "connect_timeout": "1s",
        "load_assignment": _assignment("round_robin", pods),
        "circuit_breakers": _no_circuit_breakers(),
        "typed_extension_protocol_options": _http1(_POD_IDLE_S),
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


def _router_check_cluster(address: tuple[str, int]) -> dict[str, Any]:
    return {
        "name": "router_check",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _assignment("router_check", [address]),
        "circuit_breakers": _no_circuit_breakers(),
        "typed_extension_protocol_options": _http1(_CHECK_IDLE_S),
    }


def _http1(idle_timeout: str) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        options: {
            "@type": f"type.googleapis.com/{options}",
            "common_http_protocol_options": {"idle_timeout": idle_timeout},
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
