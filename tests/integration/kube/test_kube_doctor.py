"""`kvroute doctor --namespace` against a real API server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvroute.cli import main
from tests.support.kube.cluster_objects import POOL, Namespace

pytestmark = pytest.mark.timeout(600)


def findings(
    capsys: pytest.CaptureFixture[str], namespace: Namespace
) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor; return its exit status and the findings by check."""
    status = main(["doctor", "--json", "--namespace", namespace.name])
    return status, {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


def test_rights_pool_and_pods_are_judged(
    namespace: Namespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool without pods fails, one whose pods are not Ready too, and a Ready pod mends it."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.server.kubeconfig))
    assert findings(capsys, namespace)[1]["pool"]["status"] == "warn"
    namespace.pool()
    status, found = findings(capsys, namespace)
    assert (status, found["rbac"]["status"], found["event"]["status"]) == (1, "ok", "ok")
    assert "correct spec.selector" in found["pool"]["remedy"]
    namespace.pod("model-0", ready=False, serves=False)
    assert "readiness probes" in findings(capsys, namespace)[1]["pool"]["remedy"]
    namespace.set_status("model-0")
    status, found = findings(capsys, namespace)
    assert status == 0
    assert found["pool"]["what"] == f"{POOL} selects 1 pods by app=llm, 1 of them Ready"


def test_a_missing_definition_of_pools_is_named(
    bare_namespace: Namespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server without InferencePool fails, with what to install or to use instead."""
    monkeypatch.setenv("KUBECONFIG", str(bare_namespace.server.kubeconfig))
    status, found = findings(capsys, bare_namespace)
    assert status == 1
    assert "install the CRDs" in found["cluster"]["remedy"]


def test_missing_rights_are_named(
    namespace: Namespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An account without a Role fails with the verbs that it lacks."""
    server, name = namespace.server, namespace.name
    accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
    server.request("POST", accounts, {"metadata": {"name": "router"}})
    token = server.token(name, "router", 600.0)
    monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig", {"token": token})))
    status, found = findings(capsys, namespace)
    assert status == 1
    assert "list pods, watch pods" in found["rbac"]["what"]
    assert name in found["rbac"]["remedy"]
    assert "the router's account" in found["cluster"]["remedy"]


def test_a_cluster_that_does_not_answer_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without credentials the check fails, with where they come from."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    assert main(["doctor", "--namespace", "llm"]) == 1
    assert "set KUBECONFIG" in capsys.readouterr().out
