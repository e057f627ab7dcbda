"""Rounds of a template's loop that can do nothing any more: a loop in, one that ends before them out.

Templates that look for the last question go through all messages from the end and note by a flag that they
have found it; all that they do is asked for only while the flag is set. Renders nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import nodes
from jinja2.utils import Namespace

WHILE = "kvroute_while"
"""`while_set`, as rewritten templates call it."""

# What a round may work out before it asks: none of it fails or changes anything.
_HARMLESS = (nodes.Name, nodes.Const, nodes.Getattr, nodes.Filter, nodes.Sub, nodes.Add)


def while_set(items: Iterable[Any], namespace: Any, flag: str) -> Iterable[Any]:
    """The items up to the round in which the namespace's flag is cleared."""
    return _while_set(items, namespace, flag) if type(namespace) is Namespace else items


def _while_set(items: Iterable[Any], namespace: Any, flag: str) -> Iterator[Any]:
    for item in items:
        if not getattr(namespace, flag, True):
            return
        yield item


def without_idle_rounds(template: nodes.Template) -> nodes.Template:
    """The template with outermost loops that end where nothing can come of their rounds any more."""
    template.body = [stopping(node) if isinstance(node, nodes.For) else node for node in template.body]
    return template


def stopping(loop: nodes.For) -> nodes.For:
    """The loop, which ends where its flag is cleared if it has one."""
    if loop.else_ or loop.test is not None or loop.recursive or not loop.body:
        return loop
    *first, last = loop.body
    if not all(map(_is_harmless, first)) or not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return loop
    flag = _first_asked(last.test)
    if not isinstance(flag, nodes.Getattr) or not isinstance(flag.node, nodes.Name):
        return loop
    assigned = {node.target.name for node in first if isinstance(node, nodes.Assign)}  # type: ignore[attr-defined]
    named = {name.name for name in loop.target.find_all(nodes.Name)} | {getattr(loop.target, "name", "")}
    looks_ahead = any(
        node.attr not in ("index", "index0", "first")
        for node in loop.find_all(nodes.Getattr)
        if isinstance(node.node, nodes.Name) and node.node.name == "loop"
    )
    if flag.node.name in assigned | named or looks_ahead:
        return loop
    arguments = [loop.iter, flag.node, nodes.Const(flag.attr)]
    items = nodes.Call(nodes.Name(WHILE, "load"), arguments, [], None, None)
    return nodes.For(loop.target, items, loop.body, [], None, False, lineno=loop.lineno)


def _first_asked(test: nodes.Node) -> nodes.Node:
    """What a condition asks for before all else, without which it does not hold."""
    while isinstance(test, nodes.And):
        test = test.left
    return test


def _is_harmless(node: nodes.Node) -> bool:
    if not isinstance(node, nodes.Assign) or not isinstance(node.target, nodes.Name):
        return False
    pending: list[nodes.Node] = [node.node]
    while pending:
        part = pending.pop()
        if not isinstance(part, _HARMLESS):
            return False
        match part:
            case nodes.Filter() if part.name not in ("length", "count"):
                return False
            case nodes.Getattr(node=nodes.Name(name=name)) if name != "loop":
                return False
        pending.extend(part.iter_child_nodes())
    return True
