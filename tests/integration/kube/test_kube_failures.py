"""Router whose API server fails in different ways: the pool never becomes empty."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import router.pods.kube.source
from router.app.server import RouterServer
from router.pods.kube.client import Kind, KubeClient, WatchStream
from router.pods.kube.problems import Reason
from tests.support.kube.cluster_objects import (
    Namespace,
    Picker,
    eventually,
    eventually_picked,
    kube_router,
    problems,
)
from tests.support.kube.tap import Tap
from tests.support.router.server import get

_AGE = 'kvroute_discovery_contact_age_seconds{kind="pods"}'
# The API server accepts a token for a minute beyond its lifetime; 1 s is soon over.
_EXPIRED_S = -50.0
# Tolerance between the scrape and the clock reading.
_CLOCKS_S = 0.5


@contextmanager
def never_empty(picker: Picker) -> Iterator[None]:
    """Pick continuously; no pick may fail."""
    over, refusals = threading.Event(), []

    def pick() -> None:
        while not over.wait(0.02):
            if refusal := picker.refusal():
                refusals.append(refusal)

    thread = threading.Thread(target=pick)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not refusals


@contextmanager
def tapped(namespace: Namespace, **settings: Any) -> Iterator[tuple[Tap, Any]]:
    """Relay in front of the API server, and a configuration that connects through it."""
    tap = Tap(int(namespace.server.url.rpartition(":")[2]))
    try:
        token = namespace.server.kubeconfig.read_text().partition("token: ")[2].split()[0]
        file = namespace.server.directory / f"{namespace.name}.kubeconfig"
        server = f"https://127.0.0.1:{tap.port}"
        namespace.server.write_kubeconfig(file, {"token": token}, server=server)
        yield tap, namespace.config(kubeconfig=file, **settings)
    finally:
        tap.close()


def watch_of(router: RouterServer, kind: str = "pods") -> dict[str, Any]:
    """Return the state of a watch."""
    return dict(json.loads(get(router, "/debug/discovery")[1])["watches"][kind])


def router_heard_s(router: RouterServer) -> float:
    """Return when the watch of pods last received a response, in monotonic seconds."""
    page = get(router, "/metrics")[1].decode()
    age = next(line for line in page.splitlines() if line.startswith(_AGE))
    return time.monotonic() - float(age.rpartition(" ")[2])


def test_a_restarted_api_server_never_empties_the_pool(own_namespace: Namespace) -> None:
    """Pods stay while the API server is down; changes are applied once it is back."""
    own_namespace.pool()
    one, two = own_namespace.pod("one"), own_namespace.pod("two")
    with kube_router(own_namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address, two.address)
        with never_empty(picker):
            own_namespace.server.stop(kill=True)
            eventually(lambda: Reason.API_UNREACHABLE in problems(router), "the outage is reported")
            # While the other thread's pick is in flight, its pod is more loaded and not picked.
            eventually_picked(picker, one.address, two.address)
            own_namespace.server.start()
            own_namespace.delete_pod("two")
            three = own_namespace.pod("three")
            eventually_picked(picker, one.address, three.address)
        eventually(lambda: problems(router) == {}, "the problem has ended")
        page = get(router, "/metrics")[1].decode()
        assert 'kvroute_discovery_problem{reason="ApiUnreachable"} 0.0' in page


def test_changes_during_a_broken_connection_are_applied_by_one_list(namespace: Namespace) -> None:
    """After a broken connection one list brings all changes, and unchanged pods stay."""
    namespace.pool()
    one, two = namespace.pod("one"), namespace.pod("two")
    with tapped(namespace) as (tap, config), kube_router(config) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address, two.address)
        with never_empty(picker):
            tap.cut()
            namespace.delete_pod("two")
            again = namespace.pod("two")
            three = namespace.pod("three")
            tap.mend()
            eventually_picked(picker, one.address, again.address, three.address)


def test_a_frozen_connection_is_closed(namespace: Namespace) -> None:
    """A connection that is silent beyond the deadline is reconnected without losing a pod."""
    namespace.pool()
    one = namespace.pod("one")
    with (
        tapped(namespace, deadline_s=2.0) as (tap, config),
        kube_router(config) as router,
        closing(Picker(router)) as picker,
    ):
        eventually_picked(picker, one.address)
        with never_empty(picker):
            tap.freeze()
            two = namespace.pod("two")
            eventually_picked(picker, one.address, two.address)


def test_a_quiet_watch_is_continued(namespace: Namespace) -> None:
    """Without changes, watches end and continue without a new list or a problem."""
    namespace.pool()
    one = namespace.pod("one")
    config = namespace.config(deadline_s=2.0)
    with kube_router(config) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        before, heard_s = watch_of(router)["lists"], router_heard_s(router)
        for _ in range(3):
            eventually(lambda known=heard_s: router_heard_s(router) > known + _CLOCKS_S, "a watch's end")
            heard_s = router_heard_s(router)
        assert problems(router) == {}
        two = namespace.pod("two")
        eventually_picked(picker, one.address, two.address)
        assert watch_of(router)["lists"] == before


class _Forgetful(KubeClient):
    """Client whose first watch of pods starts at an expired version."""

    forgot = False

    def watch(self, kind: Kind, version: str, *, lasts_s: float, silent_s: float) -> WatchStream:
        if kind.plural == "pods" and not self.forgot:
            self.forgot, version = True, "1"
        return super().watch(kind, version, lasts_s=lasts_s, silent_s=silent_s)


def test_an_expired_version_causes_a_new_list(
    own_namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 410 after etcd's compaction causes a list and is no problem."""
    monkeypatch.setattr(router.pods.kube.source, "KubeClient", _Forgetful)
    own_namespace.pool()
    one = own_namespace.pod("one")
    own_namespace.server.forget_history()
    own_namespace.server.stop()
    own_namespace.server.start()
    with kube_router(own_namespace.config()) as started, closing(Picker(started)) as picker:
        eventually(lambda: watch_of(started)["lists"].get("gone") == 1, "the list after 410")
        eventually_picked(picker, one.address)
        two = own_namespace.pod("two")
        eventually_picked(picker, one.address, two.address)
        assert problems(started) == {}


def test_an_expired_token_is_reloaded(namespace: Namespace, tmp_path: Path) -> None:
    """After a rejected token the kubeconfig is read again, and the pods stay."""
    namespace.pool()
    one = namespace.pod("one")
    namespace.account()
    namespace.grant()
    token = tmp_path / "token"
    token.write_text(namespace.server.token(namespace.name, "router", lives_s=_EXPIRED_S))
    kubeconfig = namespace.server.write_kubeconfig(tmp_path / "kubeconfig", {"tokenFile": str(token)})
    config = namespace.config(kubeconfig=kubeconfig, deadline_s=2.0)
    with kube_router(config) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        with never_empty(picker):
            eventually(lambda: Reason.FORBIDDEN in problems(router), "the token's end")
            token.write_text(namespace.server.token(namespace.name, "router", lives_s=3600.0))
            two = namespace.pod("two")
            eventually_picked(picker, one.address, two.address)
        eventually(lambda: problems(router) == {}, "the problem has ended")


def test_rights_granted_later_take_effect(namespace: Namespace, tmp_path: Path) -> None:
    """Missing rights are a problem without an Event; once granted, the router works without a restart."""
    namespace.pool()
    one = namespace.pod("one")
    namespace.account()
    token = namespace.server.token(namespace.name, "router", lives_s=3600.0)
    kubeconfig = namespace.server.write_kubeconfig(tmp_path / "kubeconfig", {"token": token})
    with kube_router(namespace.config(kubeconfig=kubeconfig)) as router, closing(Picker(router)) as picker:
        eventually(lambda: Reason.FORBIDDEN in problems(router), "the rejection is reported")
        assert "inferencepools" in problems(router)[Reason.FORBIDDEN]
        assert 'kvroute_discovery_problem{reason="Forbidden"} 1.0' in get(router, "/metrics")[1].decode()
        assert get(router, "/ready")[0] == 503
        assert namespace.events() == []
        namespace.grant(without=["pods"])
        eventually(lambda: "pods" in problems(router).get(Reason.FORBIDDEN, "none"), "one right is missing")
        eventually(lambda: namespace.events() != [], "an Event")
        assert {event["reason"] for event in namespace.events()} == {"Forbidden"}
        namespace.grant()
        eventually_picked(picker, one.address)
        eventually(lambda: problems(router) == {}, "the problem has ended")
