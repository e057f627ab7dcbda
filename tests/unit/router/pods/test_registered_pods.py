"""Pods that are registered besides those of the pods file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from router.pods.pod_set import PodsFile
from tests.support.router.bench import entry

FILE = 'endpoints: [{name: a, address: 10.0.0.1, port: "8000"}]'


def test_registered_pods_are_declared_with_those_of_the_file(tmp_path: Path) -> None:
    """Each registration or removal is one change; a registered pod replaces the file's at its address."""
    path = tmp_path / "pods.yaml"
    path.write_text(FILE)
    source = PodsFile(path)
    assert [pod.pod for pod in source.changed() or ()] == ["10.0.0.1:8000"]
    assert source.changed() is None
    assert source.register(entry("10.0.0.2:8000"))
    assert source.register(replace(entry("10.0.0.1:8000"), name="ours"))
    assert [(pod.pod, pod.name) for pod in source.changed() or ()] == [
        ("10.0.0.1:8000", "ours"),
        ("10.0.0.2:8000", "pod-8000"),
    ]
    path.write_text("endpoints: []")
    assert len(source.changed() or ()) == 2
    assert source.register(entry("10.0.0.1:8000"), remove=True)
    assert not source.register(entry("10.0.0.1:8000"), remove=True)
    assert [pod.pod for pod in source.changed() or ()] == ["10.0.0.2:8000"]


def test_registered_pods_are_bounded(tmp_path: Path) -> None:
    """The 1,025th pod is rejected; a known one may be registered again."""
    path = tmp_path / "pods.yaml"
    path.write_text(FILE)
    source = PodsFile(path)
    accepted = [source.register(entry(f"10.0.0.2:{port}")) for port in range(1, 1026)]
    assert accepted == [True] * 1024 + [False]
    assert source.register(entry("10.0.0.2:1"))
    assert len(source.registered) == 1024
