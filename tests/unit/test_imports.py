"""All packages in one process, as an operator's own script may have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MISUSE = """
from router.client import PickerClient

with PickerClient("127.0.0.1:9002") as picker:
    picker.pick("model", mesages=[])
"""


def test_every_program_can_be_imported_beside_the_others() -> None:
    """No two protos define one name, and no import has a side effect that another one cannot bear."""
    programs = (
        "kvroute.cli, router.app.server, router.client, router.prompts.tokenizer_server, "
        "indexer.service.cli, indexer.service.grpc_server"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {programs}"], check=True)


def test_the_model_server_is_made_without_router_and_indexer() -> None:
    """Its hashes are foreign handles to the index: it shares how kernels are compiled, and nothing else."""
    program = """
import sys, model_server.openai.api_server, model_server.attention.cpu_kernel.kernel
sys.exit(", ".join(name for name in sys.modules if name.split(".")[0] in ("router", "indexer")) or None)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("program", "follows", "status", "told"),
    [
        ("import common, indexer, kvroute, planning, router, tokenization", "skip", 0, "no issues found"),
        (MISUSE, "silent", 1, 'Unexpected keyword argument "mesages"'),
    ],
    ids=["packages", "client"],
)
def test_users_code_is_checked_against_our_types(
    tmp_path: Path, program: str, follows: str, status: int, told: str
) -> None:
    """All packages that have types say so: a type checker finds a mistake in the use of the client."""
    (tmp_path / "user.py").write_text(program)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--follow-imports={follows}", "--cache-dir=.", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, told in checked.stdout) == (status, True), checked.stdout + checked.stderr
