"""What the chart's Envoy shares with the local stack's: `bootstrap` in, the parts that the chart uses out.

UPDATE_GOLDEN=1 writes them to charts/kvroute/files/envoy.json.
"""

from __future__ import annotations

from typing import Any, Literal

from kvroute.envoy_config import INFERENCE_PATHS, Door, EnvoySettings, bootstrap

# A port that is bound in every pod, and addresses that the chart replaces.
GATEWAY = ("0.0.0.0", 8080)
_ANY = ("127.0.0.1", 1)
Responses = Literal["skip", "full"]


def local_bootstrap(door: Door, responses: Responses = "skip", *, fail_open: bool = False) -> dict[str, Any]:
    """The local stack's configuration with the chart's address of the gateway."""
    settings = EnvoySettings(
        gateway=GATEWAY,
        router_grpc=_ANY,
        pods=[_ANY],
        door=door,
        responses=responses,
        failure_mode_allow=fail_open,
    )
    return bootstrap(settings)


def envoy_parts() -> dict[str, Any]:
    """Inference paths, the gateway's listener without a door, routes if it fails open, doors, clusters."""
    closed, opened = local_bootstrap("check_grpc"), local_bootstrap("check_grpc", fail_open=True)
    (listener,) = closed["static_resources"]["listeners"]
    manager(listener)["http_filters"] = manager(listener)["http_filters"][1:]
    (opened_listener,) = opened["static_resources"]["listeners"]
    return {
        "paths": [{"method": method, "path": path} for method, path in INFERENCE_PATHS],
        "listener": listener,
        "fail_open_routes": manager(opened_listener)["route_config"]["virtual_hosts"][0]["routes"],
        "doors": {
            "check_grpc": _door("check_grpc"),
            "ext_proc_skip": _door("ext_proc", "skip"),
            "ext_proc_full": _door("ext_proc", "full"),
        },
        "clusters": {cluster["name"]: cluster for cluster in opened["static_resources"]["clusters"]},
    }


def manager(listener: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of a listener."""
    (chain,) = listener["filter_chains"]
    found: dict[str, Any] = chain["filters"][0]["typed_config"]
    return found


def _door(door: Door, responses: Responses = "skip") -> dict[str, Any]:
    (listener,) = local_bootstrap(door, responses)["static_resources"]["listeners"]
    first: dict[str, Any] = manager(listener)["http_filters"][0]
    return first
