"""All packages in one process, as an operator's own script may have them."""

from __future__ import annotations

import subprocess
import sys


def test_every_program_can_be_imported_beside_the_others() -> None:
    """No two protos define one name, and no import has a side effect that another one cannot bear."""
    programs = (
        "router.cli, router.server, router.client, router.tokenizer_server, indexer.cli, indexer.service"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {programs}"], check=True)
