"""Build scripts of the container images: torch's index and the compiler that torch for GPUs needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def test_an_unreachable_torch_index_is_reported_with_a_fix(tmp_path: Path) -> None:
    """If torch's index is unreachable, the build fails at once and names the settings that help."""
    shutil.copy(ROOT / "requirements.lock", tmp_path)
    url = "http://127.0.0.1:1/whl/cpu"
    environment = {
        **os.environ,
        "TORCH_INDEX_URL": url,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [ROOT / "docker" / "install-torch", sys.prefix, tmp_path / "torch"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"TORCH_INDEX_URL={url}" in done.stderr
    assert "MODEL_SERVER_TARGET=without-torch" in done.stderr
    assert "ResolutionImpossible" not in done.stderr
    assert not (tmp_path / "torch").exists()


@pytest.mark.parametrize(("package", "installed"), [("triton", True), ("torch", False)])
def test_only_torch_for_gpus_brings_a_compiler(tmp_path: Path, package: str, installed: bool) -> None:
    """A C compiler is installed if and only if torch comes with Triton, which needs one at run time."""
    (tmp_path / "bin").mkdir()
    apt_get, called = tmp_path / "bin" / "apt-get", tmp_path / "called"
    apt_get.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    apt_get.chmod(0o755)
    # The script empties the lists of packages of the machine that it runs on.
    script = (ROOT / "docker" / "install-compiler").read_text().replace("/var/lib/apt", f"{tmp_path}/apt")
    (tmp_path / "torch" / package).mkdir(parents=True)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script, "sh", tmp_path / "torch"], env=environment, check=True)
    assert called.exists() == installed
    if installed:
        assert "install --yes --no-install-recommends gcc libc6-dev" in called.read_text()


def test_one_command_builds_the_image_for_gpus() -> None:
    """`make images CUDA=1` takes the package index's own torch, and keeps an index that is named."""
    for arguments, index in (
        ((), None),
        (("CUDA=1",), ""),
        (("CUDA=1", "TORCH_INDEX_URL=https://mirror/whl/cu132"), "https://mirror/whl/cu132"),
    ):
        argv = ["make", "--dry-run", "--no-print-directory", "images", *arguments]
        environment = {key: value for key, value in os.environ.items() if key != "TORCH_INDEX_URL"}
        words = subprocess.check_output(argv, cwd=ROOT, env=environment, text=True).split()
        found = {word for word in words if word.startswith("TORCH_INDEX_URL=")}
        assert found == (set() if index is None else {f"TORCH_INDEX_URL={index}"})


def test_the_build_context_has_every_file_that_an_image_copies() -> None:
    """`.dockerignore` lets every path through that a Dockerfile copies from the build context."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for dockerfile in (ROOT / "docker").glob("*.Dockerfile"):
        lines = dockerfile.read_text().splitlines()
        copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
        sources = [source for words in copies for source in words]
        assert sources
        assert not [source for source in sources if not any(fnmatch(source, path) for path in allowed)]
