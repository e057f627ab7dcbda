"""An inference gateway in the cluster: our Envoy, configured as gateways call a picker."""

from __future__ import annotations

import json

from kvroute.envoy_config import EnvoySettings, bootstrap
from tests.support.kind.images import ENVOY
from tests.support.kind.release import Release

GATEWAY = {"app": "gateway"}
_TLS = {
    "name": "envoy.transport_sockets.tls",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": {"alpn_protocols": ["h2"]},
    },
}


def start_gateway(release: Release, service: str, *, tls: bool = False) -> None:
    """Start a gateway that calls a picker's Service by ext_proc, and open it at the release's node port.

    Args:
        tls: Call it over TLS, without a check of its certificate.
    """
    address = release.kubectl.get("service", service)["spec"]["clusterIP"]
    config = bootstrap(EnvoySettings(routers=[(address, 9002)], door="ext_proc", responses="full"))
    if tls:
        (router,) = (each for each in config["static_resources"]["clusters"] if each["name"] == "router")
        router["transport_socket"] = _TLS
    container = {
        "name": "envoy",
        "image": ENVOY,
        "imagePullPolicy": "Never",
        "args": ["-c", "/etc/envoy/envoy.json", "--disable-hot-restart", "--concurrency", "1"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/envoy"}],
    }
    volumes = [{"name": "config", "configMap": {"name": "gateway"}}]
    release.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "gateway"},
            "data": {"envoy.json": json.dumps(config)},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "gateway", "labels": GATEWAY},
            "spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0},
        },
    )
    open_port(release, GATEWAY, 8080)
    release.kubectl("wait", "--for=condition=Ready", "pod/gateway", "--timeout=120s")


def open_port(release: Release, labels: dict[str, str], port: int) -> None:
    """Open a port of the pods with these labels at the release's node port."""
    release.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "gateway-of-tests"},
            "spec": {
                "type": "NodePort",
                "selector": labels,
                "ports": [{"port": 80, "targetPort": port, "nodePort": release.node_port}],
            },
        }
    )
