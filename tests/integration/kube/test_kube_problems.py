"""Mistakes of an operator against a real API server: each gives one log line, one gauge and one Event."""

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
from tests.support.kube.cluster_objects import (
    POOL,
    Namespace,
    Picker,
    eventually,
    eventually_picked,
    kube_router,
    next_address,
)
from tests.support.router.server import FakePod, get


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the durations after which a symptom is a problem."""
    for name in ("SETTLING_S", "REFUSED_S", "UNLINKED_S", "API_DOWN_S"):
        monkeypatch.setattr(problems_module, name, 0.5)


def seen(router: RouterServer) -> dict[str, str]:
    """Return the text of all current problems by reason."""
    shown = json.loads(get(router, "/debug/discovery")[1])
    return {problem["reason"]: problem["detail"] for problem in shown["problems"]}


def gauge(router: RouterServer, reason: str) -> float:
    """Return the gauge of a reason."""
    line = f'kvroute_discovery_problem{{reason="{reason}"}} '
    page = get(router, "/metrics")[1].decode()
    return float(next(each for each in page.splitlines() if each.startswith(line)).rpartition(" ")[2])


def reported(
    router: RouterServer, namespace: Namespace, caplog: pytest.LogCaptureFixture, reason: Reason
) -> tuple[str, dict[str, Any]]:
    """Wait for a problem that has one log line and one Event; return its text and its Event."""
    eventually(lambda: reason in seen(router), reason)
    eventually(lambda: any(event["reason"] == reason for event in namespace.events()), f"Event {reason}")
    events = [event for event in namespace.events() if event["reason"] == reason]
    lines = [
        record
        for record in caplog.records
        if record.getMessage().startswith(f"discovery problem: reason={reason} ")
    ]
    assert (len(events), len(lines), gauge(router, reason)) == (1, 1, 1.0)
    detail = seen(router)[reason]
    assert events[0]["message"] == detail
    assert events[0]["type"] == "Warning"
    return detail, events[0]


def expect_ended(router: RouterServer, reason: Reason) -> None:
    """Wait until a problem has ended."""
    eventually(lambda: reason not in seen(router), f"{reason} is over")
    assert gauge(router, reason) == 0.0


def test_a_missing_pool(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong pool name is reported with the name; the router works once the pool is created."""
    one = namespace.pod("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, event = reported(router, namespace, caplog, Reason.POOL_NOT_FOUND)
        assert POOL in detail
        assert namespace.name in detail
        assert event["involvedObject"]["kind"] == "InferencePool"
        namespace.pool()
        eventually_picked(picker, one.address)
        expect_ended(router, Reason.POOL_NOT_FOUND)


def test_without_a_pool_events_are_about_the_routers_own_pod(
    namespace: Namespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pool, Events refer to the router's own pod if the downward API names it."""
    namespace.make_pod("epp", "127.0.0.1", labels={})
    monkeypatch.setenv("POD_NAME", "epp")
    monkeypatch.setenv("POD_NAMESPACE", namespace.name)
    with kube_router(namespace.config(namespace="")) as router:
        _, event = reported(router, namespace, caplog, Reason.POOL_NOT_FOUND)
        about = event["involvedObject"]
        pod = namespace.server.request("GET", f"/api/v1/namespaces/{namespace.name}/pods/epp")[1]
        assert (about["kind"], about["name"], about["uid"]) == ("Pod", "epp", pod["metadata"]["uid"])


@pytest.mark.parametrize("other_version", [False, True])
def test_a_missing_crd_or_version(
    bare_namespace: Namespace, caplog: pytest.LogCaptureFixture, other_version: bool
) -> None:
    """An InferencePool that is not served in the configured version is reported; installing the CRD helps."""
    folder = Path(os.environ["INFERENCE_EXTENSION_CRDS"])
    if other_version:
        changes = {"name: v1\n": "name: v1alpha9\n"}
        bare_namespace.server.apply_definitions(folder, only="k8s.io_inferencepools", changes=changes)
    one = bare_namespace.pod("one")
    with kube_router(bare_namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = reported(router, bare_namespace, caplog, Reason.CRD_MISSING)
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
        expect_ended(router, Reason.CRD_MISSING)


def test_pods_that_do_not_match_or_are_not_ready(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong label and pods that are not Ready have different reasons; their Events refer to the pool."""
    namespace.pool(selector={"app": "tpyo"})
    namespace.pod("one", ready=False)
    with kube_router(namespace.config()) as router:
        detail, event = reported(router, namespace, caplog, Reason.NO_PODS_MATCH)
        assert "app=tpyo" in detail
        path = f"/apis/{POOL_GROUP}/v1/namespaces/{namespace.name}/inferencepools/{POOL}"
        pool = namespace.server.request("GET", path)[1]
        assert event["involvedObject"]["uid"] == pool["metadata"]["uid"]
        namespace.pool()
        reported(router, namespace, caplog, Reason.PODS_NOT_READY)
        expect_ended(router, Reason.NO_PODS_MATCH)
        namespace.set_status("one")
        expect_ended(router, Reason.PODS_NOT_READY)


def test_an_invalid_selector(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """An invalid --endpoint-selector is reported with the selector and the API server's error."""
    config = namespace.config(selector="app in (a")
    with kube_router(config) as router:
        eventually(lambda: Reason.BAD_POOL in seen(router), "the problem")
        assert "invalid selector app in (a" in seen(router)[Reason.BAD_POOL]


def test_a_wrong_target_port(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """Ready pods without a listener at the target port are reported; correcting the port solves it."""
    namespace.pool(ports=[1])
    one = namespace.pod("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = reported(router, namespace, caplog, Reason.WRONG_TARGET_PORT)
        assert f"one ({one.host}:1)" in detail
        namespace.pool()
        eventually_picked(picker, one.address)
        expect_ended(router, Reason.WRONG_TARGET_PORT)


def test_a_pod_that_only_the_router_cannot_reach(
    namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused port that the pod's own readiness probe reaches is reported as PodUnreachable."""
    namespace.pool()
    address = next_address()
    namespace.make_pod("one", address, readiness_port=namespace.port)
    namespace.set_status("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = reported(router, namespace, caplog, Reason.POD_UNREACHABLE)
        assert f"one ({address}:{namespace.port}): connection refused" in detail
        assert Reason.WRONG_TARGET_PORT not in seen(router)
        one = namespace.servers["one"] = FakePod(namespace.port, address)
        eventually_picked(picker, one.address)
        expect_ended(router, Reason.POD_UNREACHABLE)


@pytest.mark.parametrize("says", [False, True])
def test_an_engine_without_events(namespace: Namespace, caplog: pytest.LogCaptureFixture, says: bool) -> None:
    """A pod without an events publisher is reported and still picked."""
    namespace.pool()
    one = namespace.pod("one", ready=False)
    if says:
        one.sources = {"0": {"enable_kv_cache_events": False}}
    namespace.set_status("one")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = reported(router, namespace, caplog, Reason.ENGINE_WITHOUT_EVENTS)
        assert ("KV events are off" if says else f"tcp://{one.host}:5557") in detail
        eventually_picked(picker, one.address)


def test_an_invalid_annotation(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """An invalid annotation is reported with pod and value, and ignored."""
    namespace.pool()
    one = namespace.pod("one", annotations={"kvroute.dev/kv-events-port": "many"})
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        detail, _ = reported(router, namespace, caplog, Reason.BAD_ANNOTATION)
        assert detail == "one: kvroute.dev/kv-events-port: must be a port of 1..65535, is 'many'"
        eventually_picked(picker, one.address)
        namespace.patch_pod("one", {"metadata": {"annotations": {"kvroute.dev/kv-events-port": "7000"}}})
        expect_ended(router, Reason.BAD_ANNOTATION)


@pytest.mark.parametrize("make", ["objective", "rewrite"])
def test_invalid_objectives_and_rewrites(
    namespace: Namespace, caplog: pytest.LogCaptureFixture, make: str
) -> None:
    """An invalid priority and partial weights are reported with the object's name."""
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
        detail, _ = reported(router, namespace, caplog, reason)
        assert detail.startswith("wrong: ")
        namespace.delete(f"inference{'objective' if make == 'objective' else 'modelrewrite'}s", "wrong")
        expect_ended(router, reason)


def test_rewrites_with_compat_off(namespace: Namespace, caplog: pytest.LogCaptureFixture) -> None:
    """With --compat off models are not rewritten, and existing rewrites are reported."""
    namespace.pool()
    namespace.rewrite("named", "alias", "kvroute-tiny")
    with kube_router(namespace.config()) as router:
        detail, _ = reported(router, namespace, caplog, Reason.BAD_REWRITE)
        assert "--compat answers" in detail


def test_an_invalid_pool_keeps_the_last_valid_one(
    own_namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool that is invalid here is reported, and the pods of its last valid state stay."""
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

        # The changed CRD takes a moment to become effective.
        eventually(spoiled, "the pool is invalid")
        detail, _ = reported(router, own_namespace, caplog, Reason.BAD_POOL)
        assert "targetPorts" in detail
        assert picker.picks() == {one.address}
