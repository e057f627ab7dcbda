"""The committed gRPC stubs, which spare an installation the protobuf compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc_tools import protoc

from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("router", "endpoint_picker"),
        ("router", "engine_requests"),
        ("router", "token_usage"),
        ("router", "tokenizer"),
        ("indexer", "indexer"),
    ],
)
def test_stubs_equal_the_generated_ones(tmp_path: Path, package: str, name: str) -> None:
    """Regenerating the stubs (make proto) changes nothing."""
    status = protoc.main(
        [
            "protoc",
            f"-I{package}/_pb={ROOT / 'proto/kvroute/v1'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            # The router registers and calls its few methods by name.
            *([f"--grpc_python_out={tmp_path}"] if package == "indexer" else []),
            f"{package}/_pb/{name}.proto",
        ]
    )
    assert status == 0
    generated = {path.name: path.read_text() for path in (tmp_path / package / "_pb").iterdir()}
    committed = {file: (ROOT / package / "_pb" / file).read_text() for file in generated}
    assert generated == committed
