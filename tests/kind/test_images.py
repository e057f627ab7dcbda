"""The images run by docker: read-only, as an unprivileged user, without a network."""

from __future__ import annotations

import json

import pytest

from tests.support.kind.images import MODEL_SERVER, ROUTER
from tests.support.kind.tools import run

pytestmark = [pytest.mark.kind, pytest.mark.timeout(1800), pytest.mark.usefixtures("images")]

_START_ROUTER = """
import pathlib
from router.app.config import parse_flags
from router.app.server import RouterServer
pods = pathlib.Path("/tmp/pods.yaml")
pods.write_text("endpoints: []")
RouterServer(parse_flags(["--pods-file", str(pods)])[0]).close()
"""
_WHO = """
import importlib.util, json, os
found = {name: importlib.util.find_spec(name) is not None for name in ("torch", "numba", "starlette")}
print(json.dumps({"user": os.getuid(), **found}))
"""


def test_a_router_starts_with_the_kernels_of_its_image() -> None:
    """A router starts from a read-only image without compiling a kernel."""
    said = _python(ROUTER, _START_ROUTER, "--env", "NUMBA_DEBUG_CACHE=1")
    assert "data loaded" in said
    assert "data saved" not in said


def test_each_image_has_what_its_program_needs() -> None:
    """Both images can run kernels; only the model server's has torch and its HTTP server."""
    router, server = (json.loads(_python(image, _WHO)) for image in (ROUTER, MODEL_SERVER))
    assert router == {"user": 10001, "torch": False, "numba": True, "starlette": False}
    assert (server["user"], server["numba"], server["starlette"]) == (10001, True, True)


def test_the_entrypoint_is_the_command() -> None:
    """A container's arguments are those of `kvroute`."""
    for image in (ROUTER, MODEL_SERVER):
        assert run("docker", "run", "--rm", "--read-only", image, "--version").startswith("kvroute ")


def _python(image: str, program: str, *options: str) -> str:
    confined = ("--read-only", "--tmpfs", "/tmp", "--network", "none", "--cap-drop", "ALL")
    return run("docker", "run", "--rm", *confined, *options, "--entrypoint", "python", image, "-c", program)
