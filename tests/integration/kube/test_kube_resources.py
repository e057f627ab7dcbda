"""Objectives and model rewrites of a real API server take effect in a running router."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from router.config.kube import LLMD_GROUP, OLD_GROUP
from router.pods.kube import reflector as watch
from tests.support.kube.cluster_objects import Namespace, Picker, eventually, kube_router, rewritten
from tests.support.router.server import METRICS

OBJECTIVE = "x-llm-d-inference-objective"
SATURATED = METRICS.replace('waiting{engine="0"} 0.0', 'waiting{engine="0"} 50.0')


def passes(picker: Picker, objective: str) -> bool:
    """Return whether a request of an objective is routed while the pods are saturated."""
    return picker.pick(headers={OBJECTIVE: objective}) != "shed"


def test_objectives_are_followed(namespace: Namespace) -> None:
    """At saturation, requests of negative priority are shed; changes of the pool's objectives apply."""
    namespace.pool()
    one = namespace.pod("one", ready=False)
    one.metrics = SATURATED
    namespace.set_status("one")
    namespace.objective("batch", -1)
    namespace.objective("foreign", -1, pool="another")
    with kube_router(namespace.config()) as router, closing(Picker(router)) as picker:
        eventually(lambda: picker.pick() == one.address, "the pod is picked")
        eventually(lambda: not passes(picker, "batch"), "batch is shed")
        assert passes(picker, "foreign")
        assert passes(picker, "unknown")
        namespace.change("inferenceobjectives", "batch", {"priority": 5})
        eventually(lambda: passes(picker, "batch"), "priority raised")
        namespace.change("inferenceobjectives", "batch", {"priority": -5})
        eventually(lambda: not passes(picker, "batch"), "priority lowered")
        namespace.delete("inferenceobjectives", "batch")
        eventually(lambda: passes(picker, "batch"), "objective deleted")


def test_rewrites_are_followed(namespace: Namespace) -> None:
    """Created, changed and deleted rewrites of the router's pool apply at once."""
    namespace.pool()
    one = namespace.pod("one")
    with kube_router(namespace.config(), compat="answers") as router, closing(Picker(router)) as picker:
        eventually(lambda: picker.pick() == one.address, "the pod is picked")
        assert rewritten(router, "kvroute-tiny") == "kvroute-tiny"
        namespace.rewrite("foreign", "alias", "wrong", pool="another")
        namespace.rewrite("ours", "alias", "kvroute-tiny")
        eventually(lambda: rewritten(router, "alias") == "kvroute-tiny", "rewritten")
        # The older object wins; of objects created in one second, the first by name.
        one.models.append(("second", None))
        namespace.rewrite("theirs", "alias", "second")
        namespace.rewrite("whose", "other", "second")
        eventually(lambda: rewritten(router, "other") == "second", "the later rewrites are known")
        assert rewritten(router, "alias") == "kvroute-tiny"
        namespace.delete("inferencemodelrewrites", "ours")
        eventually(lambda: rewritten(router, "alias") == "second", "the next rewrite applies")
        target = {"targets": [{"modelRewrite": "kvroute-tiny"}]}
        namespace.change("inferencemodelrewrites", "theirs", {"rules": [target]})
        eventually(
            lambda: rewritten(router, "whatever") == "kvroute-tiny", "the rewrite applies to all models"
        )


def test_the_newer_groups_objects_replace_the_older_ones(
    own_namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once llm-d.ai's CRDs are installed, objectives of the older group no longer apply."""
    monkeypatch.setattr(watch, "ABSENT_S", 2.0)
    own_namespace.pool()
    one = own_namespace.pod("one", ready=False)
    one.metrics = SATURATED
    own_namespace.set_status("one")
    own_namespace.objective("batch", -1)
    with kube_router(own_namespace.config()) as router, closing(Picker(router)) as picker:
        eventually(lambda: picker.pick() == one.address, "the pod is picked")
        eventually(lambda: not passes(picker, "batch"), "batch is shed")
        folder = Path(os.environ["INFERENCE_EXTENSION_CRDS"])
        own_namespace.server.apply_definitions(
            folder, only="inferenceobjectives", changes={OLD_GROUP: LLMD_GROUP}
        )
        eventually(lambda: passes(picker, "batch"), "the old group's objective no longer applies")
        own_namespace.objective("batch", -1, group=LLMD_GROUP)
        eventually(lambda: not passes(picker, "batch"), "the new group's objective applies")
