"""Values built from TLS files, rebuilt when the files change."""

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


class FileReloader(Generic[_Made]):
    """Value built from files, checked for changes at each new connection, so renewal needs no restart.

    Args:
        port: Name of the port in log lines.
        files: Files whose modification times are watched.
        make: Builds the value from the files. The constructor raises what the first call raises.
        errors: Exceptions of `make` for invalid files, besides OSError.
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
        # Read before the files, so that a change meanwhile is noticed. `make` reports missing files.
        with suppress(OSError):
            self._stamps = self._read_stamps()
        self._made = make()

    def current(self) -> _Made:
        """Return the value of the present files, or the last value while the files cannot be read."""
        try:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                self._made, self._stamps = self._make(), stamps
                _log.info("certificate reloaded: port=%s", self._port)
        except self._errors as error:
            _repeated.event(
                "certificate_unreadable",
                self._port,
                "certificate not reloaded, keeping the last one: port=%s error=%s",
                self._port,
                error,
            )
        return self._made

    def _read_stamps(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in self._files)
