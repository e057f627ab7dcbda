"""The pods file on disk: read once at the start, then again whenever it changes.

Knows files; what is in them is indexer.pods_file's.
"""

from __future__ import annotations

import logging
from pathlib import Path

from indexer import ConfigError as IndexerConfigError
from indexer.pods_file import PodEntry, parse_pods
from router.errors import ConfigError

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 1 << 20

_Stamp = tuple[int, int, int]


class PodsSource:
    """A pods file in the reference's file-discovery form.

    Args:
        watch: Whether later changes are taken over.
    """

    def __init__(self, path: Path, *, watch: bool = True) -> None:
        self._path = path
        self._watch = watch
        self._stamp: _Stamp | None = None
        self._complaint = ""

    def read(self) -> tuple[PodEntry, ...]:
        """Reads the file.

        Raises:
            ConfigError: It cannot be read, or is wrong; names file, line and field.
        """
        try:
            self._stamp = self._stamp_now()
            with self._path.open("rb") as file:
                data = file.read(_FILE_BYTES_MAX + 1)
            if len(data) > _FILE_BYTES_MAX:
                raise ConfigError(f"{self._path}: larger than {_FILE_BYTES_MAX} bytes")
            return parse_pods(data.decode("utf-8"), str(self._path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}: cannot be read: {error}") from error
        except IndexerConfigError as error:
            raise ConfigError(str(error)) from error

    def changed(self) -> tuple[PodEntry, ...] | None:
        """The pods again if the file has changed; None when it has not, or is broken (which is logged)."""
        if not self._watch:
            return None
        try:
            if self._stamp_now() == self._stamp:
                return None
            entries = self.read()
            self._complaint = ""
            return entries
        except (OSError, ConfigError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("pods file not taken over, the pods known before stay: %s", error)
            return None

    def _stamp_now(self) -> _Stamp:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
