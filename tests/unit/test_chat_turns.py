"""Conversations rendered turn by turn: the same text as the whole template's, or not at all."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.unit.test_chat_templates import MISTRAL
from tokenization import TINY_DIRECTORY, PromptError
from tokenization.chat_messages import PlainMessage
from tokenization.chat_template import ChatTemplate
from tokenization.content_form import content_form
from tokenization.turn_form import turn_form
from tokenization.turns import Turns

TINY = (TINY_DIRECTORY / "chat_template.jinja").read_text()
CHATML = """\
{%- for message in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
VARYING = """\
{{- bos_token }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
{%- for message in messages -%}
{%- set shown = message.content.strip() if enable_thinking else message.content %}
{%- for word in shown.split(' ') %}{{ loop.index ~ word }}{% if loop.last %}.{% endif %}{% endfor %}
{{- message }}|{% if not loop.first %}{{ messages[0].content | length }}{% endif %}
{%- endfor %}{{ messages | length }}{{ messages[-1].role }}
"""
FRAMED = """\
{%- for message in messages %}{{ messages[0].content }}
{%- if message.content and message.role != 'system' %}[{{ message['content'] ~ message.role }}
{{- '|' + message.content if message.content is string and not message.tool_calls else 'x' }}]
{%- elif not message.content %}-{% else %}{{ message.name }}{% endif %}
{%- if message is sameas messages[0] %}first{% endif %}{% endfor %}
"""
DOUBTFUL = """\
{%- for message in messages %}{{ message.content or 'nothing' }}{{ message.content | trim | length }}
{%- if message.content == 'a' or 'T' in message.content %}!{% endif %}
{%- for key, value in message.items() %}{{ key ~ value }}{% endfor %}{{ message.content ~ 1 }}{% endfor %}
"""
SOURCES = {
    "tiny": TINY,
    "mistral": MISTRAL,
    "chatml": CHATML,
    "varying": VARYING,
    "framed": FRAMED,
    "doubtful": DOUBTFUL,
}
SHOWN_AS = {"tiny": str, "mistral": str, "chatml": str.strip, "framed": str}
LOOPS = "{% for message in messages %}{{ BODY }}{% endfor %}"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Kept over all examples, so that what one leaves behind can harm the next.
REMEMBERING = {name: ChatTemplate(source, TOKENS) for name, source in SOURCES.items()}


def whole(source: str, **variables: Any) -> str:
    """What the template renders in one go, or the error that it raises."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    known = {**TOKENS, "tools": None, "documents": None, **variables}
    try:
        return environment.from_string(source).render(known)
    except (jinja2.TemplateError, TypeError) as error:
        return type(error).__name__


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages out of few roles and texts, so that they meet again; some carry more than that."""
    roles = st.sampled_from(["system", "user", "assistant"])
    texts = st.one_of(st.sampled_from(["", "a", "True", " b c ", "{{ x }}"]), st.text(max_size=5))
    plain = st.fixed_dictionaries({"role": roles, "content": texts})
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    more = st.fixed_dictionaries({"role": roles, "content": texts, "tool_calls": st.just([call])})
    return draw(st.lists(st.one_of(plain, plain, plain, more), min_size=1, max_size=6))


@pytest.mark.parametrize("name", SOURCES)
@settings(deadline=None, max_examples=150)
@given(
    messages=conversations(),
    kwargs=st.dictionaries(
        st.sampled_from(["enable_thinking", "other"]), st.sampled_from([True, False, 1, 0, "1", None, [1]])
    ),
    opens=st.booleans(),
)
def test_turn_by_turn_is_as_in_one_go(
    name: str, messages: list[dict[str, Any]], kwargs: dict[str, Any], opens: bool
) -> None:
    """Whatever was rendered before, a conversation's text is that of the whole template, errors too."""
    expected = whole(SOURCES[name], messages=messages, add_generation_prompt=opens, **kwargs)
    try:
        got = REMEMBERING[name].render(messages, add_generation_prompt=opens, template_kwargs=kwargs)
    except PromptError:
        got = "TemplateError"
    assert got == expected


@pytest.mark.parametrize("name", SOURCES)
def test_these_templates_are_taken_apart(name: str) -> None:
    """The templates above are rendered turn by turn, else this file would prove nothing."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    form = turn_form(environment, SOURCES[name], "mark")
    assert form is not None
    assert form.shown_as is SHOWN_AS.get(name)


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{% set messages = messages[1:] %}{% for message in messages %}{{ message }}{% endfor %}",
        "{% for message in messages %}{{ message }}{% endfor %}{% set x = 1 %}{{ x }}",
        "{% for message in messages %}{{ message }}{% else %}none{% endfor %}",
        "{% for message in messages if message.role == 'user' %}{{ message }}{% endfor %}",
        "{% for message in messages[1:] %}{{ message }}{% endfor %}",
        "{% for a, b in messages %}{{ a }}{% endfor %}",
        "{% for m in messages %}{{ m }}{% endfor %}{% for m in messages %}{{ m }}{% endfor %}",
        "{% macro show(m) %}{{ m }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{% if messages %}{% for m in messages %}{{ m }}{% endfor %}{% endif %}",
        *(
            LOOPS.replace("BODY", body)
            for body in (
                "loop.last",
                "loop.index0",
                "loop.previtem",
                "loop.cycle('a', 'b')",
                "loop['last']",
                "messages[-1].content",
                "messages[loop.index0 - 1]",
                "messages | length",
                "message.content | random",
                "lipsum()",
                "cycler('a', 'b').next()",
                "strftime_now('%d')",
                "messages.append(1)",
                "self",
                "loop.last is sameas messages[0]",
                "message is sameas(messages[0], *cycler('a'))",
            )
        ),
        "{% for m in messages %}{% for p in [1] %}{{ p }}{% endfor %}{{ loop.last }}{% endfor %}",
        "{% for m in messages %}{% for p in messages %}{{ p }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set messages = [] %}{{ m }}{% endfor %}",
    ],
)
def test_what_is_not_surely_apart_stays_whole(source: str) -> None:
    """A template whose turns know of one another, or of anything that changes, is never taken apart."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert turn_form(environment, source, "mark") is None


def test_a_turn_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn of a conversation renders its new messages, and no others."""
    environment = ImmutableSandboxedEnvironment()
    turns = Turns.of(environment, "{% for m in messages %}{{ m.content | upper }};{% endfor %}")
    assert turns is not None
    rendered = renderings(monkeypatch)
    talk = [{"role": "user", "content": str(number)} for number in range(10)]
    for length in (4, 4, 6, 10):
        text = turns.render({"messages": talk[:length]}, {})
        assert text == "".join(f"{number};" for number in range(length))
    # The two ends, once, and the turns.
    assert rendered == [0, 0, 4, 2, 4]


def test_a_content_is_put_in_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where turns show a content as it is, later messages cost one rendering for each role."""
    turns = Turns.of(ImmutableSandboxedEnvironment(), LOOPS.replace("BODY", "message.role ~ message.content"))
    assert turns is not None
    rendered = renderings(monkeypatch)
    talk = [{"role": "u" if number % 2 else "a", "content": f" {number}"} for number in range(10)]
    for length in (1, 4, 6, 10):
        text = turns.render({"messages": talk[:length]}, {})
        assert text == "".join(f"{'u' if number % 2 else 'a'} {number}" for number in range(length))
    # The two ends, the first message, and each role.
    assert rendered == [0, 0, 1, 1, 1]


def test_frames_are_shared_where_turns_ask_only_whether_they_are_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conversations that begin differently share their frames, unless turns show what the first one says."""
    body = "{{ message.role }}{{ message.content }}{% if message is sameas messages[0] %}!{% endif %}"
    for shown, frames in (("", 1), ("{{ messages[0].content }}", 3)):
        turns = Turns.of(ImmutableSandboxedEnvironment(), LOOPS.replace("{{ BODY }}", body + shown))
        assert turns is not None
        rendered = renderings(monkeypatch)
        for first in "abc":
            talk = [{"role": "user", "content": first}, {"role": "user", "content": "x"}]
            second = "userx" + (first if shown else "")
            assert turns.render({"messages": talk}, {}) == f"user{first}!{first if shown else ''}{second}"
        # Each first message is rendered on its own.
        assert sum(rendered) == 3 + frames
        monkeypatch.undo()


def test_plain_messages_are_shown_as_others_are() -> None:
    """Later messages that have only a role and a text are shown at less cost, or not at all."""
    messages = [{"role": "assistant", "content": " a "}, {"role": "user", "content": "b"}]
    plain = [PlainMessage(**message) for message in messages]
    for name, source in SOURCES.items():
        template = ChatTemplate(source, TOKENS)
        later = template.later(messages[1], add_generation_prompt=True, template_kwargs={})
        assert (later is None) == (name == "varying")
        if later is not None:
            shown = template.render_plain(plain, later)
            assert (shown is None) == (name not in SHOWN_AS)
            assert shown in (None, template.render_later(messages, later))
            assert template.render_plain([PlainMessage("user", "")], later) is None
            assert template.render_plain([PlainMessage("r" * 300, "a")], later) is None


@pytest.mark.parametrize(("roles", "chars"), [(1000, 3), (3, 1000), (3, 5000)])
def test_frames_are_few_and_short(roles: int, chars: int) -> None:
    """Any number of roles, and roles of any length, are shown rightly, and not remembered without end."""
    turns = Turns.of(ImmutableSandboxedEnvironment(), LOOPS.replace("BODY", "message.role ~ message.content"))
    assert turns is not None
    for number in range(roles):
        role = f"{number} " * chars
        talk = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
        assert turns.render({"messages": talk}, {}) == f"usera{role}b"
    assert len(turns._frames) <= 256
    assert sum(len(role) for _, role in turns._frames) <= 256 * 256


@pytest.mark.parametrize(
    ("body", "shown_as"),
    [
        ("{{ m.content }}", str),
        ("{{ m['content'] ~ m.role + m.content }}", str),
        ("{{ m.role | upper }}", str),
        ("{{ m.content | trim }}", str.strip),
        (
            "{% if m.content is string and m.content %}{{ '<' ~ m.content | trim ~ '>' }}{% endif %}",
            str.strip,
        ),
        ("{{ m.content if m.content is not none else 'none' }}", str),
        ("{{ 'none' if not m.content else m.content }}", str),
        ("{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}", str),
        ("{% if loop.first %}{{ 1 }}{% endif %}{{ m.content }}", str),
        ("{{ m.content }}{{ m.content | trim }}", None),
        ("{{ m.content | trim('x') }}", None),
        ("{{ m.content | trim | trim }}", None),
        ("{{ (m.content ~ ' ') | trim }}", None),
        ("{{ m.content | length }}", None),
        ("{{ m.content | tojson }}", None),
        ("{{ m.content or 'none' }}", None),
        ("{{ m.content and 'some' }}", None),
        ("{{ m.content * 2 }}", None),
        ("{{ '%s' % m.content }}", None),
        ("{{ [m.content] }}", None),
        ("{{ m.content[0] }}", None),
        ("{{ m.content.strip() }}", None),
        ("{{ m }}", None),
        ("{{ m.items() | list }}", None),
        ("{{ m['get']('content') }}", None),
        ("{{ m['con' ~ 'tent'] }}", None),
        ("{{ m[m.role] }}", None),
        ("{% if m.content == 'a' %}a{% endif %}", None),
        ("{% if m == messages[0] %}a{% endif %}", None),
        ("{% if 'a' in m.content %}a{% endif %}", None),
        ("{% if m.content | trim %}a{% endif %}", None),
        ("{% if m.content is in ['a'] %}a{% endif %}", None),
        ("{% if m is sameas m.content %}a{% endif %}", None),
        ("{% set c = m.content %}{{ c }}", None),
        ("{% set m = {'content': 'a'} %}{{ m.content }}", None),
        ("{% for m in m.content %}{{ m }}{% endfor %}", None),
        ("{% for c in m.content %}{{ c }}{% endfor %}", None),
        ("{{ raise_exception(m.content) }}", None),
    ],
)
def test_a_content_is_shown_as_it_is_or_in_doubt(body: str, shown_as: object) -> None:
    """Only where nothing hangs on a content, and it is shown in one way, is it put in without rendering."""
    source = f"{{% for m in messages %}}{body}{{% endfor %}}"
    loop = ImmutableSandboxedEnvironment().parse(source).body[0]
    assert isinstance(loop, jinja2.nodes.For)
    assert content_form(loop.body, "m") is shown_as


def renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many turns each rendering had, from now on."""
    rendered: list[int] = []
    render = jinja2.Template.render

    def counted(template: jinja2.Template, variables: dict[str, Any]) -> str:
        rendered.append(len(variables.get("kvroute_turns", ())))
        return render(template, variables)

    monkeypatch.setattr(jinja2.Template, "render", counted)
    return rendered


def test_memory_is_bounded() -> None:
    """What is remembered stays below its bytes, and what was forgotten is rendered anew."""
    environment = ImmutableSandboxedEnvironment()
    form = turn_form(environment, "{% for m in messages %}{{ m.content }};{% endfor %}", "mark")
    assert form is not None
    turns = Turns(form, "mark", capacity_bytes=20_000)
    for round_number in range(3):
        for number in range(100):
            text = f"{number % 50} " * 100
            assert turns.render({"messages": [{"role": "user", "content": text}]}, {}) == f"{text};", (
                round_number
            )
    memory = turns._memory
    kept = [*memory._young.items(), *memory._old.items()]
    assert 0 < sum(len(key[2]) + len(turn) for key, turn in kept) <= 20_000
