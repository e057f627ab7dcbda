"""The `kvroute migrate` command: what a picker configuration of llm-d means here, and it in new words."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from common.flags import CommandParser
from kvroute.terminal import YELLOW, clean, styled
from router.config.fields import read_text
from router.errors import ConfigError
from router.plugins.migration import migrate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 1 if the router would not start with the file."""
    parser = CommandParser(
        "kvroute migrate",
        "Print what each part of a picker configuration of llm-d (EndpointPickerConfig of v0.10 or v0.11) "
        "means here, what is ignored and why, and what llm-d v0.11 removes.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the configuration file")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the configuration in the words of llm-d v0.11"
    )
    arguments = parser.parse_args(argv)
    migration = migrate(read_text(arguments.config), str(arguments.config))
    for line in migration.lines:
        stands_out = "v0.11 removes" in line or "[not supported here]" in line
        print(styled(clean(line, 2000), YELLOW if stands_out else ""))
    if migration.problems:
        print(f"\n{migration.problems} parts are not supported here; nothing is written", file=sys.stderr)
        return 1
    print(f"\n{len(migration.edits)} changes to the words of llm-d v0.11")
    if arguments.write is not None:
        text = migration.text()
        if migrate(text, str(arguments.write)).problems:
            raise ConfigError(f"{arguments.write}: not written: the result is not valid; please report it")
        arguments.write.write_text(text, "utf-8")
        print(f"{arguments.write}: written; comments within changed entries are left out")
    return 0
