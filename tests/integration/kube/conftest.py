"""Fixtures: a control plane, and a namespace for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kube.apiserver import ApiServer, missing
from tests.support.kube.cluster_objects import Namespace
from tests.support.loopback import free_port


@pytest.fixture(scope="session")
def api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Shared control plane with the inference extension's CRDs, for tests that do not disturb it."""
    yield from _running(tmp_path_factory.mktemp("kube"))


@pytest.fixture
def own_api_server(tmp_path: Path) -> Iterator[ApiServer]:
    """Control plane of one test, which may disturb it."""
    yield from _running(tmp_path / "kube")


@pytest.fixture
def bare_api_server(tmp_path: Path) -> Iterator[ApiServer]:
    """Control plane without CRDs."""
    yield from _running(tmp_path / "kube", definitions=False)


@pytest.fixture
def namespace(api_server: ApiServer) -> Iterator[Namespace]:
    """Namespace of the shared control plane."""
    yield from _namespace(api_server)


@pytest.fixture
def own_namespace(own_api_server: ApiServer) -> Iterator[Namespace]:
    """Namespace of the test's own control plane."""
    yield from _namespace(own_api_server)


@pytest.fixture
def bare_namespace(bare_api_server: ApiServer) -> Iterator[Namespace]:
    """Namespace of a control plane without CRDs."""
    yield from _namespace(bare_api_server)


def _definitions() -> Path:
    folder = Path(os.environ.get("INFERENCE_EXTENSION_CRDS", "/nonexistent"))
    if not folder.is_dir():
        pytest.skip(
            "INFERENCE_EXTENSION_CRDS does not name a folder: there are no definitions of InferencePool"
        )
    return folder


def _running(directory: Path, *, definitions: bool = True) -> Iterator[ApiServer]:
    if reason := missing():
        pytest.skip(reason)
    folder = _definitions() if definitions else None
    server = ApiServer(directory)
    try:
        if folder is not None:
            server.apply_definitions(folder)
        yield server
    finally:
        server.close()


def _namespace(server: ApiServer) -> Iterator[Namespace]:
    namespace = Namespace(server, free_port())
    try:
        yield namespace
    finally:
        namespace.close()
