"""The images under test: Dockerfiles in; images in docker, and in every node of a cluster, out."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kind.cluster import Cluster, mounts_torch
from tests.kind.tools import ToolError, run

ROUTER = "kvroute/router:test"
MODEL_SERVER = "kvroute/model-server:test"
ENVOY = "kvroute/envoy:test"

ROOT = Path(__file__).parents[2]
_LOADED = "/var/lib/kvroute-images"
_ENVOY_DOCKERFILE = """\
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
COPY envoy /usr/local/bin/envoy
USER 10001:10001
ENTRYPOINT ["envoy"]
"""


def build_images() -> None:
    """Builds the images with docker, which remembers every step that did not change."""
    # "kvroute/router:test" and so on.
    names = ("IMAGE_PREFIX=kvroute", "IMAGE_TAG=test")
    target = ("MODEL_SERVER_TARGET=without-torch",) if mounts_torch() else ()
    run("make", "--directory", str(ROOT), "images", *names, *target)
    with TemporaryDirectory() as name:
        # The command `envoy` is a Python script that finds the real program in its package.
        shutil.copy(Path(sysconfig.get_path("platlib"), "envoy", "_bin", "envoy"), Path(name) / "envoy")
        (Path(name) / "Dockerfile").write_text(_ENVOY_DOCKERFILE)
        base = os.environ.get("PYTHON_BASE_IMAGE")
        arguments = ("--build-arg", f"BASE_IMAGE={base}") if base else ()
        run("docker", "build", "--tag", ENVOY, *arguments, name)


def load_images(cluster: Cluster) -> None:
    """Copies the images into the nodes, unless these very ones are there."""
    names = (ROUTER, MODEL_SERVER, ENVOY)
    wanted = " ".join(run("docker", "image", "inspect", "--format", "{{.Id}}", *names).split())
    try:
        loaded = cluster.in_node("cat", _LOADED).strip()
    except ToolError:
        loaded = ""
    if loaded != wanted:
        run("kind", "load", "docker-image", *names, "--name", cluster.name)
        cluster.in_node("sh", "-c", f"echo '{wanted}' > {_LOADED}")
