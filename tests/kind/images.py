"""The images under test: Dockerfiles in; images in docker, and in every node of a cluster, out."""

from __future__ import annotations

from pathlib import Path

from tests.kind.cluster import Cluster, mounts_torch
from tests.kind.tools import ToolError, run

ROUTER = "kvroute/router:test"
MODEL_SERVER = "kvroute/model-server:test"
ENVOY = "kvroute/envoy:test"

ROOT = Path(__file__).parents[2]
_LOADED = "/var/lib/kvroute-images"


def build_images() -> None:
    """Builds the images with docker, which remembers every step that did not change."""
    # "kvroute/router:test" and so on.
    names = ("IMAGE_PREFIX=kvroute", "IMAGE_TAG=test")
    target = ("MODEL_SERVER_TARGET=without-torch",) if mounts_torch() else ()
    run("make", "--directory", str(ROOT), "images", "envoy-image", *names, *target)


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
