"""Jinja environment of Hugging Face chat templates, and static analysis of templates.

The sandbox is that of transformers, with fast paths for frequent operations: a message's fields, attributes
of loops and namespaces, methods of strings. The analysis determines whether a template takes a message's
content in parts, and rewrites loops to exit once further iterations can have no effect.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

import jinja2
from cachetools import LRUCache
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

WHILE = "kvroute_while"  # name of `while_set` in rewritten templates

# Expressions that an iteration may evaluate before its condition: they neither fail nor have an effect.
_EFFECT_FREE = (nodes.Name, nodes.Const, nodes.Getattr, nodes.Filter, nodes.Sub, nodes.Add)


def while_set(items: Iterable[Any], namespace: Any, flag: str) -> Iterable[Any]:
    """Return an iterator of the items that ends when the namespace's flag is cleared."""
    return _while_set(items, namespace, flag) if type(namespace) is Namespace else items


def _while_set(items: Iterable[Any], namespace: Any, flag: str) -> Iterator[Any]:
    for item in items:
        if not getattr(namespace, flag, True):
            return
        yield item


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
    flag = _first_condition(last.test)
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


def _first_condition(test: nodes.Node) -> nodes.Node:
    """Return the first operand of a conjunction, without which the condition is false."""
    while isinstance(test, nodes.And):
        test = test.left
    return test


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
    try:
        return _wants_parts(template)
    except _UnsupportedTargetError:
        return False


def _wants_parts(template: nodes.Template) -> bool:
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
    """Return the name of an assignment's target.

    Raises:
        _UnsupportedTargetError: The target is a namespace's attribute or a tuple.
    """
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


_DICT_ATTRIBUTES = frozenset(dir(dict))
# Methods that change nothing and format nothing, which the sandbox allows unwrapped.
_DICT_METHODS = frozenset({"get", "items", "keys", "values"})
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_ATTRIBUTES = frozenset(
    {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
)
# Values of other types may be functions, which the sandbox must check.
_VALUES = frozenset({str, int, float, bool, list, dict, type(None)})
# Arguments that Jinja passes to functions with context.
_CONTEXT_ARGUMENTS = ("_block_vars", "_loop_vars")
# Cache from compact to indented JSON, mostly of tools; its size is counted in characters.
_INDENTED: LRUCache[tuple[object, ...], str] = LRUCache(2 << 20, getsizeof=len)
_INDENTED_LOCK = threading.Lock()


class _Generation(Extension):
    """Extension for `{% generation %}`, which marks model output for training; renders the block's body."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox with fast paths for types that are known to be safe."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute`; for a dict without such an attribute, the item."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                return obj[attribute] if attribute in obj else _missing(attribute)
            if attribute in _DICT_METHODS:
                return getattr(obj, attribute)
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, Namespace)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function; a method of a string or dict is called without context."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) in (str, dict):
            for name in _CONTEXT_ARGUMENTS:
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


@lru_cache(maxsize=256)
def _missing(name: str) -> jinja2.Undefined:
    """Return the undefined value of a missing field; cached, because most messages lack the same fields."""
    return ENVIRONMENT.undefined(obj={}, name=name)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    # Cached, because json is ten times slower with indents and a client's tools are always the same.
    plain = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    key = plain, indent, separators
    with _INDENTED_LOCK:
        text: str | None = _INDENTED.get(key)
    if text is None:
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        with suppress(ValueError), _INDENTED_LOCK:  # ValueError: larger than the cache
            _INDENTED[key] = text
    return text


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _environment()  # of all templates, with the whitespace options of transformers
