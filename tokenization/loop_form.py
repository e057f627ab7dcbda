"""Where a chat template's loop over the messages may be taken up again: its source in, a template out.

In Jinja nothing passes from one round of a loop to the next but the values of namespaces. So rounds that have
been shown need not be shown again, if all that they looked at is still the same: their own messages, values
from outside the loop, other messages, the loop's end. The rewritten template tells a `LoopRun` what rounds
look at. Templates with anything that is not known to be pure have no such form. Renders nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from jinja2 import Environment, Template, nodes
from jinja2.visitor import NodeTransformer

from tokenization.idle_rounds import stopping
from tokenization.turn_form import MESSAGES, PURE_FILTERS, PURE_NODES, PURE_TESTS

BEGIN, NEXT, END, ITEM, WHOLE, COMPARE = (
    f"kvroute_{name}" for name in ("begin", "next", "end", "item", "whole", "compare")
)
"""Functions of a `LoopRun`, as the rewritten template calls them."""

_ITEMS, _LOOP = "kvroute_items", "loop"
_NODES = (*PURE_NODES, nodes.NSRef, nodes.AssignBlock, nodes.Continue)
_MACRO_NODES = (*_NODES, nodes.Macro)
_FILTERS = PURE_FILTERS | {
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "unique",
    "sort",
    "dictsort",
    "abs",
    "float",
    "round",
    "reverse",
    "safe",
    "wordcount",
    "max",
    "min",
    "sum",
    "batch",
    "items",
}
_FUNCTIONS = frozenset({"raise_exception", "range", "dict", "namespace"})
_PLACES = frozenset(
    {
        "index",
        "index0",
        "revindex",
        "revindex0",
        "first",
        "last",
        "length",
        "previtem",
        "nextitem",
        "depth",
        "depth0",
    }
)
_ORDERS = frozenset({"gt", "gteq", "lt", "lteq"})

Attribute = tuple[str, str | None]
"""A name from outside the loop and an attribute of it; None: the value itself."""


@dataclass(frozen=True, slots=True)
class LoopForm:
    """A template that tells a `LoopRun` of its loop over the messages.

    Attributes:
        template: With the functions above among its variables, it shows the same text and their marks.
        wholes: Names that rounds read as they are.
        lists: Names that rounds read by index, which may hold messages.
        attributes: Names of which rounds read attributes, and which of them.
        ordered: What rounds ask no more of than whether it is less or greater than something.
        written: Attributes of namespaces that rounds may set.
    """

    template: Template
    wholes: frozenset[str]
    lists: frozenset[str]
    attributes: Mapping[str, frozenset[str]]
    ordered: frozenset[Attribute]
    written: frozenset[tuple[str, str]]


def loop_form(environment: Environment, source: str) -> LoopForm | None:
    """Rewrites a template; None where that might show anything else."""
    body = environment.parse(source).body
    at = _main_loop(body)
    if at is None:
        return None
    loop = body[at]
    assert isinstance(loop, nodes.For)
    macros = {node.name: node for node in body if isinstance(node, nodes.Macro)}
    called = _calls(loop.body, macros)
    has_blocks = any(isinstance(node, nodes.Block) for node in _within(body))
    if called is None or has_blocks or not _is_known(loop.body, _NODES):
        return None
    functions = frozenset(macros) | _FUNCTIONS
    if any(
        isinstance(node, nodes.Name) and node.ctx == "store" and node.name in functions
        for node in _within(body)
    ):
        return None
    reads = _Reads(loop, [macros[name] for name in called], functions)
    rounds = [_output(NEXT), *(reads.rewritten(node) for node in loop.body)]
    begin = nodes.Call(
        _name(BEGIN), [loop.iter, nodes.Dict([_pair(name) for name in sorted(reads.names)])], [], None, None
    )
    body = [stopping(node) if isinstance(node, nodes.For) else node for node in body]
    body[at : at + 1] = [
        nodes.Assign(nodes.Name(_ITEMS, "store"), begin),
        nodes.For(loop.target, _name(_ITEMS), rounds, [], None, False),
        _output(END),
    ]
    rewritten = nodes.Template(body, lineno=1)
    rewritten.set_environment(environment)
    template = environment.from_string(rewritten)
    template.globals = dict(template.globals)
    return LoopForm(
        template,
        frozenset(reads.wholes),
        frozenset(reads.lists),
        {name: frozenset(read) for name, read in reads.attributes.items()},
        frozenset(reads.ordered),
        frozenset(reads.written),
    )


def _main_loop(body: Sequence[nodes.Node]) -> int | None:
    """The largest loop on the template's top level, if it is of the plain kind."""
    sizes = {
        at: sum(1 for _ in _within(node.body)) for at, node in enumerate(body) if isinstance(node, nodes.For)
    }
    at = max(sizes, key=sizes.__getitem__, default=None)
    if at is None:
        return None
    loop = body[at]
    assert isinstance(loop, nodes.For)
    is_plain = isinstance(loop.target, nodes.Name) and loop.target.name != _LOOP
    return at if is_plain and not loop.else_ and loop.test is None and not loop.recursive else None


def _calls(body: Sequence[nodes.Node], macros: Mapping[str, nodes.Macro]) -> Sequence[str] | None:
    """The macros that are called, and those that these call; None where functions or parts are not known."""
    called: list[str] = []
    pending: list[Sequence[nodes.Node]] = [body]
    while pending:
        part = pending.pop()
        calls = [
            node.node.name for node in _within(part) if isinstance(node, nodes.Call) and _is_name(node.node)
        ]
        functions = [node for node in _within(part) if _is_name(node) and node.name in {*macros, *_FUNCTIONS}]
        # All are called, and none is a value.
        if len(calls) != len(functions):
            return None
        for name in {*calls}.intersection(macros).difference(called):
            if not _is_known(macros[name].body, _MACRO_NODES):
                return None
            called.append(name)
            pending.append([macros[name]])
    return called


def _is_known(body: Sequence[nodes.Node], known: tuple[type[nodes.Node], ...]) -> bool:
    """Whether what is shown depends on nothing but what is read."""
    for node in _within(body):
        if not isinstance(node, known):
            return False
        match node:
            case nodes.Filter() if node.name not in _FILTERS or node.node is None:
                return False
            case nodes.Filter(name="map", args=[nodes.Const(value=name), *_]) if name not in _FILTERS:
                return False
            case nodes.Test() if node.name not in PURE_TESTS:
                return False
            case nodes.Getattr(node=nodes.Name(name=name), attr=attribute) if name == _LOOP:
                if attribute not in _PLACES:
                    return False
            case nodes.For(recursive=True):
                return False
            case nodes.Name(name="self" | "super" | "caller" | "varargs" | "kwargs"):
                return False
    # The loop itself, as a value or called.
    loops = sum(1 for node in _within(body) if isinstance(node, nodes.Name) and node.name == _LOOP)
    places = sum(
        1 for node in _within(body) if isinstance(node, nodes.Getattr) and _is_name(node.node, _LOOP)
    )
    return loops == places


class _Reads:
    """What a loop's rounds read from outside of it.

    Args:
        macros: Those that rounds may call.
        functions: Names that are no values.
    """

    def __init__(self, loop: nodes.For, macros: Sequence[nodes.Macro], functions: frozenset[str]) -> None:
        assert isinstance(loop.target, nodes.Name)
        self._not_read = functions | {loop.target.name, _LOOP}
        in_macros = _names_in(macros)
        indexed = [
            node.node
            for node in _within(loop.body)
            if isinstance(node, nodes.Getitem) and not _is_text(node.arg)
        ]
        self.lists = {node.name for node in indexed if isinstance(node, nodes.Name) and self.is_read(node)}
        self.lists |= _names_in([loop.iter]) | {MESSAGES}
        self.wholes = in_macros - self._not_read
        self.attributes: dict[str, set[str]] = {}
        self.ordered: set[Attribute] = set()
        self.written: set[tuple[str, str]] = set()
        for node in _within([*loop.body, *macros]):
            if isinstance(node, nodes.NSRef):
                self.written.add((node.name, node.attr))
        self._rewriter = _Rewriter(self)

    @property
    def names(self) -> set[str]:
        """All names whose values count."""
        others = {name for name, _ in (*self.ordered, *self.written)}
        return self.wholes | self.lists | set(self.attributes) | others

    def rewritten(self, node: nodes.Node) -> nodes.Node:
        """A part of a round that tells what it reads."""
        rewritten: nodes.Node = self._rewriter.visit(node)
        return rewritten

    def is_read(self, name: nodes.Name) -> bool:
        """Whether it stands for a value that may come from outside."""
        return name.ctx == "load" and name.name not in self._not_read


class _Rewriter(NodeTransformer):
    """Has rounds call the functions above for what may change while a conversation goes on."""

    def __init__(self, reads: _Reads) -> None:
        self._reads = reads

    def visit_Name(self, node: nodes.Name) -> nodes.Node:  # noqa: N802 (the name is Jinja's)
        """A value as it is."""
        if not self._reads.is_read(node):
            return node
        if node.name in self._reads.lists:
            return _call(WHOLE, nodes.Const(node.name), node)
        self._reads.wholes.add(node.name)
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        """A namespace's value, or a field."""
        name = node.node
        if (
            not isinstance(name, nodes.Name)
            or not self._reads.is_read(name)
            or name.name in self._reads.lists
        ):
            return self.generic_visit(node)
        self._reads.attributes.setdefault(name.name, set()).add(node.attr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """An item of a list, or some of its items."""
        name = node.node
        if (
            not isinstance(name, nodes.Name)
            or not self._reads.is_read(name)
            or name.name not in self._reads.lists
        ):
            return self.generic_visit(node)
        argument = self.visit(node.arg)
        if isinstance(argument, nodes.Slice):
            return _call(WHOLE, nodes.Const(name.name), nodes.Getitem(name, argument, "load"), name)
        return _call(ITEM, nodes.Const(name.name), name, argument)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Which of two is greater, of which one comes from outside."""
        if len(node.ops) != 1 or node.ops[0].op not in _ORDERS:
            return self.generic_visit(node)
        left, right = node.expr, node.ops[0].expr
        sides = [self._attribute(left), self._attribute(right)]
        if (sides[0] is None) == (sides[1] is None):
            return self.generic_visit(node)
        name, attribute = sides[0] or sides[1] or ("", None)
        self._reads.ordered.add((name, attribute))
        other = self.visit(right if sides[0] else left)
        values = (left, other) if sides[0] else (other, right)
        told = (
            nodes.Const(node.ops[0].op),
            nodes.Const(name),
            nodes.Const(attribute),
            nodes.Const(bool(sides[0])),
        )
        return _call(COMPARE, *told, _name(name), *values)

    def _attribute(self, node: nodes.Node) -> Attribute | None:
        match node:
            case nodes.Getattr(node=nodes.Name() as name, attr=attribute):
                return (name.name, attribute) if self._is_value(name) else None
            case nodes.Name():
                return (node.name, None) if self._is_value(node) else None
        return None

    def _is_value(self, name: nodes.Name) -> bool:
        return self._reads.is_read(name) and name.name not in self._reads.lists


def _within(body: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
    """All nodes of a part of a template."""
    pending = list(body)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.iter_child_nodes())


def _names_in(body: Sequence[nodes.Node]) -> set[str]:
    return {node.name for node in _within(body) if isinstance(node, nodes.Name) and node.ctx == "load"}


def _is_name(node: nodes.Node, name: str | None = None) -> TypeGuard[nodes.Name]:
    return isinstance(node, nodes.Name) and name in (None, node.name)


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _name(name: str) -> nodes.Name:
    return nodes.Name(name, "load")


def _pair(name: str) -> nodes.Pair:
    return nodes.Pair(nodes.Const(name), _name(name))


def _call(function: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(_name(function), list(arguments), [], None, None)


def _output(function: str) -> nodes.Output:
    return nodes.Output([_call(function)])
