"""Whether a chat template takes a message's content in parts: its syntax in, yes or no out.

Engines then hand it every content in that form. vLLM's server looks for a loop over a message's content, over
a macro's argument that is one, or over a variable of that name, and so does this; what its look fails on gets
texts. Renders nothing.
"""

from __future__ import annotations

from jinja2 import nodes

_MESSAGES, _CONTENT = "messages", "content"


class _UnnamedError(Exception):
    """Messages, or parts, go by something else than a plain name."""


def wants_parts(template: nodes.Template) -> bool:
    """Says whether a template iterates over a message's `content`."""
    try:
        return _wants_parts(template)
    except _UnnamedError:
        return False


def _wants_parts(template: nodes.Template) -> bool:
    turns = _turn_names(template)
    # A loop within a macro -> names of the macro's arguments that are contents.
    contents: dict[int, set[str]] = {}
    for macro in template.find_all(nodes.Macro):
        names = _content_arguments(template, macro, turns)
        contents.update((id(loop), names) for loop in macro.find_all(nodes.For))
    for loop in template.find_all(nodes.For):
        if _is_content(loop.iter, turns) or (
            isinstance(loop.iter, nodes.Name) and loop.iter.name in contents.get(id(loop), {_CONTENT})
        ):
            _named(loop.target)
            return True
    return False


def _turn_names(template: nodes.Template) -> set[str]:
    """What loops over the messages, or over some of them, call a message."""
    messages, found = {_MESSAGES}, 0
    while len(messages) > found:
        found = len(messages)
        messages |= {
            _named(assign.target)
            for assign in template.find_all(nodes.Assign)
            if _name(assign.node) in messages
        }
    return {_named(loop.target) for loop in template.find_all(nodes.For) if _name(loop.iter) in messages}


def _named(target: nodes.Node) -> str:
    """The name of what is assigned to.

    Raises:
        _UnnamedError: It is a namespace's attribute, or are several.
    """
    if not isinstance(target, nodes.Name):
        raise _UnnamedError
    name: str = target.name
    return name


def _content_arguments(template: nodes.Template, macro: nodes.Macro, turns: set[str]) -> set[str]:
    """The arguments of a macro that it is somewhere given a message's content for."""
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        by_name = [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        given |= {
            name
            for name, value in [*zip(names, call.args, strict=False), *by_name]
            if _is_content(value, turns)
        }
    return given


def _is_content(node: nodes.Node, turns: set[str]) -> bool:
    match _bare(node):
        case nodes.Getattr(node=nodes.Name(name=name), attr=str(field)):
            return name in turns and field == _CONTENT
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=str(field))):
            return name in turns and field == _CONTENT
    return False


def _name(node: nodes.Node) -> str | None:
    """The variable that a value is, or is taken from; None for any other."""
    bare = _bare(node)
    return bare.name if isinstance(bare, nodes.Name) else None


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """A value without the filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node
