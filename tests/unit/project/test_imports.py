"""All packages imported in one process, as a user's script may do."""

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


def test_all_programs_can_be_imported_together() -> None:
    """Importing all programs together works: no proto name is defined twice."""
    programs = (
        "kvroute.cli, router.app.server, router.client, router.prompts.tokenizer_server, "
        "indexer.service.cli, indexer.service.grpc_server"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {programs}"], check=True)


def test_the_model_server_imports_neither_router_nor_indexer() -> None:
    """The model server imports neither router nor indexer: its hashes are foreign to the index."""
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
    """All typed packages have py.typed: a type checker finds a wrong call in a user's code."""
    (tmp_path / "user.py").write_text(program)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--follow-imports={follows}", "--cache-dir=.", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (checked.returncode, told in checked.stdout) == (status, True), checked.stdout + checked.stderr
