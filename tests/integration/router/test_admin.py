"""Administration of a router: cache resets that are proven by events, and pods without Kubernetes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3

from indexer import IndexerConfig
from router.app.server import RouterServer
from tests.integration.router.test_tenant_salts import write_pods
from tests.support.model_server.http import MODEL, running_server
from tests.support.router.bench import TOKENIZER, long_text
from tests.support.router.doors import wait_until
from tests.support.router.server import fake_pods, get, ready_pods, running_router
from tests.support.router.server import write_pods as write_fake_pods

TOKEN = "s3cret"
TEXT = long_text(100)
QUICK = IndexerConfig(bootstrap_s=1.0, admin_token=TOKEN)


def ask(
    router: RouterServer, method: str, path: str, body: object = None, token: str | None = TOKEN
) -> tuple[int, Any]:
    """Send an administration request; return status and JSON value."""
    url = f"http://127.0.0.1:{router.ports['metrics']}{path}"
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    response = urllib3.request(method, url, body=raw, headers=headers, retries=False, timeout=300)
    return response.status, json.loads(response.data)


def cached(router: RouterServer, pod: str) -> int:
    """Return the blocks of `TEXT` in a pod's view."""
    keys = router.index.block_keys(MODEL, TOKENIZER.encode(TEXT))
    match = router.index.match(keys, [pod])
    return int(match.cached_blocks[match.rows[pod]])


@contextmanager
def router_of(path: Path, **settings: Any) -> Iterator[RouterServer]:
    """Run a router with an administration token."""
    with running_router(path, **{"index": QUICK, **settings}) as router:
        yield router


def test_one_call_resets_all_caches_and_proves_it(tmp_path: Path) -> None:
    """The answer comes once each pod has published its reset, and a pod with running requests is named."""
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(admin_token=TOKEN)) for _ in range(2)]
        admins = [server.admin_url.rpartition(":")[2] for server in servers]
        path = write_pods(tmp_path / "pods.yaml", servers, admins)
        router = stack.enter_context(router_of(path))
        wait_until(lambda: len(ready_pods(router)) == 2 and get(router, "/ready")[0] == 200, "readiness")
        pods = [server.url.removeprefix("http://") for server in servers]
        for server, pod in zip(servers, pods, strict=True):
            server.post("/v1/completions", {"model": MODEL, "prompt": TEXT, "max_tokens": 1})
            wait_until(lambda pod=pod: cached(router, pod) > 4, "the view")
        assert ask(router, "POST", "/reset_prefix_cache") == (
            200,
            {"pods": 2, "proven": True, "not_proven": {}, "failed": {}},
        )
        assert [cached(router, pod) for pod in pods] == [0, 0]
        assert set(router.index.states().values()) == {"EXACT"}
        told = {"model": MODEL, "prompt": TEXT, "max_tokens": 4000, "ignore_eos": True}
        long = threading.Thread(target=lambda: servers[0].post("/v1/completions", told))
        long.start()
        wait_until(lambda: not servers[0].idle(), "a running request")
        status, answer = ask(router, "POST", "/reset_prefix_cache")
        servers[0].http.clear()
        assert (status, answer["proven"], list(answer["failed"])) == (502, False, [pods[0]])
        assert "requests are running" in answer["failed"][pods[0]]
        long.join()


def test_a_pod_without_events_is_not_proven(tmp_path: Path) -> None:
    """Pods that publish nothing are named at once, and those without the engine's page have failed."""
    with fake_pods(1) as (one,), router_of(write_fake_pods(tmp_path / "p", [one.address])) as router:
        wait_until(lambda: ready_pods(router) == {one.address}, "readiness")
        assert ask(router, "POST", "/reset_prefix_cache?timeout=120") == (
            200,
            {
                "pods": 1,
                "proven": False,
                "not_proven": {one.address: "its events are not received"},
                "failed": {},
            },
        )
        assert [json.loads(body).get("max_tokens") for body in one.bodies if body] == [1]
        assert all("authorization" not in seen for seen in one.seen)
        one.stop()
        status, answer = ask(router, "POST", "/reset_prefix_cache")
        assert (status, list(answer["failed"])) == (502, [one.address])
        one.restart()


def test_pods_are_registered_and_removed(tmp_path: Path) -> None:
    """A registered pod becomes ready beside those of the file, and is gone after its removal."""
    with fake_pods(2) as (one, two), router_of(write_fake_pods(tmp_path / "p", [one.address])) as router:
        url = f"http://localhost:{two.port}"
        listed = {"workers": [{"url": f"http://{two.address}", "name": f"localhost:{two.port}"}]}
        assert ask(router, "POST", "/workers", {"url": url}) == (200, listed)
        assert ask(router, "GET", "/workers") == (200, listed)
        wait_until(lambda: ready_pods(router) == {one.address, two.address}, "both pods")
        assert ask(router, "DELETE", "/workers", {"url": url}) == (200, {"workers": []})
        assert ask(router, "DELETE", "/workers", {"url": url})[0] == 409
        wait_until(lambda: list(router.pods.current) == [one.address], "the removal")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/workers", b"", 400),
        ("POST", "/workers", b"[1]", 400),
        ("POST", "/workers", b"[" * 60_000, 400),
        ("POST", "/workers", b"x" * 1_048_577, 413),
        ("POST", "/workers", {"url": 7}, 400),
        ("POST", "/workers", {"url": "https://127.0.0.1:1"}, 400),
        ("POST", "/workers", {"url": "http://127.0.0.1"}, 400),
        ("POST", "/workers", {"url": "http://127.0.0.1:99999"}, 400),
        ("POST", "/workers", {"url": "http://no-such-host.invalid:1"}, 400),
        ("POST", "/workers", {"url": "http://127.0.0.1:1", "labels": {"kvroute.io/kv-ranks": "x"}}, 400),
        ("POST", "/workers", {"url": "http://" + "x" * 60_000 + ":1"}, 400),
        ("PUT", "/workers", None, 405),
        ("GET", "/reset_prefix_cache", None, 405),
        ("POST", "/reset_prefix_cache?timeout=nan", None, 400),
        ("POST", "/reset_prefix_cache?timeout=x", None, 400),
        ("POST", "/metrics", None, 405),
    ],
)
def test_hostile_requests_get_an_error(
    served: RouterServer, method: str, path: str, body: object, status: int
) -> None:
    """Bodies, URLs and methods that are wrong get an error that says so."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.ports["metrics"])) as client:
        client.sendall(head.encode() + raw[:65_000])
        assert client.recv(12) == f"HTTP/1.1 {status}".encode()


@pytest.mark.parametrize("token", [None, "", "s3cre", "s3cret2", "x" * 20_000])
def test_a_wrong_token_is_rejected(served: RouterServer, token: str | None) -> None:
    """Without the right token nothing is listed or changed."""
    for method, path in (("GET", "/workers"), ("POST", "/reset_prefix_cache")):
        assert ask(served, method, path, token=token)[0] == 401


def test_without_a_configured_token_there_is_no_administration(tmp_path: Path) -> None:
    """A router without an administration token rejects all calls."""
    with running_router(write_fake_pods(tmp_path / "p", [])) as router:
        assert ask(router, "GET", "/workers", token="")[0] == 403


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterServer]:
    """Run a router without pods."""
    with router_of(write_fake_pods(tmp_path_factory.mktemp("admin") / "p", [])) as router:
        yield router
