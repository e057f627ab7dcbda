"""Where declared pods come from: what every source offers, and the one that is a file on disk.

The file is read once at the start, then again whenever it changes; what is in it is indexer.pod_entry's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from indexer import ConfigError as IndexerConfigError
from indexer.pod_entry import PodEntry, parse_pods
from indexer.roster import EngineState
from router.errors import ConfigError
from router.pods import Pod

_log = logging.getLogger(__name__)

_FILE_BYTES_MAX = 1 << 20

_Stamp = tuple[int, int, int]


class PodsSource:
    """Tells which pods there are."""

    def changed(self) -> tuple[PodEntry, ...] | None:
        """All declared pods if they are others than the last time; None if not, or not known yet."""
        raise NotImplementedError

    def shown(self, now_s: float) -> Any:
        """What /debug/discovery shows."""
        raise NotImplementedError

    def start(self, news: Callable[[], None]) -> None:
        """Begins; `news` is to be called from any thread when there is something new, and never blocks."""

    def close(self) -> None:
        """Ends it; idempotent."""

    def waits_for(self) -> Sequence[str]:
        """What is missing before it is known which pods there are."""
        return ()

    def look(self, pods: Iterable[Pod], engines: Collection[EngineState], now_s: float) -> None:
        """Compares what was declared with what was found; called now and then."""


class PodsFile(PodsSource):
    """A pods file in the reference's file-discovery form.

    Args:
        watch: Whether later changes are taken over.

    Raises:
        ConfigError: The file cannot be read, or is wrong.
    """

    def __init__(self, path: Path, *, watch: bool = True) -> None:
        self._path = path
        self._watch = watch
        self._stamp: _Stamp | None = None
        self._complaint = ""
        self._first: tuple[PodEntry, ...] | None = self._read()

    def shown(self, now_s: float) -> Any:
        del now_s
        return {"source": "file", "path": str(self._path), "watched": self._watch, "problem": self._complaint}

    def changed(self) -> tuple[PodEntry, ...] | None:
        """The pods if the file has changed; None when it has not, or is broken (which is logged)."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if not self._watch:
            return None
        try:
            if self._stamp_now() == self._stamp:
                return None
            entries = self._read()
            self._complaint = ""
            return entries
        except (OSError, ConfigError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                _log.error("pods file not taken over, the pods known before stay: %s", error)
            return None

    def _read(self) -> tuple[PodEntry, ...]:
        """Reads the file.

        Raises:
            ConfigError: Names file, line and field.
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

    def _stamp_now(self) -> _Stamp:
        stat = self._path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
