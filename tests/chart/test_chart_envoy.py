"""The chart's Envoy configuration: accepted by the real Envoy, and equivalent to the local stack's."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvroute.envoy_config import INFERENCE_PATHS, Responses
from kvroute.stack import envoy_command
from router.doors.boundary import GATEWAY_ONLY_HEADERS
from tests.support.chart.envoy_parts import GATEWAY, envoy_parts, local_bootstrap, manager
from tests.support.chart.helm import (
    CHART,
    EVERYTHING,
    clusters,
    container,
    envoy_bootstrap,
    gateway_manager,
    manifests,
    one,
)

PARTS = CHART / "files" / "envoy.json"
SETTINGS: list[dict[str, Any]] = [
    {"door": "check_grpc", "failOpen": False},
    {"door": "check_grpc", "failOpen": True},
    {"door": "check_grpc", "responses": "skip"},
    {"door": "ext_proc"},
    {"door": "ext_proc", "responses": "skip"},
    {"door": "ext_proc", "responses": "full"},
]
BEHIND_ENVOY_GATEWAY = {
    "mode": "gateway",
    "gateway": {
        "kind": "envoyGateway",
        "httpRoute": {"parentRefs": [{"name": "g", "namespace": "gateways"}]},
    },
    "router": {"objectives": [{"name": "batch", "priority": -1}]},
}
EXTRA = {"extra": [{"method": "POST", "path": "/detokenize"}]}


def test_envoy_json_equals_the_local_stacks_parts() -> None:
    """files/envoy.json equals the output of envoy_config; UPDATE_GOLDEN=1 rewrites it."""
    if os.environ.get("UPDATE_GOLDEN"):
        PARTS.write_text(json.dumps(envoy_parts(), indent=1) + "\n")
    assert json.loads(PARTS.read_text()) == envoy_parts()


@pytest.mark.parametrize("envoy", SETTINGS, ids=str)
def test_envoy_accepts_the_configuration(tmp_path: Path, envoy: dict[str, Any]) -> None:
    """The real Envoy accepts the bootstrap for each service and mode, without deprecated fields."""
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(envoy_bootstrap({"envoy": envoy, "paths": EXTRA})))
    done = subprocess.run(
        [envoy_command(), "--mode", "validate", "--disable-hot-restart", "-c", path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr.lower()


@pytest.mark.parametrize("envoy", SETTINGS, ids=str)
def test_routing_equals_the_local_stacks(envoy: dict[str, Any]) -> None:
    """Filters, routes, access log and replies equal the local stack's, with retries added."""
    rendered = gateway_manager(envoy_bootstrap({"envoy": envoy}))
    responses: Responses = envoy.get("responses", "usage")
    local = local_bootstrap(envoy["door"], responses, fail_open=envoy.get("failOpen", False))
    (listener,) = local["static_resources"]["listeners"]
    expected = manager(listener)
    assert listener["address"]["socket_address"] == {"address": GATEWAY[0], "port_value": GATEWAY[1]}
    for http_filter in (rendered["http_filters"][0], expected["http_filters"][0]):
        config = http_filter["typed_config"]
        (config.get("http_service") or config["grpc_service"]).pop("retry_policy", None)
    assert rendered == expected


@pytest.mark.parametrize("envoy", SETTINGS, ids=str)
def test_clusters_differ_only_in_addresses_and_probes(envoy: dict[str, Any]) -> None:
    """Each cluster of the local stack is there, changed only in addresses and probes."""
    rendered = clusters(envoy_bootstrap({"envoy": envoy}))
    local = clusters(local_bootstrap(envoy["door"], fail_open=envoy.get("failOpen", False)))
    assert set(rendered) == {*local, "admin"}
    assert rendered["picked_pod"] == local["picked_pod"]
    for name in set(local) - {"picked_pod"}:
        kept = {"name", "connect_timeout"} | ({"lb_policy"} & local[name].keys())
        assert {key: rendered[name][key] for key in kept} == {key: local[name][key] for key in kept}
        options = rendered[name].get("typed_extension_protocol_options", {})
        assert options.keys() == local[name].get("typed_extension_protocol_options", {}).keys()


@pytest.mark.parametrize("fail_open", [False, True])
def test_values_add_paths(fail_open: bool) -> None:
    """An additional path is routed by method and exact path, before the 404 for all others."""
    values = {"envoy": {"failOpen": fail_open}, "paths": EXTRA}
    (host,) = gateway_manager(envoy_bootstrap(values))["route_config"]["virtual_hosts"]
    found = [route for route in host["routes"] if route["match"].get("path") == "/detokenize"]
    of_chats = [route for route in host["routes"] if route["match"].get("path") == "/v1/chat/completions"]
    assert [{**route["match"], "path": ""} for route in found] == [
        {**route["match"], "path": ""} for route in of_chats
    ]
    assert [route["route"] for route in found] == [route["route"] for route in of_chats]
    assert host["routes"][-1]["direct_response"]["status"] == 404


def test_a_gateways_route_has_the_same_paths() -> None:
    """In gateway mode the HTTPRoute matches each path exactly, with its method."""
    objects = manifests({**EVERYTHING, "paths": EXTRA})
    (rule,) = one(objects, "HTTPRoute", "")["spec"]["rules"]
    assert {match["path"]["type"] for match in rule["matches"]} == {"Exact"}
    found = {(match["method"], match["path"]["value"]) for match in rule["matches"]}
    assert found == {*INFERENCE_PATHS, ("POST", "/detokenize")}


def test_a_route_of_one_match_has_the_same_paths() -> None:
    """With oneMatch the HTTPRoute has one match, an expression whose only operator is `|` between paths."""
    gateway = {"httpRoute": {"parentRefs": [{"name": "inference"}], "oneMatch": True}}
    objects = manifests(
        {"mode": "gateway", "gateway": gateway, "paths": {"extra": [{"method": "GET", "path": "/a.b"}]}}
    )
    (rule,) = one(objects, "HTTPRoute", "")["spec"]["rules"]
    (match,) = rule["matches"]
    assert match["path"]["type"] == "RegularExpression"
    paths = {path for _, path in INFERENCE_PATHS}
    assert set(match["path"]["value"].split("|")) == {*paths, r"/a\.b"}
    assert match.keys() == {"path"}


def test_envoy_gateway_is_told_of_routers_and_picks() -> None:
    """Its policies name route, router and picks; the router finds pods by labels, without a pool."""
    objects = manifests(BEHIND_ENVOY_GATEWAY)
    assert not [each for each in objects if each["kind"] == "InferencePool"]
    route = one(objects, "HTTPRoute", "")
    (rule,) = route["spec"]["rules"]
    assert {(match["method"], match["path"]["value"]) for match in rule["matches"]} == set(INFERENCE_PATHS)
    models, router = (one(objects, "Service", suffix)["metadata"]["name"] for suffix in ("-models", "-epp"))
    assert rule["backendRefs"] == [{"name": models, "port": 8000}]
    target = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": route["metadata"]["name"]}
    traffic, extension = (one(objects, kind, "") for kind in ("BackendTrafficPolicy", "EnvoyExtensionPolicy"))
    assert traffic["spec"]["targetRefs"] == extension["spec"]["targetRefs"] == [target]
    (processor,) = extension["spec"]["extProc"]
    assert processor["backendRefs"] == [{"name": router, "port": 9002}]
    assert processor["failOpen"] is False
    clients = one(objects, "ClientTrafficPolicy", "-g")
    assert clients["metadata"]["namespace"] == "gateways"
    assert set(GATEWAY_ONLY_HEADERS) <= set(clients["spec"]["headers"]["earlyRequestHeaders"]["remove"])
    admitted = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "envoy-gateway-system"}}}
    for suffix in ("-epp", "-models"):
        assert one(objects, "NetworkPolicy", suffix)["spec"]["ingress"][0]["from"] == [admitted]
    arguments = container(one(objects, "Deployment", "-epp"), "router")["args"]
    assert any(argument.startswith("--endpoint-selector=") for argument in arguments)
    assert {"--responses=full", "--objective=batch=-1"} <= set(arguments)


def test_the_body_limit_equals_the_routers() -> None:
    """Envoy's body buffer limit equals the router's."""
    values = {"router": {"maxRequestBytes": 1 << 20}}
    door = gateway_manager(envoy_bootstrap(values))["http_filters"][0]["typed_config"]
    assert door["with_request_body"]["max_request_bytes"] == 1 << 20


def test_envoys_admin_api_is_private_to_the_pod() -> None:
    """Only readiness and metrics of Envoy's admin API are reachable from other pods."""
    bootstrap = envoy_bootstrap()
    assert bootstrap["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    (status,) = [each for each in bootstrap["static_resources"]["listeners"] if each["name"] == "status"]
    (route,) = manager(status)["route_config"]["virtual_hosts"][0]["routes"]
    assert route["match"]["path"] == "/metrics"
