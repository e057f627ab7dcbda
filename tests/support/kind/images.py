"""The images under test: built by docker and loaded into every node."""

from __future__ import annotations

from tests.support.kind.cluster import Cluster, mounts_torch
from tests.support.kind.tools import ToolError, run
from tests.support.paths import ROOT

ROUTER = "kvroute/router:test"
MODEL_SERVER = "kvroute/model-server:test"
ENVOY = "kvroute/envoy:test"

_LOADED = "/var/lib/kvroute-images"


def build_images() -> None:
    """Build the images with docker, which caches unchanged steps."""
    # "kvroute/router:test" and so on.
    names = ("IMAGE_PREFIX=kvroute", "IMAGE_TAG=test")
    target = ("MODEL_SERVER_TARGET=without-torch",) if mounts_torch() else ()
    run("make", "--directory", str(ROOT), "images", "envoy-image", *names, *target)


def load_images(cluster: Cluster) -> None:
    """Load the images into the nodes, unless the same ones are there."""
    names = (ROUTER, MODEL_SERVER, ENVOY)
    wanted = " ".join(run("docker", "image", "inspect", "--format", "{{.Id}}", *names).split())
    try:
        loaded = cluster.in_node("cat", _LOADED).strip()
    except ToolError:
        loaded = ""
    if loaded != wanted:
        run("kind", "load", "docker-image", *names, "--name", cluster.name)
        cluster.in_node("sh", "-c", f"echo '{wanted}' > {_LOADED}")
