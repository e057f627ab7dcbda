"""Loops that search: they end where they have found, and only where nothing else can come of their rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes
from jinja2.utils import Namespace

from tokenization.templates.chat_template import ChatTemplate
from tokenization.templates.environment import ENVIRONMENT, stopping, while_set

SEARCH = """\
{% for m in messages[::-1] %}{% set place = (messages | length - 1) - loop.index0 %}
{%- if ns.searching and m.role == 'user' %}{% set ns.searching = false %}{% set ns.at = place %}{%- endif %}
{%- endfor %}"""


def search(source: str) -> nodes.For:
    """The loop that a source is."""
    (loop,) = ENVIRONMENT.parse(source.replace("\n", "")).find_all(nodes.For)
    return loop


def test_a_search_ends_where_it_has_found() -> None:
    """A loop whose rounds do nothing once a flag is cleared is not gone through to its end."""
    loop = stopping(search(SEARCH))
    assert isinstance(loop.iter, nodes.Call)
    flags = Namespace(searching=True)
    seen = []
    for item in while_set(range(5), flags, "searching"):
        seen.append(item)
        if item == 2:
            flags["searching"] = False
    assert seen == [0, 1, 2]
    assert list(while_set([1, 2], {"searching": False}, "searching")) == [1, 2]
    assert list(while_set([1, 2], Namespace(), "searching")) == [1, 2]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{%- endfor", "x{%- endfor"),
        ("{%- endif", "{%- else %}x{%- endif"),
        ("{%- endif", "{%- elif x %}x{%- endif"),
        ("ns.searching and", "ns.searching or"),
        ("ns.searching and", "not ns.searching and"),
        ("ns.searching and", "m.role and ns.searching and"),
        ("ns.searching and", "ns['searching'] and"),
        ("ns.searching and", "m.searching and"),
        ("place =", "ns ="),
        ("place =", "ns.place ="),
        ("loop.index0", "m.at"),
        ("loop.index0", "loop.revindex0"),
        ("| length", "| first"),
        ("messages[::-1]", "messages[::-1] if m"),
        ("messages[::-1]", "messages[::-1] recursive"),
        ("{%- endfor", "{%- else %}x{%- endfor"),
    ],
)
def test_other_loops_are_gone_through_to_their_end(old: str, new: str) -> None:
    """Where a round may do anything without its flag, or know how many there are, none is passed over."""
    loop = search(SEARCH.replace(old, new))
    assert new in SEARCH.replace(old, new)
    assert stopping(loop) is loop


LOOKING = (Path(__file__).parents[2] / "benchmarks/reasoning_template.jinja").read_text(encoding="utf-8")
TEMPLATES = {
    "looking": LOOKING,
    "searching": "{% set ns = namespace(searching=true, at=-1) %}"
    + SEARCH
    + "{{ ns.at }}{% for m in messages %}{{ loop.index0 - ns.at }}{{ m.content }}{% endfor %}",
}
messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "tool", "system"]),
        st.sampled_from(["a", "<b", "x</think>y"]),
    ),
    max_size=8,
)


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_show_the_same_with_and_without_idle_rounds(name: str) -> None:
    """A template that searches shows what Jinja shows of it as it is written."""
    template, plain = ChatTemplate(TEMPLATES[name], {}), ENVIRONMENT.from_string(TEMPLATES[name])

    @settings(deadline=None)
    @given(messages)
    def show_the_same(talk: list[dict[str, str]]) -> None:
        expected = plain.render(messages=talk, tools=None, documents=None, add_generation_prompt=True)
        assert template.render(talk) == expected

    show_the_same()


def test_a_rewritten_templates_function_is_not_a_clients() -> None:
    """A client's template options do not stand for the function that ends a search."""
    template = ChatTemplate(TEMPLATES["searching"], {})
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template.render(talk, template_kwargs={"kvroute_while": "x"}) == template.render(talk)
