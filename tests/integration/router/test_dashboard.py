"""The dashboard in a real browser: content, live updates, tokens, reconnection, keyboard, screen reader."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.app.dashboard import Watch
from router.app.debug_pages import DebugServer, MetricsAuth, Page
from router.app.server import RouterServer
from tests.support.indexer.engine_publisher import EnginePublisher
from tests.support.loopback import free_port
from tests.support.router import browser
from tests.support.router.bench import TINY, Bench, completion, long_text, ready_pod
from tests.support.router.browser import browser_page
from tests.support.router.doors import wait_until
from tests.support.router.server import fake_pods, ready_pods, running_router

MARKUP = "<img src=x onerror=document.title='run'>"
ROWS = "document.querySelectorAll('#picks tbody tr:not(.detail)').length"
STATE = "document.getElementById('state').textContent"
BREAK = {"message": 0, "part": "system", "offset_tokens": 32, "lost_tokens": 64, "lost_s": 0.5}
FUNNEL = {
    "models": {
        MARKUP: {
            "prompt_tokens": 100,
            "cacheable": 80,
            "cached_in_fleet": 70,
            "cached_on_pod": 60,
            "predicted": 60,
            "delivered": 29,
            "delivered_of_prompt_tokens": 50,
        }
    },
    "causes": {MARKUP: {"hit": 60, "never_cached": 40}},
}


@pytest.fixture
def page(tmp_path: Path) -> Iterator[browser.Page]:
    """Return a tab of a browser; what it reports as a problem fails the test."""
    with browser_page(tmp_path) as tab:
        tab.emulate(dark=False)
        yield tab
        assert tab.problems == []


@contextmanager
def router_of_three(directory: Path, **settings: Any) -> Iterator[RouterServer]:
    """Run a router with three pods, of which only pod-0 publishes events."""
    with fake_pods(3) as pods, EnginePublisher() as engine:
        events = {
            "kvroute.io/kv-events-port": str(engine.events_port),
            "kvroute.io/kv-replay-port": str(engine.replay_port),
        }
        endpoints = [
            {"name": f"pod-{number}", "address": "127.0.0.1", "port": str(pod.port)}
            | {"labels": {"kvroute.io/model": TINY} | (events if number == 0 else {})}
            for number, pod in enumerate(pods)
        ]
        path = directory / "pods.yaml"
        path.write_text(json.dumps({"endpoints": endpoints}))
        with running_router(path, **settings) as router:
            wait_until(lambda: len(ready_pods(router)) == 3, "the pods")
            yield router


def url(port: int) -> str:
    """Return the page's address."""
    return f"http://127.0.0.1:{port}/"


def pick(router: RouterServer, request_id: str, text: str) -> None:
    """Have the router pick a pod for a prompt."""
    router.router.route(completion(request_id, text), time.monotonic())


def test_pods_and_decisions_are_shown_as_they_come(tmp_path: Path, page: browser.Page) -> None:
    """The page shows each pod with its view and each pick, those before it was opened and new ones."""
    text = long_text(200)
    with router_of_three(tmp_path) as router:
        pick(router, "first", text)
        page.go(url(router.ports["metrics"]))
        page.wait(f"{STATE} === '● Live'", "the stream")
        page.wait(
            f"{ROWS} === 1 && document.querySelectorAll('#pods tbody tr').length === 3", "the first pick"
        )
        page.wait("/pod-0.*● EXACT/s.test(document.getElementById('pods').innerText)", "pod-0 EXACT")
        pick(router, "second", text)
        page.wait(f"{ROWS} === 2", "the second pick")
        page.run("document.querySelector('#picks tbody button').click()")
        page.wait("document.querySelectorAll('.detail tbody tr').length === 3", "the candidates")
        record = router.decision_log.find("second")
        assert record is not None
        blocks = -(-record["prompt_tokens"] // 16)
        assert page.run("document.querySelectorAll('.detail .blocks i').length") == blocks
        assert page.run("document.querySelectorAll('.detail .blocks :is(.here, .elsewhere)').length") > 0
        assert "cached" in page.text(".detail h3")
        for part in ("Queue", "Prefill", "Copy", "Pressure"):
            assert part in page.text(".detail table")


def test_a_lost_router_is_shown_and_found_again(tmp_path: Path, page: browser.Page) -> None:
    """Without its router the page says so and fades; it goes on with the next router at the port."""
    port = free_port()
    with router_of_three(tmp_path, metrics_port=port):
        page.go(url(port))
        page.wait(f"{STATE} === '● Live'", "the stream")
    page.wait(f"{STATE}.startsWith('▲ Disconnected')", "the loss")
    assert page.run("document.body.classList.contains('offline')")
    with router_of_three(tmp_path, metrics_port=port) as router:
        page.wait(f"{STATE} === '● Live'", "the next router")
        before = page.run(ROWS)
        pick(router, "after", long_text(20))
        page.wait(f"{ROWS} > {before}", "its picks")


class Reviewer:
    """Cluster that accepts the token "known" only."""

    def review(self, kind: str, spec: dict[str, Any]) -> bytes:
        known = spec.get("token", "known") == "known"
        return json.dumps({"status": {"authenticated": known, "allowed": known}}).encode()


@contextmanager
def pages_of(bench: Bench, pages: dict[str, Page], **settings: Any) -> Iterator[int]:
    """Run a metrics port with these pages and the bench's decisions; yields the port."""
    pods = b'{"pods": []}'
    all_pages: dict[str, Page] = {
        "/ready": lambda _: (200, {"status": "ready"}),
        "/debug/decisions": lambda query: (
            200,
            {"decisions": [bench.decision_log.find(query["request_id"]) or {}] if query else []},
        ),
    }
    server = DebugServer(
        "127.0.0.1",
        0,
        CollectorRegistry(),
        all_pages | pages,
        watch=lambda: Watch(bench.decision_log, lambda: pods),
        **settings,
    )
    with ExitStack() as closing:
        server.start()
        closing.callback(server.close)
        yield server.port


def test_a_token_is_asked_for_and_used(page: browser.Page) -> None:
    """With authorization, the page shows nothing until a token is entered that the cluster accepts."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000"))
    bench.router.route(completion("r", "some text"), 0.0)
    with pages_of(bench, {}, authorize=MetricsAuth(Reviewer())) as port:  # type: ignore[arg-type]
        page.go(url(port))
        page.wait(f"{STATE} === 'This router asks for a token'", "the question")
        for token in ("wrong", "known"):
            assert page.run(ROWS) == 0
            page.wait("document.activeElement.id === 'token'", "the field in focus")
            page.call("Input.insertText", text=token)
            page.press("Enter", 13, "\r")
            page.wait("document.getElementById('token').value === ''", "the token sent")
            page.wait(f"!{STATE}.startsWith('Connecting')", "the answer")
        page.wait(f"{STATE} === '● Live' && {ROWS} === 1", "the picks")


def test_panels_follow_the_pages_that_exist(page: browser.Page) -> None:
    """A panel is shown if the router has its page, hidden if not; foreign names are never markup."""
    bench = Bench().with_pods(ready_pod("10.0.0.1:8000", model=MARKUP))
    with pages_of(bench, {"/debug/funnel": lambda _: (200, FUNNEL)}) as port:
        page.go(url(port))
        page.wait("!document.querySelector('[data-page=funnel]').hidden", "the funnel")
        text = page.text("[data-page=funnel]")
        assert MARKUP in text
        assert "58 %" in text
        for panel in ("worth", "prefixes", "prefix_breaks", "peers"):
            assert page.run(f"document.querySelector('[data-page={panel}]').hidden")
        assert page.run("document.querySelectorAll('img').length") == 0


def test_a_screen_reader_and_a_keyboard_suffice(tmp_path: Path, page: browser.Page) -> None:
    """Landmarks, headers, names and states are exposed, and Enter on a pick unfolds it."""
    page.emulate(dark=True, calm=True)
    with router_of_three(tmp_path) as router:
        pick(router, "r", long_text(100))
        page.go(url(router.ports["metrics"]))
        page.wait(f"{ROWS} === 1 && document.querySelectorAll('#pods tbody tr').length === 3", "the content")
        nodes = page.accessible()
        roles = [role for role, _ in nodes]
        assert {"banner", "main", "status", "table", "columnheader", "rowheader"} <= {*roles}
        regions = {name for role, name in nodes if role == "region"}
        assert {"Fleet", "Pods", "Live decisions"} <= regions
        assert all(name for role, name in nodes if role in ("button", "image", "img", "textbox", "region"))
        page.run("document.getElementById('pause').focus()")
        for element in ("#decisions .scroll", "#picks tbody button"):
            page.press("Tab", 9)
            assert page.run(f"document.activeElement.matches('{element}:focus-visible')")
            assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
        page.press("Enter", 13, "\r")
        page.wait("document.querySelector('#picks tbody button').ariaExpanded === 'true'", "the details")
        assert page.run("getComputedStyle(document.querySelector('main')).transitionDuration") == "0s"
