"""Fast paths of the template environment: the same results as Jinja's own sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenization.templates.chat_template import ENVIRONMENT

SANDBOX = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)


class Text(str):
    """Subclass of str, whose methods the sandbox must check."""

    __slots__ = ()

    def strip(self, chars: str | None = None) -> str:
        return f"{chars}!"


def loop() -> LoopContext:
    """Return a loop context in the second of three iterations."""
    rounds = LoopContext([{"role": "user"}, {"role": "tool"}, {}], SANDBOX.undefined)
    next(rounds), next(rounds)
    return rounds


OBJECTS: dict[str, Callable[[], object]] = {
    "text": lambda: "a {0.__class__} b",
    "text of another type": lambda: Text("a {0.__class__} b"),
    "message": lambda: {"role": "user", "items": 1, "get": 2, "_own": 3, "format": 4},
    "list": lambda: [1, 2],
    "number": lambda: 1,
    "nothing": lambda: None,
    "function": lambda: loop,
    "method": lambda: "a".strip,
    "undefined": lambda: SANDBOX.undefined(name="x"),
    "loop": loop,
    "namespace": lambda: Namespace(
        role="a", index=1, none=None, _own=1, text="{}".format, call=len, strip="".strip, inner=Namespace()
    ),
}
NAMES = sorted(
    {name for kind in (str, dict, list, int, LoopContext, Namespace) for name in dir(kind)}
    | {"role", "none", "_own", "text", "call", "inner", "__globals__", "__code__", "missing", ""}
)


def seen(environment: ImmutableSandboxedEnvironment, obj: object, name: str) -> tuple[object, ...]:
    """Return an attribute's type and value as a template sees them, or the error."""
    try:
        value = environment.getattr(obj, name)
    except jinja2.UndefinedError as error:
        return type(error), str(error)
    if isinstance(value, Undefined):
        return Undefined, value._undefined_exception, value._undefined_message
    if callable(value):
        # A function wrapped by the sandbox is a new object each time.
        return type(value), value.__name__
    return type(value), repr(value).partition(" at 0x")[0]


@pytest.mark.parametrize("kind", OBJECTS)
def test_attributes_equal_those_of_the_sandbox(kind: str) -> None:
    """Any attribute of any value has the result of Jinja's sandbox: a value, unsafe or undefined."""
    for name in NAMES:
        assert seen(ENVIRONMENT, OBJECTS[kind](), name) == seen(SANDBOX, OBJECTS[kind](), name), name


CALLS = [
    "text.split(' ', 1)",
    "text.strip(chars='a')",
    "text.format(text)",
    "text.format_map(message)",
    "text.nothing()",
    "text.split(1)",
    "other.strip()",
    "message.get('role')",
    "message.get('none', 'x')",
    "message.items() | list",
    "message.pop('role')",
    "message.update(message)",
    "list.append(1)",
    "list.index(2)",
    "ns.call(text)",
    "ns.text(text)",
    "ns.strip()",
    "ns.missing()",
    "loop.cycle(1, 2)",
    "loop.changed(message)",
    "loop.index0.bit_length()",
    "loop.__init__()",
    "text.__class__.__mro__",
    "text.strip.__self__",
    "range(3) | list",
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_equal_those_of_the_sandbox(call: str) -> None:
    """Method calls without context return or raise the same as in Jinja's sandbox."""
    source = f"{{% for x in list %}}{{{{ {call} }}}}|{{% endfor %}}"

    def outcome(environment: ImmutableSandboxedEnvironment) -> str:
        given = {"text": OBJECTS["text"](), "other": OBJECTS["text of another type"](), "list": [1, 2]}
        message, ns = OBJECTS["message"](), OBJECTS["namespace"]()
        try:
            return environment.from_string(source).render(**given, message=message, ns=ns)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            return f"{type(error).__name__}: {error}"

    assert outcome(ENVIRONMENT) == outcome(SANDBOX)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=values,
    options=st.fixed_dictionaries(
        {},
        optional={
            "indent": st.sampled_from([0, 2, 4]),
            "ensure_ascii": st.booleans(),
            "sort_keys": st.booleans(),
            "separators": st.sampled_from([(",", ":"), (", ", ": ")]),
        },
    ),
)
def test_json_is_written_as_by_the_json_module(value: Any, options: dict[str, Any]) -> None:
    """`tojson` gives the text of json.dumps for all options, also when it is cached."""
    expected = json.dumps(value, **{"ensure_ascii": False, **options})
    for _ in range(2):
        assert ENVIRONMENT.filters["tojson"](value, **options) == expected
