"""Figures of a run, as a JSON file and a Markdown table. They are reported, never asserted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Figures:
    """The figures of one run, by name."""

    values: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, name: str, seconds: float, what: str) -> None:
        """Record a figure.

        Args:
            name: Name for programs.
            seconds: Value.
            what: Description for people.
        """
        self.values[name] = (seconds, what)

    def write(self, folder: Path) -> None:
        """Write figures.json and figures.md."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            {"name": name, "unit": "s", "value": round(seconds, 3), "what": what, "cores": os.cpu_count()}
            for name, (seconds, what) in self.values.items()
        ]
        (folder / "figures.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows = [f"| {what} | {seconds:.2g} s |" for seconds, what in self.values.values()]
        (folder / "figures.md").write_text("\n".join(["| what | measured |", "|---|---|", *rows, ""]))
