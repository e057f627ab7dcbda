"""Text for terminals: tables, colours only where they are shown, and no control characters of others."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

BOLD, RED, GREEN, YELLOW = "1", "1;31", "32", "33"


def has_colours() -> bool:
    """Return whether to colour standard output: a terminal, without NO_COLOR or TERM=dumb."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str) -> str:
    """Return a text in a colour or weight, where standard output shows these."""
    return f"\x1b[{style}m{text}\x1b[0m" if style and has_colours() else text


@contextmanager
def screen() -> Iterator[Callable[[Sequence[str]], None]]:
    """Leave the terminal's text for a screen; yield a function that shows lines, cut at its edges."""

    def show(lines: Sequence[str]) -> None:
        width, height = shutil.get_terminal_size()
        shown = "\x1b[K\n".join(line[: width - 1] for line in lines[:height])
        print(f"\x1b[H{shown}\x1b[J", end="", flush=True)

    print("\x1b[?1049h\x1b[?25l", end="")
    try:
        yield show
    finally:
        print("\x1b[?25h\x1b[?1049l", end="", flush=True)


def clean(value: object, chars_max: int = 200) -> str:
    """Return a value as one line of printable text: clients choose ids and names of models."""
    return "".join(char if char.isprintable() else "?" for char in str(value)[:chars_max])


def count(number: float | None) -> str:
    """Return a number without decimals and with separators; "-" if it is unknown."""
    return "-" if number is None else f"{number:,.0f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Collection[int]) -> list[str]:
    """Return the lines of a table; columns of words are left-aligned, those of numbers right-aligned."""
    lines = [heads, *([clean(text, 80) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    forms = [f"{'<' if at in words else '>'}{width}" for at, width in enumerate(widths)]
    return ["  ".join(map(format, line, forms)).rstrip() for line in lines]
