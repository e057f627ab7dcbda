"""Static analysis of Hugging Face chat templates.

Determines whether a template takes a message's content in parts, and rewrites loops to exit once further
iterations can have no effect.
"""

from __future__ import annotations

from contextlib import suppress

from jinja2 import nodes

WHILE = "kvroute_while"  # name of `while_set` in rewritten templates

# Expressions that an iteration may evaluate before its condition: they neither fail nor have an effect.
_EFFECT_FREE = (nodes.Name, nodes.Const, nodes.Getattr, nodes.Filter, nodes.Sub, nodes.Add)


def with_loop_exits(template: nodes.Template) -> nodes.Template:
    """Rewrite outermost loops to exit once their further iterations can have no effect.

    Templates that search for the last question iterate over all messages from the end and clear a flag when
    they find it; the loop's body is conditional on the flag.
    """
    template.body = [with_early_exit(node) if isinstance(node, nodes.For) else node for node in template.body]
    return template


def with_early_exit(loop: nodes.For) -> nodes.For:
    """Return the loop, rewritten to exit when its flag is cleared if it has one."""
    if loop.else_ or loop.test is not None or loop.recursive or not loop.body:
        return loop
    *first, last = loop.body
    if not all(map(_has_no_effect, first)) or not isinstance(last, nodes.If) or last.elif_ or last.else_:
        return loop
    flag = last.test
    while isinstance(flag, nodes.And):
        flag = flag.left  # without which the condition is false
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


def _has_no_effect(node: nodes.Node) -> bool:
    if not isinstance(node, nodes.Assign) or not isinstance(node.target, nodes.Name):
        return False
    pending: list[nodes.Node] = [node.node]
    while pending:
        part = pending.pop()
        if not isinstance(part, _EFFECT_FREE):
            return False
        match part:
            case nodes.Filter() if part.name not in ("length", "count"):
                return False
            case nodes.Getattr(node=nodes.Name(name=name)) if name != "loop":
                return False
        pending.extend(part.iter_child_nodes())
    return True


_MESSAGES, _CONTENT = "messages", "content"


class _UnsupportedTargetError(Exception):
    """A loop assigns messages or parts to something other than a plain name."""


def wants_parts(template: nodes.Template) -> bool:
    """Return whether a template takes a message's content in parts.

    As vLLM's server does, it searches for a loop over a message's content, over a macro's argument with such
    a content, or over a variable named "content". If the analysis fails, contents are passed as texts.
    """
    with suppress(_UnsupportedTargetError):
        message_names = _message_names(template)
        # Id of a loop within a macro -> names of the macro's arguments that are contents.
        contents: dict[int, set[str]] = {}
        for macro in template.find_all(nodes.Macro):
            names = _content_arguments(template, macro, message_names)
            contents.update((id(loop), names) for loop in macro.find_all(nodes.For))
        for loop in template.find_all(nodes.For):
            if _is_content(loop.iter, message_names) or (
                isinstance(loop.iter, nodes.Name) and loop.iter.name in contents.get(id(loop), {_CONTENT})
            ):
                _target_name(loop.target)
                return True
    return False


def _message_names(template: nodes.Template) -> set[str]:
    """Return the variable names of messages in loops over all or some of them."""
    messages, found = {_MESSAGES}, 0
    while len(messages) > found:
        found = len(messages)
        messages |= {
            _target_name(assign.target)
            for assign in template.find_all(nodes.Assign)
            if _name(assign.node) in messages
        }
    return {
        _target_name(loop.target) for loop in template.find_all(nodes.For) if _name(loop.iter) in messages
    }


def _target_name(target: nodes.Node) -> str:
    """Return the name of an assignment's target, which must not be a namespace's attribute or a tuple."""
    if not isinstance(target, nodes.Name):
        raise _UnsupportedTargetError
    name: str = target.name
    return name


def _content_arguments(template: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    """Return the arguments of a macro for which some call passes a message's content."""
    names = [argument.name for argument in macro.args]
    given: set[str] = set()
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        by_name = [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        given |= {
            name
            for name, value in [*zip(names, call.args, strict=False), *by_name]
            if _is_content(value, message_names)
        }
    return given


def _is_content(node: nodes.Node, message_names: set[str]) -> bool:
    match _unwrapped(node):
        case nodes.Getattr(node=nodes.Name(name=name), attr=str(field)):
            return name in message_names and field == _CONTENT
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=str(field))):
            return name in message_names and field == _CONTENT
    return False


def _name(node: nodes.Node) -> str | None:
    """Return the name of the variable under filters, tests and slices, or None."""
    bare = _unwrapped(node)
    return bare.name if isinstance(bare, nodes.Name) else None


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    """Return a value without the filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node
