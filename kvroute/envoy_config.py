"""Envoy's configuration: of the local stack, as a JSON-like dict, and the `kvroute envoy-config` command.

Three listeners: the gateway, which asks a router for a pod by ext_authz or ext_proc, and two for comparison,
which balance by round-robin and by least requests. Their building blocks are in envoy.yaml.
"""

import json
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from common.flags import CommandParser, add_flags, flag, flag_values, port
from router.config.flags import switch
from router.doors.boundary import DESTINATION_HEADER, GATEWAY_ONLY_HEADERS

POD_HEADER = "x-kvroute-pod"
"""Response header with the address of the pod that answered."""

INFERENCE_PATHS: tuple[tuple[str, str], ...] = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/images/generations"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
)
"""Method and path of every request that may reach a pod.

Paths are matched exactly: a prefix such as `/v1/` would also match `/v1/..%2fmetrics`.
"""

# Protocol of the responses whose usage Envoy reads, by path; that of another one would give wrong numbers.
_USAGE_PROTOCOLS = {
    "/v1/chat/completions": "OPENAI_CHAT_COMPLETIONS",
    "/v1/completions": "OPENAI_CHAT_COMPLETIONS",
    "/v1/embeddings": "OPENAI_CHAT_COMPLETIONS",
    "/v1/responses": "OPENAI_RESPONSES",
    "/v1/messages": "ANTHROPIC_MESSAGES",
}

_PARTS = Path(__file__).with_name("envoy.yaml")

Address = tuple[str, int]
Door = Literal["check_grpc", "ext_proc"]
Responses = Literal["usage", "skip", "full"]
_Action = tuple[dict[str, Any], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class DoorOptions:
    """How Envoy calls the router."""

    door: Door = flag(
        "gateway",
        "--door",
        Door,
        "check_grpc",
        "check_grpc: one call with the whole body (ext_authz); ext_proc: as Gateway API gateways call",
    )
    responses: Responses = flag(
        "gateway",
        "--responses",
        Responses,
        "usage",
        "usage: Envoy reads their cached tokens; skip: it does not; full: ext_proc receives both phases",
    )
    failure_mode_allow: bool = switch(
        "gateway",
        "--failure-mode-allow",
        False,
        "send requests round-robin while the router is unavailable, not 503 (not with ext_proc)",
    )

    def check(self) -> None:
        """Raise a ValueError for choices that exclude each other."""
        if self.responses == "full" and self.door != "ext_proc":
            raise ValueError("--responses full needs --door ext_proc: ext_authz never receives responses")
        if self.failure_mode_allow and self.door == "ext_proc":
            raise ValueError(
                "--failure-mode-allow needs --door check_grpc: ext_proc would lose streamed bodies"
            )


def _address(text: str) -> Address:
    host, _, number = text.rpartition(":")
    if not host:
        raise ArgumentTypeError(f"must be HOST:PORT, not {text!r}")
    return host.strip("[]"), port(number)


_SEVERAL: Any = {"nargs": "+", "metavar": "HOST:PORT"}


@dataclass(frozen=True, slots=True)
class EnvoySettings(DoorOptions):
    """Inputs of the configuration. Addresses are (host, port)."""

    gateway: Address = flag(
        *("addresses", "--listen", _address, ("0.0.0.0", 8080), "the gateway's (default: 0.0.0.0:8080)"),
        metavar="HOST:PORT",
    )
    routers: Sequence[Address] = flag(
        "addresses", "--router", _address, (), "gRPC ports of all routers", required=True, **_SEVERAL
    )
    pods: Sequence[Address] = flag(
        "addresses", "--pod", _address, (), "model servers, for --failure-mode-allow", **_SEVERAL
    )
    round_robin: Address | None = None
    least_requests: Address | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Print a configuration; return the exit status."""
    parser = CommandParser(
        prog="kvroute envoy-config",
        description="Print the configuration of an Envoy 1.40 that asks routers for a pod, as JSON.",
    )
    add_flags(parser, EnvoySettings)
    arguments = parser.parse_args(argv)
    try:
        settings = EnvoySettings(**flag_values(EnvoySettings, arguments))
        settings.check()
        if settings.failure_mode_allow and not settings.pods:
            raise ValueError("--failure-mode-allow needs --pod: the model servers to send requests to")
    except ValueError as error:
        parser.error(str(error))
    print(json.dumps(bootstrap(settings), indent=2))
    return 0


def bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """Return the bootstrap configuration."""
    parts = yaml.safe_load(_PARTS.read_text(encoding="utf-8"))
    actions, clusters = parts["actions"], parts["clusters"]
    (mutation,) = parts["manager"]["early_header_mutation_extensions"]
    mutation["typed_config"]["mutations"] = [{"remove": header} for header in GATEWAY_ONLY_HEADERS]
    if settings.door == "check_grpc":
        door = parts["doors"]["check_grpc"]
        door["typed_config"]["failure_mode_allow"] = settings.failure_mode_allow
    else:
        door = parts["doors"]["ext_proc_full" if settings.responses == "full" else "ext_proc_skip"]
    # An ORIGINAL_DST cluster has no fallback pod: without a pick, a request fails unless round-robin is
    # allowed.
    routes: list[_Action] = [(actions["picked"], [])]
    if settings.failure_mode_allow:
        has_pod = {"name": DESTINATION_HEADER, "present_match": True}
        routes = [(actions["picked"], [has_pod]), (actions["round_robin"], [])]
    gateway = _listener("gateway", settings.gateway, parts, routes, [door], parts["access_log"])
    if settings.responses == "usage":
        read_usage(gateway, parts["token_usage"])
    listeners = [gateway]
    used = [clusters["picked_pod"], _to(clusters["router"], settings.routers)]
    if settings.round_robin is not None or settings.failure_mode_allow:
        used.append(_to(clusters["round_robin"], settings.pods))
    for name, address in (("round_robin", settings.round_robin), ("least_requests", settings.least_requests)):
        if address is not None:
            listeners.append(_listener(name, address, parts, [(actions[name], [])], [], []))
    if settings.least_requests is not None:
        used.append(_to(clusters["least_requests"], settings.pods))
    return {
        "node": {"id": "kvroute-local", "cluster": "kvroute"},
        "static_resources": {"listeners": listeners, "clusters": used},
    }


def read_usage(listener: dict[str, Any], usage_filter: dict[str, Any]) -> None:
    """Let a listener of `bootstrap` read the usage in responses."""
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"].insert(-1, usage_filter)
    (virtual_host,) = manager["route_config"]["virtual_hosts"]
    # Compressed responses are not read.
    virtual_host["request_headers_to_remove"] = ["accept-encoding"]
    for route in virtual_host["routes"]:
        if protocol := _USAGE_PROTOCOLS.get(route["match"].get("path")):
            route["typed_per_filter_config"] = {
                usage_filter["name"]: {
                    "@type": f"{usage_filter['typed_config']['@type']}PerRoute",
                    "response": {"llm_protocol": protocol},
                }
            }


def _listener(
    name: str,
    address: Address,
    parts: dict[str, Any],
    actions: Sequence[_Action],
    filters: Sequence[dict[str, Any]],
    access_log: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return a listener that routes inference paths by the first action whose header matches hold."""
    routes = [
        {
            "match": {
                "path": path,
                "headers": [{"name": ":method", "string_match": {"exact": method}}, *headers],
            },
            "route": action,
        }
        for method, path in INFERENCE_PATHS
        for action, headers in actions
    ]
    virtual_host = {**parts["virtual_host"], "name": name, "routes": [*routes, parts["not_found"]]}
    manager = {
        **parts["manager"],
        "stat_prefix": name,
        "access_log": list(access_log),
        "http_filters": [*filters, parts["router_filter"]],
        "route_config": {"virtual_hosts": [virtual_host]},
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": name, "address": _socket(address), "filter_chains": [chain]}


def _to(cluster: dict[str, Any], addresses: Sequence[Address]) -> dict[str, Any]:
    """Return a copy of a cluster with endpoints, which are found by DNS where they have names."""
    endpoints = [{"endpoint": {"address": _socket(address)}} for address in addresses]
    assignment = {"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": endpoints}]}
    are_ips = all(":" in host or host.replace(".", "").isdecimal() for host, _ in addresses)
    kind = {} if are_ips else {"type": "STRICT_DNS"}
    return {**cluster, **kind, "load_assignment": assignment}


def _socket(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}
