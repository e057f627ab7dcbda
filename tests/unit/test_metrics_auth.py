"""Authorisation of the metrics port by the cluster, with a cache; against an HTTP API server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from router.app.debug_pages import MetricsAuth
from router.config.kube import KubeConfig
from router.pods.kube.client import KubeClient
from tests.integration.router_server_support import fake_pods, running_router, write_pods

PATHS = {
    "/apis/authentication.k8s.io/v1/tokenreviews": "TokenReview",
    "/apis/authorization.k8s.io/v1/subjectaccessreviews": "SubjectAccessReview",
}


class ApiServer(ThreadingHTTPServer):
    """API server that answers reviews with 201 and the object with its status.

    Attributes:
        users: User by token.
        allowed: Users that may get /metrics.
        asked: Kinds and specs of all reviews.
        status: HTTP status of the responses to reviews.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.users = {"prometheus-token": "prometheus", "nobody-token": "nobody"}
        self.allowed = {"prometheus"}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status = 201

    def reviewed(self, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Return the status of a review."""
        self.asked.append((kind, spec))
        if kind == "TokenReview":
            user = self.users.get(spec["token"])
            named = {"username": user, "uid": "u", "groups": ["g"], "extra": {"e": ["x"]}}
            return {"authenticated": user is not None, "user": named if user else {}}
        told = spec["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"allowed": told and spec["user"] in self.allowed and spec["groups"] == ["g"]}


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert PATHS[self.path] == review["kind"]
        review["status"] = self.server.reviewed(review["kind"], review["spec"])
        data = json.dumps(review).encode()
        self.send_response(self.server.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def api_server(directory: Path) -> Iterator[tuple[ApiServer, Path]]:
    """Yield a running API server and a kubeconfig for it."""
    server = ApiServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "ours"}}],
    }
    (directory / "kubeconfig").write_text(yaml.safe_dump(config))
    try:
        yield server, directory / "kubeconfig"
    finally:
        server.shutdown()
        server.server_close()


def refusal(auth: MetricsAuth, path: str, authorization: str | None) -> int | None:
    """Return the status of a rejected request, or None."""
    return asyncio.run(auth.refusal(path, authorization))


def test_the_cluster_decides_by_token(tmp_path: Path) -> None:
    """An unknown token gives 401, an unauthorised one 403, and an authorised one the page."""
    with api_server(tmp_path) as (server, kubeconfig):
        auth = MetricsAuth(KubeClient(kubeconfig))
        for header in (None, "", "Basic abc", "Bearer ", "Bearer " + "x" * 20_000):
            assert refusal(auth, "/metrics", header) == 401
        assert server.asked == []
        assert refusal(auth, "/metrics", "Bearer unknown") == 401
        assert refusal(auth, "/metrics", "Bearer nobody-token") == 403
        assert refusal(auth, "/metrics", "bearer prometheus-token") is None
        assert refusal(auth, "/debug/pods", "Bearer prometheus-token") == 403


def test_decisions_are_cached(tmp_path: Path) -> None:
    """A grant is cached for a minute and a rejection for ten seconds."""
    now_s = 0.0
    with api_server(tmp_path) as (server, kubeconfig):
        auth = MetricsAuth(KubeClient(kubeconfig), clock=lambda: now_s)
        for _ in range(3):
            assert refusal(auth, "/metrics", "Bearer prometheus-token") is None
            assert refusal(auth, "/metrics", "Bearer nobody-token") == 403
        assert len(server.asked) == 4
        server.allowed = {"nobody"}
        now_s = 11.0
        assert refusal(auth, "/metrics", "Bearer nobody-token") is None
        assert refusal(auth, "/metrics", "Bearer prometheus-token") is None
        now_s = 61.0
        assert refusal(auth, "/metrics", "Bearer prometheus-token") == 403


@pytest.mark.parametrize("status", [403, 500])
def test_an_unreachable_cluster_rejects_new_tokens(tmp_path: Path, status: int) -> None:
    """Without an answer of the cluster a request gets 503, which is not cached."""
    with api_server(tmp_path) as (server, kubeconfig):
        auth = MetricsAuth(KubeClient(kubeconfig))
        server.status = status
        assert refusal(auth, "/metrics", "Bearer prometheus-token") == 503
        server.status = 201
        assert refusal(auth, "/metrics", "Bearer prometheus-token") is None


def test_the_routers_pages_are_protected(tmp_path: Path) -> None:
    """Metrics and debug pages require a token; probes do not."""
    with (
        api_server(tmp_path) as (_, kubeconfig),
        fake_pods(0),
        running_router(
            write_pods(tmp_path / "pods.yaml", []),
            metrics_auth=True,
            kube=KubeConfig(kubeconfig=kubeconfig),
        ) as router,
        urllib3.PoolManager(retries=False) as http,
    ):

        def status(path: str, token: str = "") -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return http.request(
                "GET", f"http://127.0.0.1:{router.ports['metrics']}{path}", headers=headers
            ).status

        assert [status(path) for path in ("/metrics", "/debug/pods", "/debug/pprof/profile")] == [401] * 3
        assert status("/healthz") == 200
        assert status("/metrics", "prometheus-token") == 200
        assert status("/debug/pods", "prometheus-token") == 403
