"""Requirements of the container images agree with requirements.lock and pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.support.paths import ROOT

_DOCKER = ROOT / "docker"
_PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", re.MULTILINE)


def _pins(path: Path) -> set[tuple[str, str]]:
    return set(_PIN.findall(path.read_text(encoding="utf-8")))


def _names(path: Path) -> set[str]:
    return {name for name, _ in _pins(path)}


def _imported(package: str) -> set[str]:
    """Return the top-level modules that one of our packages imports."""
    modules: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                modules.add(node.module.partition(".")[0])
    return modules - sys.stdlib_module_names - {package}


def _distributions(modules: Iterable[str]) -> set[str]:
    known = packages_distributions()
    return {name.lower().replace("_", "-") for module in modules for name in known.get(module, [])[:1]}


@pytest.mark.parametrize("name", ["router.txt", "model-server.txt", "build.txt"])
def test_an_image_installs_what_is_locked(name: str) -> None:
    """Every package of an image has the version that requirements.lock has, and hashes."""
    pins = _pins(_DOCKER / name)
    assert pins
    assert pins <= _pins(ROOT / "requirements.lock")
    text = (_DOCKER / name).read_text(encoding="utf-8")
    assert all("--hash=sha256:" in block for block in re.split(_PIN, text)[3::3])


def test_the_routers_image_has_every_dependency_and_no_torch() -> None:
    """The router's image has all dependencies of pyproject.toml, and the extras without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(line for extra in ("cel", "hub", "models", "redis", "tracing") for line in extras[extra]),
    ]
    names = _names(_DOCKER / "router.txt")
    assert {re.split(r"[<>=~!;\[ ]", line)[0] for line in asked} <= names
    assert "torch" not in names


def test_the_model_servers_image_has_what_the_model_server_imports() -> None:
    """The model server's image has all imports of model_server and tokenization, except torch's own.

    It tokenizes for models with a chat template only, without the libraries of the extra `models`.
    """
    imported = _imported("model_server") | _imported("tokenization")
    # triton comes with torch where there are GPUs.
    needed = _distributions(imported - {"common", "model_server", "tokenization", "torch", "triton"})
    needed -= {"mistral-common", "oss-harmony"}
    assert {"numpy", "msgspec", "starlette", "uvicorn", "tokenizers"} <= needed
    names = _names(_DOCKER / "model-server.txt")
    assert needed <= names
    assert not [name for name in names if re.match(r"torch|nvidia|cuda|triton", name)]
