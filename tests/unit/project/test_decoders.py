"""Message types are prepared at import, on one thread."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGES = ("common", "indexer", "kvroute", "model_server", "planning", "router", "tokenization")
CODECS = ("json", "msgpack", "yaml", "toml")


def unprepared(source: str) -> Iterator[str]:
    """Yield calls in functions that prepare a type: `Decoder(...)` and `decode(..., type=...)` of msgspec."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in (inner for function in functions for inner in ast.walk(function)):
        match node:
            case ast.Call(ast.Attribute(ast.Attribute(ast.Name("msgspec"), codec), name)) if codec in CODECS:
                is_typed = any(keyword.arg == "type" for keyword in node.keywords)
                if name == "Decoder" or (name == "decode" and is_typed):
                    yield f"line {node.lineno}: msgspec.{codec}.{name}"


def test_no_type_is_prepared_by_a_request() -> None:
    """No function makes a decoder, because concurrent first uses of a type end the process."""
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = {str(path.relative_to(ROOT)): [*unprepared(path.read_text())] for path in paths}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_decoders_in_functions_are_found() -> None:
    """Both forms are found within a function, and constants of the module are not."""
    source = """
import msgspec
GOOD = msgspec.json.Decoder(int)
def f(data):
    msgspec.json.decode(data)
    msgspec.msgpack.Decoder(int)
    return msgspec.json.decode(data, type=int)
"""
    assert [*unprepared(source)] == ["line 6: msgspec.msgpack.Decoder", "line 7: msgspec.json.decode"]
