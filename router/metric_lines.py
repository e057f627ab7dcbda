"""Single series of a metrics page in the text format: a page in, values and labels by a metric's name out.

Never reads the rest of the page. Knows no engine's names.
"""

from __future__ import annotations

import math
import re

_SERIES_MAX = 1024
# Timestamps are the largest numbers that make sense.
_NUMBER_MAX = 1e10

_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WHOLE = re.compile(rb"[0-9]{1,12}")


class UnusableError(Exception):
    """The page, or one value on it, is senseless."""


class MetricLines:
    """The lines of a page, found by the name they begin with."""

    def __init__(self, page: bytes) -> None:
        self._page = b"\n" + page

    def values(self, name: bytes) -> dict[bytes, bytes]:
        """Values by labels, as they are written.

        Raises:
            UnusableError: There are too many.
        """
        page, needle, found = self._page, b"\n" + name, {}
        at = page.find(needle)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            rest = page[at + len(needle) : end if end >= 0 else len(page)]
            if rest[:1] in (b"{", b" ", b"\t"):
                labels, _, tail = rest.rpartition(b"}")
                found[labels] = (tail.split(maxsplit=1) or [b""])[0]
                if len(found) > _SERIES_MAX:
                    raise UnusableError
            at = page.find(needle, at + len(needle))
        return found

    def labels(self, name: bytes) -> list[dict[bytes, bytes]]:
        """Labels of all series of a metric.

        Raises:
            UnusableError: There are too many.
        """
        return [parse_labels(labels) for labels in self.values(name)]


def parse_labels(text: bytes) -> dict[bytes, bytes]:
    """Labels as they are written in front of a value."""
    return dict(_LABEL.findall(text))


def parse_number(text: bytes) -> float:
    """A value that is a count, a share or a time.

    Raises:
        UnusableError: It is none.
    """
    try:
        value = float(text)
    except ValueError as error:
        raise UnusableError from error
    if not (math.isfinite(value) and 0.0 <= value <= _NUMBER_MAX):
        raise UnusableError
    return value


def parse_whole(text: bytes | None) -> int:
    """A label's value that is a whole number; 0 where it is none."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else 0
