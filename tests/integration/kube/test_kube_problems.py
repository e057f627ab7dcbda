"""An operator's mistakes against a real API server: each gives one log line, a gauge and one Event."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from router.app.server import RouterServer
from router.config.kube import OLD_GROUP, POOL_GROUP
from router.pods.kube import problems as problems_module
from router.pods.kube.problems import Reason
from tests.integration.kube.kube_support import (
    POOL,
    Namespace,
    Picker,
    eventually,
    eventually_picked,
    kube_router,
    next_address,
)
from tests.integration.router_server_support import FakePod, get


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts a moment is a problem already, so that the tests need not wait for it."""
    for name in ("SETTLING_S", "REFUSED_S", "UNLINKED_S", "BLIP_S"):
        monkeypatch.setattr(problems_module, name, 0.5)


def seen(router: RouterServer) -> dict[str, str]:
    """All problems by reason, with what is wrong."""
    shown = json.loads(get(router, "/debug/discovery")[1])
    return {problem["reason"]: problem["detail"] for problem in shown["problems"]}


def gauge(router: RouterServer, reason: str) -> float:
    """The gauge of a reason."""
    line = f'kvroute_discovery_problem{{reason="{reason}"}} '
    page = get(router, "/metrics")[1].decode()
    return float(next(each for each in page.splitlines() if each.startswith(line)).rpartition(" ")[2])


def told(
    router: RouterServer, namespace: Namespace, caplog: pytest.LogCaptureFixture, reason: Reason
) -> tuple[str, dict[str, Any]]:
    """Waits for a problem; answers what is wrong and its Event, which is the only one, as is its log line."""
    eventually(lambda: reason in seen(router), reason)
    eventually(lambda: any(event["reason"] == reason for event in namespace.events()), f"Event {reason}")
    events = [event for event in namespace.events() if event["reason"] == reason]
    lines = [record for record in caplog.records if record.getMessage().startswith(f"{reason}: ")]
    assert (len(events), len(lines), gauge(router, reason)) == (1, 1, 1.0)
    detail = seen(router)[reason]
    assert events[0]["message"] == detail
    assert events[0]["type"] == "Warning"
    return detail, events[0]


def over(router: RouterServer, reason: Reason) -> None:
    """Waits until a problem is over."""
    eventually(lambda: reason not in seen(router), f"{reason} is over")
    assert gauge(router, reason) == 0.0


def test_a_pool_that_is_not_there(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong pool name is told with the name; the router serves as soon as the pool is made."""
    one = namespace.pod("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, event = told(router, namespace, caplog, Reason.POOL_NOT_FOUND)
        assert POOL in detail
        assert namespace.name in detail
        assert event["involvedObject"]["kind"] == "InferencePool"
        namespace.pool()
        eventually_picked(picker, one.address)
        over(router, Reason.POOL_NOT_FOUND)


def test_without_a_pool_events_are_about_the_routers_own_pod(
    namespace: Namespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the downward API tells our pod, its Events say what is wrong while there is no pool."""
    namespace.make_pod("epp", "127.0.0.1", labels={})
    monkeypatch.setenv("POD_NAME", "epp")
    monkeypatch.setenv("POD_NAMESPACE", namespace.name)
    with kube_router(namespace.config(namespace="")) as router:
        _, event = told(router, namespace, caplog, Reason.POOL_NOT_FOUND)
        about = event["involvedObject"]
        pod = namespace.server.request("GET", f"/api/v1/namespaces/{namespace.name}/pods/epp")[1]
        assert (about["kind"], about["name"], about["uid"]) == ("Pod", "epp", pod["metadata"]["uid"])


@pytest.mark.parametrize("other_version", [False, True])
def test_a_definition_that_is_missing_or_of_another_version(
    bare_namespace: Namespace, caplog: pytest.LogCaptureFixture, other_version: bool
) -> None:
    """Without InferencePool in the version that is read, the problem names that; installing it heals."""
    folder = Path(os.environ["INFERENCE_EXTENSION_CRDS"])
    if other_version:
        changes = {"name: v1\n": "name: v1alpha9\n"}
        bare_namespace.server.apply_definitions(folder, only="k8s.io_inferencepools", changes=changes)
    one = bare_namespace.pod("one")
    with kube_router(bare_namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = told(router, bare_namespace, caplog, Reason.CRD_MISSING)
        assert f"{POOL_GROUP}/v1" in detail
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencepools.{POOL_GROUP}"
        if other_version:
            bare_namespace.server.request("DELETE", path)
            eventually(
                lambda: bare_namespace.server.request("GET", path, check=False)[0] == 404, "it is gone"
            )
        bare_namespace.server.apply_definitions(folder, only="k8s.io_inferencepools")
        bare_namespace.pool()
        eventually_picked(picker, one.address)
        over(router, Reason.CRD_MISSING)


def test_pods_that_do_not_match_or_are_not_ready(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong label and pods that are not Ready are told apart; the Events are about the pool."""
    namespace.pool(selector={"app": "tpyo"})
    namespace.pod("one", ready=False)
    with kube_router(namespace.config()) as router:
        detail, event = told(router, namespace, caplog, Reason.NO_PODS_MATCH)
        assert "app=tpyo" in detail
        path = f"/apis/{POOL_GROUP}/v1/namespaces/{namespace.name}/inferencepools/{POOL}"
        pool = namespace.server.request("GET", path)[1]
        assert event["involvedObject"]["uid"] == pool["metadata"]["uid"]
        namespace.pool()
        told(router, namespace, caplog, Reason.PODS_NOT_READY)
        over(router, Reason.NO_PODS_MATCH)
        namespace.set_status("one")
        over(router, Reason.PODS_NOT_READY)


def test_a_selector_that_the_api_server_cannot_read(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake in --endpoint-selector is told with the selector and what the API server says of it."""
    config = namespace.config(selector="app in (a")
    with kube_router(config) as router:
        eventually(lambda: Reason.BAD_POOL in seen(router), "the problem")
        assert "the selector app in (a is refused" in seen(router)[Reason.BAD_POOL]


def test_a_wrong_target_port(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """Pods that are Ready while nothing listens at the pool's port are named; the right port heals."""
    namespace.pool(ports=[1])
    one = namespace.pod("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = told(router, namespace, caplog, Reason.WRONG_TARGET_PORT)
        assert f"one ({one.host}:1)" in detail
        namespace.pool()
        eventually_picked(picker, one.address)
        over(router, Reason.WRONG_TARGET_PORT)


def test_a_pod_that_only_the_router_does_not_reach(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused port that the pod's own readiness probe reaches is told as the router's being kept out."""
    namespace.pool()
    address = next_address()
    namespace.make_pod("one", address, readiness_port=namespace.port)
    namespace.set_status("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = told(router, namespace, caplog, Reason.POD_UNREACHABLE)
        assert f"one ({address}:{namespace.port}): connection refused" in detail
        assert Reason.WRONG_TARGET_PORT not in seen(router)
        one = namespace.servers["one"] = FakePod(namespace.port, address)
        eventually_picked(picker, one.address)
        over(router, Reason.POD_UNREACHABLE)


@pytest.mark.parametrize("says", [False, True])
def test_an_engine_without_events(namespace: Namespace, caplog: pytest.LogCaptureFixture, says: bool) -> None:
    """A pod that serves while nothing answers at its events' port, or that says so, is named and picked."""
    namespace.pool()
    one = namespace.pod("one", ready=False)
    if says:
        one.sources = {"0": {"enable_kv_cache_events": False}}
    namespace.set_status("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = told(router, namespace, caplog, Reason.ENGINE_WITHOUT_EVENTS)
        assert ("events are off" if says else f"tcp://{one.host}:5557") in detail
        eventually_picked(picker, one.address)


def test_an_annotation_that_is_not_understood(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """A bad annotation is named with pod and value, and passed over."""
    namespace.pool()
    one = namespace.pod("one", annotations={"kvroute.dev/kv-events-port": "many"})
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = told(router, namespace, caplog, Reason.BAD_ANNOTATION)
        assert detail == "one: kvroute.dev/kv-events-port: must be a port of 1..65535, is 'many'"
        eventually_picked(picker, one.address)
        namespace.patch_pod("one", {"metadata": {"annotations": {"kvroute.dev/kv-events-port": "7000"}}})
        over(router, Reason.BAD_ANNOTATION)


@pytest.mark.parametrize("make", ["objective", "rewrite"])
def test_objectives_and_rewrites_that_mean_nothing(
    namespace: Namespace, caplog: pytest.LogCaptureFixture, make: str
) -> None:
    """A priority that is none and weights for some targets only are told with the object's name."""
    namespace.pool()
    reason = Reason.BAD_OBJECTIVE if make == "objective" else Reason.BAD_REWRITE
    if make == "objective":
        namespace.objective("wrong", 1 << 40)
    else:
        targets = [{"modelRewrite": "a", "weight": 1}, {"modelRewrite": "b"}]
        spec = {"poolRef": {"name": POOL}, "rules": [{"targets": targets}]}
        namespace.make(
            OLD_GROUP, "v1alpha2", "InferenceModelRewrite", "inferencemodelrewrites", "wrong", spec
        )
    with kube_router(namespace.config(), compat="answers") as router:
        detail, _ = told(router, namespace, caplog, reason)
        assert detail.startswith("wrong: ")
        namespace.delete(f"inference{'objective' if make == 'objective' else 'modelrewrite'}s", "wrong")
        over(router, reason)


def test_rewrites_that_the_router_does_not_apply(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """With --compat off nothing is rewritten, and that there are rewrites is told."""
    namespace.pool()
    namespace.rewrite("named", "alias", "kvroute-tiny")
    with kube_router(namespace.config()) as router:
        detail, _ = told(router, namespace, caplog, Reason.BAD_REWRITE)
        assert "--compat answers" in detail


def test_a_pool_that_cannot_be_used_leaves_what_it_said_before(
    own_namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool that a laxer definition let through is a problem; the pods of its last good state stay."""
    own_namespace.pool()
    one = own_namespace.pod("one")
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencepools.{POOL_GROUP}"
    lax = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = own_namespace.server.request("GET", path)[1]
    versions = definition["spec"]["versions"]
    versions[0]["schema"]["openAPIV3Schema"] = lax
    own_namespace.server.request("PATCH", path, {"spec": {"versions": versions}})
    with kube_router(own_namespace.config()) as router, closing(Picker(router)) as picker:
        eventually_picked(picker, one.address)
        pool = f"/apis/{POOL_GROUP}/v1/namespaces/{own_namespace.name}/inferencepools/{POOL}"

        def spoiled() -> bool:
            change = {"spec": {"targetPorts": "8000"}}
            return own_namespace.server.request("PATCH", pool, change, check=False)[0] == 200

        # The laxer definition takes a moment to be in force.
        eventually(spoiled, "the pool is spoiled")
        detail, _ = told(router, own_namespace, caplog, Reason.BAD_POOL)
        assert "targetPorts" in detail
        assert picker.picks() == {one.address}
