"""Build scripts of the container images: an unreachable package index is reported with a fix."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
