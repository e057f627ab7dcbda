"""Completion of commands and flags, as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")

RUN = "import sys; sys.argv = ['kvroute']; from kvroute.cli import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvroute ex", {"explain"}),
        ("kvroute explain --req", {"--request-id"}),
        ("kvroute router --pool-n", {"--pool-name", "--pool-namespace"}),
        ("kvroute bench pick", {"pick", "pickers", "pick_inside", "pick_counts"}),
        ("kvroute envoy-config --response", {"--responses"}),
        ("kvroute explain --path /v1 --ca", {"--ca-file"}),
    ],
)
def test_commands_benchmarks_and_flags_are_completed(tmp_path: Path, line: str, expected: set[str]) -> None:
    """What a shell gets for a started word is every name that begins so, and no other output."""
    file = tmp_path / "completions"
    settings = {(): "1", ("IFS",): "\n", ("STDOUT", "FILENAME"): str(file), ("SUPPRESS", "SPACE"): "1"}
    asked = {"_".join(("", "ARGCOMPLETE", *name)): value for name, value in settings.items()}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stdout == ""
    assert {word.split(":")[0].strip() for word in file.read_text().splitlines() if word} == expected, (
        done.stderr
    )


def test_nothing_of_completion_is_imported_otherwise() -> None:
    """Without a shell's question the command imports no library to print its help, which tells of it."""
    code = "import sys; from kvroute.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "register-python-argcomplete kvroute" in done.stdout
    assert not {"argcomplete", "urllib3"} & set(done.stderr.split())
