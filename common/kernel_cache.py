"""Cache directory of compiled kernels.

numba does not read a cache that it cannot write. The kernels of a container image lie on a read-only root, so
they are copied to the temporary directory. There, kernels for another processor can be added.
"""

from __future__ import annotations

import os
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile, gettempdir

from xxhash import xxh3_64_hexdigest

_PACKAGES = ("common", "indexer", "model_server", "router")
_IMPORT = re.compile(rb"^from ([\w.]+) import (\([^)]*\)|\w+)", re.MULTILINE)
_CONSTANT = re.compile(rb"\b[A-Z][A-Z0-9_]+\b")
_NAME = "kvroute-kernels"


@cache
def cache_directory(chosen: str) -> str | None:
    """Return a cache directory for the present state of the kernel sources.

    numba checks only the file of the kernel itself. It would miss a change in a function that is inlined
    from another file, so the directory's name is a digest of all sources.

    Args:
        chosen: Value of NUMBA_CACHE_DIR; empty: below the user's cache directory.

    Returns:
        The path, or None if no directory is writable. Kernels are then compiled at each start.
    """
    digest = sources_digest(Path(__file__).parents[1])
    try:
        below = chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(below) / _NAME / digest
    except RuntimeError:  # no home directory
        return None
    if _is_writable(directory):
        return str(directory)
    return _copied(directory) if directory.is_dir() else None


def sources_digest(root: Path) -> str:
    """Return a digest of all files with kernels, and of files whose constants are compiled into kernels."""
    texts = {path: path.read_bytes() for package in _PACKAGES for path in (root / package).rglob("*.py")}
    used = {path for path, text in texts.items() if b"jit import" in text}
    for path in tuple(used):
        for module, names in _IMPORT.findall(texts[path]):
            source = root / module.decode().replace(".", "/")
            if _CONSTANT.search(names):
                used.add(source.with_suffix(".py"))
            used.add(source / f"{names.decode()}.py")
    return xxh3_64_hexdigest(b"\0".join(texts[path] for path in sorted(used & texts.keys())))


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _copied(directory: Path) -> str | None:
    """Copy kernels to the user's part of the temporary directory, unless an earlier start did."""
    below = Path(gettempdir()) / f"{_NAME}-{os.geteuid()}"
    copy = below / directory.name
    try:
        below.mkdir(mode=0o700, exist_ok=True)
        status = below.lstat()
        # Kernels are executable code: only this user may have written them.
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        if not copy.exists():
            with TemporaryDirectory(dir=below) as name:
                shutil.copytree(directory, Path(name) / "kernels", copy_function=shutil.copyfile)
                Path(name, "kernels").rename(copy)
    except OSError:  # includes a concurrent copy by another process
        pass
    return str(copy) if _is_writable(copy) else None
