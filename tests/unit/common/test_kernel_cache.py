"""common.kernel_cache: the cache directory, on writable and read-only file systems."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from common import kernel_cache
from common.kernel_cache import cache_directory, sources_digest


@pytest.fixture(autouse=True)
def _asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the process-wide result, and give each test a temporary directory of its own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(kernel_cache, "gettempdir", lambda: str(tmp_path / "temporary"))
    cache_directory.cache_clear()
    yield
    cache_directory.cache_clear()


def _shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an image's cache directory with one kernel, read-only from now on."""
    image = tmp_path / "image"
    directory = cache_directory(str(image))
    assert directory is not None
    (Path(directory) / "part").mkdir()
    (Path(directory) / "part" / "kernel.nbi").write_bytes(b"compiled")
    cache_directory.cache_clear()

    def temporary_file(dir: Path) -> IO[bytes]:
        if dir.is_relative_to(image):
            raise PermissionError(dir)
        return TemporaryFile(dir=dir)

    # Permissions would not stop root from writing.
    monkeypatch.setattr(kernel_cache, "TemporaryFile", temporary_file)
    return image


def test_a_writable_directory_is_used(tmp_path: Path) -> None:
    """The cache is a directory below the chosen one, which is created."""
    directory = cache_directory(str(tmp_path / "chosen"))
    assert directory is not None
    assert Path(directory).parent == tmp_path / "chosen" / "kvroute-kernels"


def test_kernels_of_a_read_only_image_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a read-only image are copied once to a private, writable directory."""
    image = _shipped(tmp_path, monkeypatch)
    copy = cache_directory(str(image))
    assert copy is not None
    assert (Path(copy) / "part" / "kernel.nbi").read_bytes() == b"compiled"
    assert Path(copy).is_relative_to(tmp_path / "temporary")
    assert Path(copy).parent.stat().st_mode & 0o077 == 0
    (Path(copy) / "part" / "another.nbi").write_bytes(b"for another processor")
    cache_directory.cache_clear()
    assert cache_directory(str(image)) == copy
    assert (Path(copy) / "part" / "another.nbi").exists()


def test_kernels_that_others_may_have_put_there_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary directory that others can write to is not used."""
    image = _shipped(tmp_path, monkeypatch)
    planted = tmp_path / "temporary" / f"kvroute-kernels-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    assert cache_directory(str(image)) is None


def test_without_a_place_to_write_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a writable directory there is no cache."""
    image = _shipped(tmp_path, monkeypatch)
    monkeypatch.setattr(kernel_cache, "gettempdir", lambda: "/proc/none")
    assert cache_directory(str(image)) is None


def test_kernels_of_other_sources_are_not_used(tmp_path: Path) -> None:
    """A changed constant of a module that a kernel imports changes the digest."""
    kernel, constants = tmp_path / "indexer/views/kernel.py", tmp_path / "indexer/index/layout.py"
    for path in (kernel, constants):
        path.parent.mkdir(parents=True)
    kernel.write_text("from common.jit import kernel\nfrom indexer.index import layout\n")
    constants.write_text("SLOTS = 8\n")
    before = sources_digest(tmp_path)
    constants.write_text("SLOTS = 16\n")
    assert sources_digest(tmp_path) != before
