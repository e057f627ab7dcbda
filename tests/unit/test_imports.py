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


def test_the_model_server_is_made_without_router_and_indexer() -> None:
    """Its hashes are foreign handles to the index: it shares how kernels are compiled, and nothing else."""
    program = """
import sys, model_server.serve, model_server.attention.paged_kernel
sys.exit(", ".join(name for name in sys.modules if name.split(".")[0] in ("router", "indexer")) or None)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
