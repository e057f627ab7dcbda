"""Tests use only public names, so that internals can change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
# Names without a public counterpart in other libraries; generated stubs are the protocol itself.
FOREIGN = {"_collector_to_names", "_labelnames", "_actions", "_exit", "_current_frames", "_pb"}
FOREIGN |= {"_undefined_exception", "_undefined_message", "_is_mkldnn_bf16_supported", "_python_dispatch"}
PRIVATE = re.compile(r"(?:.*\.)?(_[A-Za-z]\w*)")
BY_NAME = {"setattr", "getattr", "hasattr", "delattr", "attrgetter", "patch", "object"}


def private_names(source: str) -> Iterator[str]:
    """Yield uses of names with one leading underscore that are not defined in the file itself."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                own.add(name)
    for node in nodes:
        names: list[str] = []
        match node:
            case ast.Attribute(ast.Name("self" | "cls"), name):
                names = [name] if name not in own else []
            case ast.Attribute(_, name):
                names = [name]
            case ast.ImportFrom(module=module):
                names = [*(module or "").split("."), *(alias.name for alias in node.names)]
            case ast.Import():
                names = [part for alias in node.names for part in alias.name.split(".")]
            case ast.Call(ast.Name(called) | ast.Attribute(_, called)) if called in BY_NAME:
                names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and str(arg.value)]
            case ast.Constant(str(text)) if re.fullmatch(r"_[A-Z][A-Z0-9_]+", text):
                names = [text]
        for name in names:
            found = PRIVATE.fullmatch(str(name))
            if found and found[1] not in FOREIGN:
                yield f"line {getattr(node, 'lineno', 0)}: {name}"


def test_no_private_name_is_used() -> None:
    """No test uses a private name; bounds that a test changes are arguments or public constants."""
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in TESTS.rglob("*.py")}
    found = {path: [*private_names(text)] for path, text in texts.items()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "router._ledger",
        "from router.flow import _BOUND",
        "import router._flow",
        "patch.setattr(router.flow, '_BOUND', 1)",
        "patch.setattr('router.flow._BOUND', 1)",
        "getattr(router, '_ledger')",
        "for name in ('_BOUND', '_OTHER'): patch.setattr(flow, name, 1)",
        "class Mine(Router):\n  def go(self): self._ledger.end()",
    ],
)
def test_every_way_to_a_private_name_is_found(line: str) -> None:
    """Uses by attribute, import, string or inherited field are all found."""
    assert list(private_names(line))
