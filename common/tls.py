"""Values built from TLS files, rebuilt when the files change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from common.repeated_log import RepeatedLog

_log = logging.getLogger(__name__)
_repeated = RepeatedLog(_log)

_Made = TypeVar("_Made")


@dataclass(eq=False)
class FileReloader(Generic[_Made]):
    """Value built from files, checked for changes at each new connection, so renewal needs no restart."""

    port: str  # name of the port in log lines
    files: Sequence[Path]  # whose modification times are watched
    make: Callable[[], _Made]  # builds the value; the constructor raises what the first call raises
    errors: tuple[type[Exception], ...] = ()  # of `make` for invalid files, besides OSError

    def __post_init__(self) -> None:
        self._caught: tuple[type[Exception], ...] = (OSError, *self.errors)
        self._stamps: tuple[int, ...] = ()
        # Read before the files, so that a change meanwhile is noticed. `make` reports missing files.
        with suppress(OSError):
            self._stamps = self._read_stamps()
        self._made = self.make()

    def current(self) -> _Made:
        """Return the value of the present files, or the last value while the files cannot be read."""
        try:
            stamps = self._read_stamps()
            if stamps != self._stamps:
                self._made, self._stamps = self.make(), stamps
                _log.info("certificate reloaded: port=%s", self.port)
        except self._caught as error:
            _repeated.event(
                "certificate_unreadable",
                self.port,
                "certificate not reloaded, keeping the last one: port=%s error=%s",
                self.port,
                error,
            )
        return self._made

    def _read_stamps(self) -> tuple[int, ...]:
        return tuple(path.stat().st_mtime_ns for path in self.files)
