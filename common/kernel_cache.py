"""Where compiled kernels are kept: what NUMBA_CACHE_DIR says in; a directory that numba can use out.

numba reads no cache that it cannot write. A container image brings its kernels on a read-only root: they are
copied to the temporary directory, where a processor unlike the one they were compiled for adds its own.
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
    """A directory for each state of the kernels' sources.

    numba looks at the file of a kernel only, and would not see that one changed which is compiled into it.

    Args:
        chosen: What NUMBA_CACHE_DIR says; empty: below the user's cache directory.

    Returns:
        Its path; None if there is none that can be written: kernels are compiled at each start then.
    """
    digest = sources_digest(Path(__file__).parents[1])
    try:
        below = chosen or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(below) / _NAME / digest
    except RuntimeError:  # there is no home
        return None
    if _is_writable(directory):
        return str(directory)
    return _copied(directory) if directory.is_dir() else None


def sources_digest(root: Path) -> str:
    """Return a digest of the files with kernels and of those whose constants are compiled into them."""
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
    """Copies kernels to this user's part of the temporary directory, unless a start before did."""
    below = Path(gettempdir()) / f"{_NAME}-{os.geteuid()}"
    copy = below / directory.name
    try:
        below.mkdir(mode=0o700, exist_ok=True)
        status = below.lstat()
        # Kernels are code: nobody else may have put them there.
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return None
        if not copy.exists():
            with TemporaryDirectory(dir=below) as name:
                shutil.copytree(directory, Path(name) / "kernels", copy_function=shutil.copyfile)
                Path(name, "kernels").rename(copy)
    except OSError:  # also where another process was faster
        pass
    return str(copy) if _is_writable(copy) else None
