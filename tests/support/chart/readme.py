"""Table of the chart's values, made from values.yaml: one row per value, with its default and comment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MARK = "<!-- The table below is made from values.yaml: UPDATE_GOLDEN=1 pytest tests/chart -->\n"
_KEY = re.compile(r"( *)([A-Za-z]+):(?: (.*))?$")
_INDENT = 2


class Value(NamedTuple):
    """One line of values.yaml that has a key."""

    path: str
    default: str  # "" for a value that has keys of its own
    comment: str


def values(text: str) -> Iterator[Value]:
    """Yield the values in their order. A comment belongs to the key below it, or to the one on its line."""
    keys: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
        elif found := _KEY.match(line):
            indent, key, default = found.groups()
            keys[len(indent) // _INDENT :] = [key]
            yield Value(".".join(keys), default or "", " ".join(comment))
            comment = []
        elif not stripped:
            comment = []


def table(path: Path) -> str:
    """Return the Markdown table of a values.yaml."""
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in values(path.read_text()):
        default = f"`{value.default}`" if value.default else ""
        if default or value.comment:
            meaning = re.sub(r"\|", r"\\|", value.comment)
            rows.append(f"| `{value.path}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"
