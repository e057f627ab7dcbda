"""Objects made of TLS files, and made anew when the files change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from common.repeated_log import RepeatedLog

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_Made = TypeVar("_Made")


class FollowedFiles(Generic[_Made]):
    """A value made of files, looked at with each new connection, so that a renewed one needs no restart.

    Args:
        port: The port's name in the log.
        make: Reads the files; what it raises at first is raised here.
        errors: What it raises, besides OSError, for files that are not as they should be.
    """

    def __init__(
        self,
        port: str,
        files: Sequence[Path],
        make: Callable[[], _Made],
        errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self._port = port
        self._files = files
        self._make = make
        self._errors: tuple[type[Exception], ...] = (OSError, *errors)
        self._stamps: tuple[int, ...] = ()
        # Before the files are read, so that a change meanwhile shows; which file lacks is for `make` to say.
        with suppress(OSError):
            self._stamps = self._read_stamps()
        self._made = make()

    def current(self) -> _Made:
        """Return the value of the files as they are; while they cannot be read, the last one."""
        try:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                self._made, self._stamps = self._make(), stamps
                _log.info("certificate was read anew: port=%s", self._port)
        except self._errors as error:
            _repeated.event(
                "certificate_unreadable",
                self._port,
                "the certificate stays as it was: port=%s error=%s",
                self._port,
                error,
            )
        return self._made

    def _read_stamps(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in self._files)
