"""Loops over messages taken up again: the text of the whole template, whatever was left out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.looking_templates import LOOKING
from tests.unit.test_chat_turns import CHATML, FRAMED, TINY, TOKENS, VARYING
from tokenization.chat_template import ChatTemplate
from tokenization.errors import PromptError
from tokenization.loop_form import loop_form
from tokenization.loop_run import Rounds, Shown
from tokenization.template_environment import ENVIRONMENT

TEMPLATES = {
    name: ChatTemplate(source, TOKENS)
    for name, source in {
        **LOOKING,
        "tiny": TINY,
        "chatml": CHATML,
        "varying": VARYING,
        "framed": FRAMED,
    }.items()
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

Message = dict[str, Any]


def options(**changed: Any) -> dict[str, Any]:
    """Arguments of `render` but the messages."""
    plain = {"tools": None, "documents": None, "add_generation_prompt": True, "continue_final_message": False}
    return {**plain, "template_kwargs": {}, **changed}


def user(text: str = "why?") -> Message:
    """A question."""
    return {"role": "user", "content": text}


def says(text: str = "so", **more: Any) -> Message:
    """An answer."""
    return {"role": "assistant", "content": text, **more}


def calls(name: str = "look", times: int = 1, **more: Any) -> Message:
    """An answer that calls a tool."""
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": {"x": [1, None]}}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * times, **more}


def result(text: str = "dark") -> Message:
    """What a tool said."""
    return {"role": "tool", "tool_call_id": "1", "content": text}


def system(text: str = "be kind") -> Message:
    """What stands in front."""
    return {"role": "system", "content": text}


class Chat:
    """A conversation that goes on, rendered behind what is known of it.

    Attributes:
        left_out: How many rounds the last rendering left out; None: it was rendered as a whole.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.left_out: int | None = None
        self._template = template
        self._messages: list[Message] = []
        self._known: Rounds | None = None
        self._before = self._loop = ""

    def show(self, messages: Sequence[Message], given: Mapping[str, Any]) -> str | None:
        """What a template shows of messages that begin with the last ones; None where it refuses them."""
        self._messages = [*self._messages, *copy.deepcopy(messages[len(self._messages) :])]
        known, loop = self._known, self._loop
        shown = None if known is None else self._template.resume(self._messages, known, given)
        if shown is None or known is None or shown.before != self._before:
            known, loop = None, ""
            shown = self._template.resume(self._messages, None, given)
        self.left_out = known.shown if known is not None else None
        self._known = None
        if shown is None:
            return None
        self._remember(shown, loop, self.left_out or 0)
        return "".join((shown.before, loop, *shown.rounds, shown.behind))

    def _remember(self, shown: Shown, loop: str, left_out: int) -> None:
        if shown.resumable is not None:
            self._known, self._before = shown.resumable, shown.before
            self._loop = loop + "".join(shown.rounds[: shown.resumable.shown - left_out])


def whole(template: ChatTemplate, messages: Sequence[Message], given: Mapping[str, Any]) -> str | None:
    """What the template itself shows; None where it refuses."""
    try:
        return template.render(copy.deepcopy(messages), **given)
    except PromptError:
        return None


texts = st.sampled_from(["", "a", "<b", " c\n", "x</think>y", "é😀"])
reasoned = st.fixed_dictionaries({}, optional={"reasoning_content": st.sampled_from(["", "hm"])})
one = st.one_of(
    texts.map(user),
    st.builds(lambda text, more: says(text, **more), texts, reasoned),
    st.builds(lambda times, more: calls(times=times, **more), st.sampled_from([1, 1, 2]), reasoned),
    texts.map(result),
    texts.map(system),
)
asked = st.tuples(texts.map(user))
called = st.tuples(texts.map(user), st.builds(calls), st.builds(result), st.builds(result))
answered = st.tuples(texts.map(user), st.builds(says, texts))
turns = st.lists(st.one_of(answered, answered, called, st.tuples(one)), min_size=1, max_size=6)
changes = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([[TOOL], [TOOL, TOOL]]),
        "add_generation_prompt": st.just(False),
        "template_kwargs": st.sampled_from(
            [
                {"enable_thinking": False},
                {"enable_thinking": 0},
                {"date_string": "2 May"},
                {"content": "x"},
                {"ns": 1},
                {"call": "x"},
                {"messages": []},
                {"model_identity": "B"},
                {"loop": 1},
                {"other": [1]},
            ]
        ),
    },
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=120)
@given(
    first=st.lists(st.builds(system), max_size=1),
    turns=turns,
    last=asked,
    changed=st.lists(changes, max_size=7),
)
def test_whatever_is_left_out_the_text_is_the_whole_templates(
    name: str,
    first: list[Message],
    turns: list[tuple[Message, ...]],
    last: tuple[Message, ...],
    changed: list[Any],
) -> None:
    """A conversation that grows, with options that change, is shown as in one go, or refused as well."""
    template, messages = TEMPLATES[name], [*first]
    chat = Chat(template)
    for at, turn in enumerate([*turns, last]):
        messages += turn
        given = options(**(changed[at] if at < len(changed) else {}))
        expected = whole(template, messages, given)
        shown = chat.show(messages, given)
        # What is not shown at all is left to the whole template.
        assert shown == expected or shown is None


TALK = [user(), says(), user(), says(), user()]
TOOLED = [user(), calls(), result(), result(), says(), user()]


@pytest.mark.parametrize(
    ("name", "before", "behind", "changed", "left_out"),
    [
        *((name, TALK, [says(), user()], {}, 5) for name in ("asked", "stateful", "channels", "tiny")),
        ("fronted", TALK, [says(), user()], {}, 5),
        ("latest", TALK, [says(), user()], {}, 4),  # the last question asked whether it is
        ("fronted", [system(), *TALK], [says(), user()], {"tools": [TOOL]}, 4),
        ("places", TALK, [says()], {}, 4),  # the last one asked what comes behind it
        ("places", [user(), system(), user()], [says()], {}, 1),  # how many there are
        # The last question is another one, which only what stood behind the former had asked.
        ("asked", TOOLED[:-2], [calls(), result()], {}, 3),
        ("asked", TOOLED[:-2], [says(), user()], {}, None),
        ("asked", TOOLED, [says(), user()], {}, 6),
        ("asked", [user(), calls(), result()], [says()], {}, 2),
        # With tools each question asks whether it is the last one.
        ("latest", TALK, [says(), user()], {"tools": [TOOL]}, None),
        ("stateful", TOOLED, [calls(), result()], {}, 6),
        ("stateful", TOOLED, [system()], {}, None),  # it is shown in front
        # A call asks whether an answer follows.
        ("channels", TOOLED, [calls(), result()], {}, 1),
    ],
)
def test_rounds_are_left_out_as_far_as_nothing_can_change_them(
    name: str, before: list[Message], behind: list[Message], changed: dict[str, Any], left_out: int | None
) -> None:
    """The longer conversation is shown without the rounds that are the same in it, and no others."""
    template, given = TEMPLATES[name], options(**changed)
    chat = Chat(template)
    assert chat.show(before, given) == whole(template, before, given)
    assert chat.left_out is None
    assert chat.show([*before, *behind], given) == whole(template, [*before, *behind], given)
    assert chat.left_out == left_out


CALLED = "{% if m.name %}{% set ns.n = 1 %}{% endif %}"
CALLING = "{% macro f() %}{% set ns.n = 1 %}{% endmacro %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOP = "{% for m in messages %}{{ BODY }}{{ m.content }}{% endfor %}"
NS = "{% set ns = namespace(n=N) %}"


@pytest.mark.parametrize(
    ("source", "then"),
    [
        (LOOP.replace("BODY", "x"), {"x": "b"}),
        (LOOP.replace("BODY", "x"), {"x": 1}),  # equal to True, and shown otherwise
        (LOOP.replace("BODY", "x.y"), {"x": {"y": 2}}),
        (LOOP.replace("BODY", "x['y']"), {"x": {"y": 2}}),
        (LOOP.replace("BODY", "x | tojson"), {"x": {"y": True}}),
        (LOOP.replace("BODY", "x is mapping"), {"x": [1]}),
        (LOOP.replace("BODY", "1 < x"), {"x": 1}),
        (LOOP.replace("BODY", "x >= 2"), {"x": 1}),
        ("{% set y = x %}" + LOOP.replace("BODY", "y"), {"x": "b"}),
        ("{% macro f() %}{{ x }}{% endmacro %}" + LOOP.replace("BODY", "f()"), {"x": "b"}),
        (
            "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ x }}{% endmacro %}"
            + LOOP.replace("BODY", "f()"),
            {"x": "b"},
        ),
        (NS.replace("N", "x") + LOOP.replace("BODY", "ns.n"), {"x": "b"}),
        (NS.replace("N", "x") + LOOP.replace("BODY", "m.role if ns.n > 1"), {"x": 1}),
        (
            NS.replace("N", "x")
            + LOOP.replace("{{ BODY }}", "{% set ns.n = ns.n ~ m.role %}")
            + "{{ ns.n }}",
            {"x": "b"},
        ),
        ("{% if x != true %}{% set messages = messages[1:] %}{% endif %}" + PLAIN, {"x": 1.5}),
        (NS.replace("N", "x") + LOOP.replace("{{ BODY }}", CALLED) + "{{ ns.n }}", {"x": "b"}),
        (
            NS.replace("N", "x") + CALLING + LOOP.replace("BODY", "f() if m.tool_calls") + "{{ ns.n }}",
            {"x": "b"},
        ),
        ("{% set l = x or [1, 2] %}" + LOOP.replace("BODY", "l[0]"), {"x": [3, 2]}),
        ("{% set l = x or [1, 2] %}" + LOOP.replace("BODY", "l[1:]"), {"x": [3, 2]}),
        (
            "{% set l = messages | map(attribute='role') | list %}" + LOOP.replace("BODY", "l[-1]"),
            {"x": True},
        ),
    ],
)
def test_what_has_changed_is_shown_anew(source: str, then: dict[str, Any]) -> None:
    """A value that rounds have read, by whatever way, is another one: none of them is left out."""
    template = ChatTemplate(source, {})
    before, after = options(template_kwargs={"x": True}), options(template_kwargs=then)
    if "y" in source and "set y" not in source:
        before = options(template_kwargs={"x": {"y": 1}})
    elif ">" in source or "<" in source.replace("</", ""):
        before = options(template_kwargs={"x": 2})
    elif "or [1, 2]" in source:
        before = options()
    chat = Chat(template)
    assert chat.show(TALK, before) == whole(template, TALK, before)
    longer = [*TALK, says(), calls()]
    assert chat.show(longer, after) == whole(template, longer, after)
    assert chat.left_out is None


@pytest.mark.parametrize(
    "source",
    [
        "no loop",
        "{% if x %}" + LOOP + "{% endif %}",
        LOOP.replace("BODY", "strftime_now('%s')"),
        LOOP.replace("BODY", "x | random"),
        LOOP.replace("BODY", "loop.changed(m)"),
        LOOP.replace("BODY", "loop.cycle(1, 2)"),
        LOOP.replace("BODY", "f(loop)"),
        LOOP.replace("BODY", "loop"),
        LOOP.replace("BODY", "loop['last']"),
        LOOP.replace("{{ BODY }}", "{% set l = loop %}{{ l.last }}"),
        LOOP.replace("BODY", "m | map('random')"),
        LOOP.replace("BODY", "range"),
        "{% macro f() %}{% endmacro %}" + LOOP.replace("BODY", "f"),
        "{% macro f() %}{% endmacro %}{% set f = x %}" + LOOP.replace("BODY", "f()"),
        "{% set range = x %}" + LOOP.replace("BODY", "range(1)"),
        LOOP.replace("BODY", "x()"),
        LOOP.replace("BODY", "joiner()"),
        LOOP.replace("{{ BODY }}", "{% break %}"),
        LOOP.replace("{{ BODY }}", "{% macro f() %}{% endmacro %}{{ f() }}"),
        LOOP.replace("{{ BODY }}", "{% block b %}{% endblock %}"),
        LOOP.replace("{{ BODY }}", "{% filter upper %}a{% endfilter %}"),
        "{% macro f() %}{{ strftime_now('%s') }}{% endmacro %}" + LOOP.replace("BODY", "f()"),
        "{% macro f() %}{{ caller() }}{% endmacro %}"
        + LOOP.replace("{{ BODY }}", "{% call f() %}{% endcall %}"),
        "{% for m in messages if m %}{{ m }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% else %}{{ 1 }}{% endfor %}",
        "{% for m in messages recursive %}{{ m }}{% endfor %}",
        "{% for m, n in messages %}{{ m }}{% endfor %}",
    ],
)
def test_templates_that_may_do_more_are_rendered_as_a_whole(source: str) -> None:
    """Where a round may depend on anything but what it reads, the loop is not taken up again."""
    assert loop_form(ENVIRONMENT, source) is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[3:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages[:2] %}{{ m.content }}{% endfor %}",
        "{% for m in messages | list + messages %}{{ m.content }}{% endfor %}",
        "{% for m in 'abc' %}{{ m }}{% endfor %}",
        "{% set l = namespace(x=[1]) %}" + LOOP.replace("BODY", "l.x"),
        "{% set l = namespace(x=namespace(y=1)) %}" + LOOP.replace("BODY", "l.x.y"),
        "{% set l = namespace(x=1) %}" + LOOP.replace("BODY", "l"),
        "{% set l = [namespace(x=1)] %}" + LOOP.replace("BODY", "l[:1]"),
    ],
)
def test_loops_over_anything_else_are_rendered_as_a_whole(source: str) -> None:
    """Only a loop over all messages, but for one or two in front, goes on as a conversation does."""
    template = ChatTemplate(source, {})
    chat = Chat(template)
    chat.show(TALK, options())
    longer = [*TALK, says(), user()]
    assert chat.show(longer, options()) in (None, whole(template, longer, options()))
    assert chat.left_out is None


@pytest.mark.parametrize(
    "source",
    [
        "{% set l = x %}" + LOOP.replace("BODY", "l[0] if loop.first"),
        NS.replace("N", "x[0]") + LOOP.replace("BODY", "ns.n > 1 if loop.first"),
        NS.replace("N", "x[0]") + LOOP.replace("BODY", "ns.n if loop.first"),
    ],
)
def test_what_rounds_read_counts_however_often_they_were_left_out(source: str) -> None:
    """A value that the first round alone has read is another one only two turns later: then all is shown."""
    template, read = ChatTemplate(source, {}), [1, 2]
    chat = Chat(template)
    for turn in range(1, 4):
        given = options(template_kwargs={"x": read if turn < 3 else [2, 2]})
        messages = [*TALK, says(), user()][: 2 * turn + 1]
        assert chat.show(messages, given) == whole(template, messages, given)
        assert chat.left_out == (2 * turn - 1 if turn == 2 else None)


@pytest.mark.parametrize("order", ["<", "<=", ">", ">="])
@pytest.mark.parametrize("turned", [False, True])
def test_a_comparison_counts_by_its_outcome(order: str, turned: bool) -> None:
    """Rounds are left out for each number with which all comparisons come out the same, and no other."""
    test = f"ns.n {order} loop.index0" if turned else f"loop.index0 {order} ns.n"
    source = NS.replace("N", "x") + LOOP.replace("BODY", f"'yes' if {test} else 'no'")
    template, longer = ChatTemplate(source, {}), [*TALK, says()]
    shown = {}
    for first in range(-1, 7):
        given = options(template_kwargs={"x": first})
        shown[first] = whole(template, TALK, given)
    for first in shown:
        for then in shown:
            chat = Chat(template)
            chat.show(TALK, options(template_kwargs={"x": first}))
            given = options(template_kwargs={"x": then})
            assert chat.show(longer, given) == whole(template, longer, given)
            assert (chat.left_out == len(TALK)) == (shown[first] == shown[then])


def test_what_a_template_takes_for_its_functions_is_not_a_clients() -> None:
    """A client's template options do not stand for the functions that tell of rounds."""
    given = options(template_kwargs={"kvroute_next": "x", "kvroute_begin": 1, "kvroute_items": [1]})
    chat = Chat(TEMPLATES["asked"])
    assert chat.show(TALK, given) == whole(TEMPLATES["asked"], TALK, given)
