"""TLS of the router's ports: self-signed and from files, reloaded without a restart, behind a real Envoy."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import urllib3
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvroute.envoy_config import EnvoySettings, bootstrap
from kvroute.stack import envoy_command
from router.app.server import RouterServer
from router.app.tls import MetricsTlsOptions, TlsOptions, grpc_tls, metrics_tls, self_signed
from router.errors import ConfigError
from tests.support.loopback import free_port, listens
from tests.support.router.bench import TINY
from tests.support.router.doors import wait_until
from tests.support.router.envoy import patient
from tests.support.router.server import fake_pods, ready_pods, running_router, write_pods

SERVING = health_pb2.HealthCheckResponse.SERVING


def write_certificate(authority: trustme.CA, directory: Path, number: int = 0) -> None:
    """Write a certificate of this authority; each number gives a different modification time."""
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.cert_chain_pems[0].write_to_path(directory / "tls.crt")
    issued.private_key_pem.write_to_path(directory / "tls.key")
    for name in ("tls.crt", "tls.key"):
        os.utime(directory / name, (10**9 + number, 10**9 + number))


@contextmanager
def secured(directory: Path, **settings: Any) -> Iterator[RouterServer]:
    """Run a router with one pod."""
    with (
        fake_pods(1) as pods,
        running_router(write_pods(directory / "pods.yaml", [pods[0].address]), **settings) as router,
    ):
        wait_until(lambda: len(ready_pods(router)) == 1, "the pod")
        yield router


def is_alive(router: RouterServer, trusted: bytes) -> bool:
    """Return whether the gRPC port serves a new connection that trusts this certificate."""
    credentials = grpc.ssl_channel_credentials(trusted)
    # Channels to one address share a connection, and so the certificate of an old one.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"localhost:{router.ports['grpc']}", credentials, options) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="liveness"), timeout=20
        )
    return bool(answer.status == SERVING)


def shown_certificate(router: RouterServer) -> bytes:
    """Return the certificate of the gRPC port, as PEM."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", router.ports["grpc"])) as plain,
        context.wrap_socket(plain) as secure,
    ):
        certificate = secure.getpeercert(binary_form=True)
    assert certificate is not None
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


def page(router: RouterServer, context: ssl.SSLContext | None, path: str = "/healthz") -> int:
    """Return the status of a page of the metrics port, on a new connection."""
    scheme = "http" if context is None else "https"
    with urllib3.PoolManager(ssl_context=context, retries=False, timeout=300) as http:
        return http.request("GET", f"{scheme}://127.0.0.1:{router.ports['metrics']}{path}").status


def test_without_files_a_certificate_is_generated(tmp_path: Path) -> None:
    """Without files each start generates a certificate; plaintext is served on the same port."""
    with secured(tmp_path, tls=TlsOptions()) as router:
        shown = shown_certificate(router)
        assert is_alive(router, shown)
        with grpc.insecure_channel(f"127.0.0.1:{router.ports['grpc']}") as channel:
            asked = health_pb2.HealthCheckRequest(service="liveness")
            assert health_pb2_grpc.HealthStub(channel).Check(asked, timeout=300).status == SERVING
    assert self_signed()[1] != self_signed()[1]


def test_renewed_certificate_files_are_reloaded(tmp_path: Path) -> None:
    """New connections get the reloaded certificate, unless reloading is disabled."""
    old, new = trustme.CA(), trustme.CA()
    for reloads, expected in ((True, new), (False, old)):
        write_certificate(old, tmp_path)
        with secured(tmp_path, tls=TlsOptions(tmp_path, reloads)) as router:
            assert is_alive(router, old.cert_pem.bytes())
            write_certificate(new, tmp_path, number=1)
            assert is_alive(router, expected.cert_pem.bytes())


def test_invalid_certificate_files_end_the_start(tmp_path: Path) -> None:
    """Missing, invalid or mismatched certificate files end the start with an error that names them."""
    with pytest.raises(ConfigError, match=r"cannot load tls\.crt and tls\.key"):
        grpc_tls(TlsOptions(tmp_path))
    (tmp_path / "tls.crt").write_text("no certificate")
    (tmp_path / "tls.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"cannot load tls\.crt and tls\.key"):
        grpc_tls(TlsOptions(tmp_path))
    write_certificate(trustme.CA(), tmp_path)
    trustme.CA().issue_cert("x").private_key_pem.write_to_path(tmp_path / "tls.key")
    with pytest.raises(ConfigError, match="KEY_VALUES_MISMATCH"):
        metrics_tls(MetricsTlsOptions(tmp_path))


def test_the_metrics_port_reloads_files_and_requires_client_certificates(tmp_path: Path) -> None:
    """The metrics port accepts only clients with a certificate of the authority, and reloads its files."""
    server, clients = trustme.CA(), trustme.CA()
    write_certificate(server, tmp_path)
    clients.cert_pem.write_to_path(tmp_path / "ca.crt")
    options = MetricsTlsOptions(tmp_path, tmp_path / "ca.crt")
    with secured(tmp_path, metrics_tls=options) as router:
        known, stranger = ssl.create_default_context(), ssl.create_default_context()
        for context in (known, stranger):
            server.configure_trust(context)
        clients.issue_cert("client").configure_cert(known)
        assert page(router, known) == 200
        for refused in (stranger, None):
            with pytest.raises(urllib3.exceptions.HTTPError):
                page(router, refused)
        renewed = trustme.CA()
        write_certificate(renewed, tmp_path, number=1)
        with pytest.raises(urllib3.exceptions.HTTPError):
            page(router, known)
        renewed.configure_trust(known)
        assert page(router, known) == 200
        (tmp_path / "tls.crt").write_text("broken")
        assert page(router, known) == 200


def test_envoy_gets_picks_over_tls(tmp_path: Path) -> None:
    """An Envoy that trusts the router's own certificate gets picks over TLS."""
    with (
        fake_pods(2) as pods,
        running_router(
            write_pods(tmp_path / "pods.yaml", [pod.address for pod in pods]), tls=TlsOptions()
        ) as router,
    ):
        wait_until(lambda: len(ready_pods(router)) == 2 and router.health.ready, "pods")
        (tmp_path / "router.pem").write_bytes(shown_certificate(router))
        with envoy_over_tls(tmp_path, router, [("127.0.0.1", pod.port) for pod in pods]) as port:
            body = json.dumps({"model": TINY, "prompt": "hello " * 50}).encode()
            url = f"http://127.0.0.1:{port}/v1/completions"
            response = urllib3.request("POST", url, body=body, retries=False, timeout=300)
            assert (response.status, response.json()) == (200, {"ok": True})
            decision = router.decision_log.find(response.headers["x-request-id"])
            assert decision is not None
            assert response.headers["x-kvroute-pod"] == decision["pod"]


@contextmanager
def envoy_over_tls(directory: Path, router: RouterServer, pods: list[tuple[str, int]]) -> Iterator[int]:
    """Run an Envoy that calls this router by ext_proc; yield its port."""
    port = free_port()
    settings = EnvoySettings(
        gateway=("127.0.0.1", port),
        routers=[("127.0.0.1", router.ports["grpc"])],
        pods=pods,
        door="ext_proc",
    )
    config = patient(bootstrap(settings))
    (cluster,) = (one for one in config["static_resources"]["clusters"] if one["name"] == "router")
    # gRPC servers reject connections that do not negotiate HTTP/2, which health checks do not by default.
    cluster["health_checks"][0]["tls_options"] = {"alpn_protocols": ["h2"]}
    cluster["transport_socket"] = {
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": "localhost",
            "common_tls_context": {
                "validation_context": {
                    "trusted_ca": {"filename": str(directory / "router.pem")},
                    "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "localhost"}}],
                }
            },
        },
    }
    (directory / "envoy.json").write_text(json.dumps(config))
    command = [envoy_command(), "-c", str(directory / "envoy.json"), "--disable-hot-restart"]
    with subprocess.Popen([*command, "--log-level", "error", "--concurrency", "1"]) as process:
        try:
            wait_until(lambda: listens(port), "Envoy")
            yield port
        finally:
            process.terminate()
            process.wait(300)
