"""The Jinja environment of Hugging Face chat templates: a source in, a template out that may do no harm.

The same sandbox as transformers', with short ways to what templates ask for at every message: a message's
fields, the loop's place, a namespace's values, methods of texts. Knows no messages.
"""

from __future__ import annotations

import json
import threading
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


ENVIRONMENT = _environment()
"""All templates': those of transformers, down to what stands around blocks."""
