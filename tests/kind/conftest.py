"""A kind cluster for the tests beside this file, or a printed reason why there is none.

Needs docker, kind, kubectl and helm on PATH. KIND_NODE_IMAGE and KIND_CONFIG choose the node image and the
cluster's configuration; without them kind takes its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CLUSTER = "kvroute-test"
TOOLS = ("docker", "kind", "kubectl", "helm")


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Path of a kubeconfig for a fresh cluster, which is deleted at the end."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} on PATH")
    docker = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if docker.returncode != 0:
        pytest.skip(f"needs a running docker daemon: {docker.stderr.strip().splitlines()[-1:]}")
    path = tmp_path_factory.mktemp("kind") / "kubeconfig"
    chosen = [("--image", os.environ.get("KIND_NODE_IMAGE")), ("--config", os.environ.get("KIND_CONFIG"))]
    options = [part for option, value in chosen if value for part in (option, value)]
    name = ["--name", CLUSTER, "--kubeconfig", str(path)]
    subprocess.run(["kind", "create", "cluster", *name, *options, "--wait", "180s"], check=True)
    try:
        yield path
    finally:
        subprocess.run(["kind", "delete", "cluster", *name], check=True)
