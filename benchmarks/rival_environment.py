"""Virtual environments of programs to compare with, in the user's cache directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def rivals_home() -> Path:
    """Return the directory of the environments."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "kvroute" / "rivals"


def environment(package: str) -> Path:
    """Return the python of an environment with a package from PyPI, created on first use."""
    home = rivals_home() / package
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        print(f"installing {package} into {home}", file=sys.stderr)
        if uv := shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv"):
            subprocess.run([uv, "venv", "--quiet", "--clear", str(home)], check=True)
            install = [uv, "pip", "install", "--quiet", "--python", str(python)]
        else:
            venv.create(home, with_pip=True, clear=True)
            install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, package], check=True, stdout=sys.stderr)
        (home / ".ready").touch()
    return python
