"""The file of the public surface: sections of sorted lines, compared with the code or rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tests.support.paths import DATA

_FILE = DATA / "public_surface.txt"
_UPDATE = "UPDATE_SURFACE"
_ADVICE = f"""
A removal needs a line in CHANGELOG.md that says what to do instead.
{_UPDATE}=1 with this test writes tests/data/public_surface.txt anew."""


def lines_of(section: str) -> set[str]:
    """Return a section's lines, without the section's name before each."""
    head = f"{section}: "
    lines = _FILE.read_text().splitlines() if _FILE.exists() else []
    return {line.removeprefix(head) for line in lines if line.startswith(head)}


def check_section(section: str, found: Iterable[str]) -> None:
    """Fail unless a section equals the file's; with UPDATE_SURFACE=1, write it to the file instead."""
    listed, there = lines_of(section), set(found)
    if os.environ.get(_UPDATE):
        _write(section, there)
        return
    changes = [f"removed: {section}: {line}" for line in sorted(listed - there)]
    changes += [f"added:   {section}: {line}" for line in sorted(there - listed)]
    assert not changes, "the public surface has changed:\n" + "\n".join(changes) + _ADVICE


def _write(section: str, lines: set[str]) -> None:
    others = _FILE.read_text().splitlines() if _FILE.exists() else []
    kept = {line for line in others if not line.startswith(f"{section}: ")}
    _FILE.write_text("".join(f"{line}\n" for line in sorted(kept | {f"{section}: {line}" for line in lines})))
