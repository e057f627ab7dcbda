"""Fixtures of the kind tests: a cluster, the images in it, a release of the chart, and figures.

Needs docker, kind, kubectl and helm on PATH. KIND_NODE_IMAGE and KIND_CONFIG choose the node image and the
cluster's configuration (default: kind's own). KIND_CLUSTER names a cluster to use and keep, which is created
if missing. Figures, and logs of failed tests, are written to KIND_RESULTS (default: kind-results).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kind.cluster import NODE_PORTS, Cluster, running_cluster
from tests.support.kind.evidence import collect
from tests.support.kind.figures import Figures
from tests.support.kind.images import build_images, load_images
from tests.support.kind.release import Release, base_values
from tests.support.kind.tools import missing_tools
from tests.support.kind.traffic import Conversation

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def results() -> Path:
    """Return the folder of a run's figures and evidence."""
    return Path(os.environ.get("KIND_RESULTS", "kind-results")).absolute()


@pytest.fixture(scope="session")
def figures(results: Path) -> Iterator[Figures]:
    """Collect figures and write them at the end."""
    figures = Figures()
    yield figures
    figures.write(results)


@pytest.fixture(scope="session")
def images() -> None:
    """Build the images in docker."""
    if reason := missing_tools():
        pytest.skip(reason)
    build_images()


@pytest.fixture(scope="session")
def cluster(images: None, tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> Iterator[Cluster]:
    """Run a cluster with the images loaded."""
    started_s = time.monotonic()
    with running_cluster(tmp_path_factory.mktemp("kind")) as cluster:
        figures.add("create_s", time.monotonic() - started_s, "cluster created")
        started_s = time.monotonic()
        load_images(cluster)
        figures.add("load_s", time.monotonic() - started_s, "images loaded into its node")
        yield cluster


@pytest.fixture(scope="session")
def pools(cluster: Cluster) -> None:
    """Add the kind InferencePool to the cluster."""
    crds = os.environ.get("INFERENCE_EXTENSION_CRDS")
    if not crds:
        pytest.skip("INFERENCE_EXTENSION_CRDS: no folder with the CRDs of the inference extension")
    for path in sorted(Path(crds).glob("inference.networking.k8s.io_*.yaml")):
        cluster.kubectl()("apply", "--server-side", "--filename", str(path))


@pytest.fixture(scope="session")
def installed(cluster: Cluster, figures: Figures) -> Iterator[Release]:
    """Install the chart with two routers and two model servers, in a namespace of its own."""
    namespace = f"kvroute-{os.getpid()}"
    release = Release(cluster, cluster.kubectl(namespace), NODE_PORTS[0])
    started_s = time.monotonic()
    try:
        release.install(base_values(namespace))
        figures.add("install_s", time.monotonic() - started_s, "`helm install --wait` of all")
        release.expose()
        while Conversation(release.url).ask().failed and time.monotonic() < started_s + 300:
            time.sleep(0.1)
        figures.add(
            "first_request_s", time.monotonic() - started_s, "from `helm install` to the first answer"
        )
        yield release
    finally:
        release.discard()


@pytest.fixture
def release(installed: Release) -> Release:
    """Return the release with two routers and two model servers, all followed and EXACT."""
    installed.scale("model-server", 2)
    installed.scale("router", 2)
    installed.await_settled(routers=2, model_servers=2)
    return installed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Record whether a test failed, for `_evidence`."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _evidence(request: pytest.FixtureRequest, results: Path) -> Iterator[None]:
    """Collect logs, events and decisions of every namespace if a test failed."""
    yield
    if request.node.stash.get(_FAILED, False) and "cluster" in request.fixturenames:
        collect(request.getfixturevalue("cluster"), results / request.node.name.replace("/", "_"))
