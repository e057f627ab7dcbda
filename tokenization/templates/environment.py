"""The Jinja environment of Hugging Face chat templates: a source in, a template out that may do no harm.

The same sandbox as transformers', with short ways to what templates ask for at every message: a message's
fields, the loop's place, a namespace's values, methods of texts. Of a template's syntax it tells whether the
template takes a message's content in parts, and ends loops whose further rounds can do nothing. Knows no
messages.
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

WHILE = "kvroute_while"  # `while_set`, as rewritten templates call it

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
    """The template with outermost loops that end where nothing can come of their rounds any more.

    Templates that look for the last question go through all messages from the end and note by a flag that
    they have found it; all that they do is asked for only while the flag is set.
    """
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


_MESSAGES, _CONTENT = "messages", "content"


class _UnnamedError(Exception):
    """Messages, or parts, go by something else than a plain name."""


def wants_parts(template: nodes.Template) -> bool:
    """Says whether a template takes a message's content in parts: engines then hand it every content so.

    vLLM's server looks for a loop over a message's content, over a macro's argument that is one, or over a
    variable of that name, and so does this; what its look fails on gets texts.
    """
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


_DICT_ATTRIBUTES = frozenset(dir(dict))
# Of methods, those that change nothing and run no format, which the sandbox lets through as they are.
_DICT_METHODS = frozenset({"get", "items", "keys", "values"})
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_PLACES = frozenset(
    {"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"}
)
# What is none of these may be a function, which the sandbox has a look at.
_VALUES = frozenset({str, int, float, bool, list, dict, type(None)})
# What Jinja's code hands to functions that ask for the context.
_CONTEXT_ARGUMENTS = ("_block_vars", "_loop_vars")
# JSON with indents, by the same without; counted in characters, of which most are tools' texts.
_INDENTED: LRUCache[tuple[object, ...], str] = LRUCache(2 << 20, getsizeof=len)
_INDENTED_LOCK = threading.Lock()


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; rendering only shows what is inside."""

    tags = {"generation"}  # noqa: RUF012  (as the base class has it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Reads the block up to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that knows what is harmless by its type; all else it looks at as Jinja does."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """What `obj.attribute` is: of a dict, an item, where it has no attribute of that name."""
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
            if attribute in _LOOP_PLACES:
                return getattr(obj, attribute)
        elif kind is Namespace and attribute[:1] != "_":
            value = getattr(obj, attribute, Namespace)
            if type(value) in _VALUES:
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls a function; a method of a text or a dict needs no context."""
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) in (str, dict):
            for name in _CONTEXT_ARGUMENTS:
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


@lru_cache(maxsize=256)
def _missing(name: str) -> jinja2.Undefined:
    """What a dict's missing field is; made once, as most messages lack the same fields."""
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
    # Jinja's own filter escapes for HTML, which models were not trained on.
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    # The json module indents in Python, ten times slower, and a client's tools are the same each time.
    plain = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    key = plain, indent, separators
    with _INDENTED_LOCK:
        text: str | None = _INDENTED.get(key)
    if text is None:
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        with suppress(ValueError), _INDENTED_LOCK:  # too large to be kept
            _INDENTED[key] = text
    return text


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _environment()  # all templates': those of transformers, down to what stands around blocks
